"""Capture the work of a batch on each stage, and replay it."""
