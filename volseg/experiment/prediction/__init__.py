"""Open trained networks of any source, predict files with them, and show or export them."""
