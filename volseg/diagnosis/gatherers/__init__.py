"""Gather the sections of the facts: each ``gather_SECTION`` runs in a separate process."""
