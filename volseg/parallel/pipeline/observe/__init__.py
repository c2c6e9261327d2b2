"""Follow a forward pass: what it calls, in which order, at what cost."""
