"""Recompute activations, or keep them in host memory."""
