"""Run the real training step on fake tensors, and record its memory, kernels and messages."""
