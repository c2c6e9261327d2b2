"""Run the real step on fake tensors, and record its memory, kernels and messages."""
