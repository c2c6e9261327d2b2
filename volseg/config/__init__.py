"""Typed configuration: schema, YAML loading, overrides, and registries that map names to components."""
