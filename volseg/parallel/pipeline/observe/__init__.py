"""Trace a forward pass: calls, their order and their cost."""
