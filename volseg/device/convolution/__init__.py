"""Convolutions for cases in which the library is slow, or its counters overflow."""
