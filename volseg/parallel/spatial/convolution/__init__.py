"""Convolution of a slab whose halo arrives in place."""
