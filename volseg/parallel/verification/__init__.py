"""Check that a network over several devices computes the same as on one."""
