"""A norm and the following activation, on one slab."""
