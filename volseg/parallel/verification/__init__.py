"""Whether a network over several devices computes what it computes on one."""
