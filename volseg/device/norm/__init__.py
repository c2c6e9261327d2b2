"""A norm and the activation behind it, on one slab."""
