"""Activations that are computed again, or wait in host memory."""
