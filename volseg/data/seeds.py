"""Seeds of what is drawn anew for every epoch or batch, so that no generator's state has to be saved."""

import numpy as np

__all__ = ["mix_seed"]


def mix_seed(*numbers: int) -> int:
    """Return the seed for torch that belongs to some numbers: an experiment's seed, an epoch, a position.

    >>> mix_seed(0, 1, 2) == mix_seed(0, 1, 2) != mix_seed(0, 2, 1)
    True
    """
    # SeedSequence spreads neighbouring numbers over unrelated seeds; torch takes a signed 64-bit seed.
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]) >> 1
