"""Ways to run a training step over devices: which there are, what each needs, and which to take.

`listing` says which candidates there are, `running` lets each be followed without a GPU by the strategy that would run
it, and `choosing` takes the fastest one that fits.
"""
