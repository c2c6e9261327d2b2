"""Operators that wait until the next operator is known."""
