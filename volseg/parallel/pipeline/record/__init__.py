"""Record what a batch launches on each stage, and replay it."""
