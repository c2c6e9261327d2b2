"""Typed configuration: schema, YAML loading, overrides, and the tables that turn a name into a component."""
