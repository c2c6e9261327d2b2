"""Convolutions where the library's are slow or do not count far enough."""
