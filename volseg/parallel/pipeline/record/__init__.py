"""Record what a batch gives each stage to do, and replay it."""
