"""Gatherers of facts: a module each, whose ``gather`` runs in a process of its own."""
