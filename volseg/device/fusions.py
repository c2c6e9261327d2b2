"""Names of fused kernels, which can be switched off for a comparison.

Results are the same up to round-off either way; `"doubling"` also decides the type of an upsampled volume under
autocast. ``workflows/benchmarks/results/networks_h200_fusions.json`` has a step with each of them off.
"""

from collections.abc import Iterator
from contextlib import contextmanager

NAMES = (
    "pooled statistics",
    "given statistics",
    "activations",
    "sums",
    "no bias gradients",
    "waiting biases",
    "doubling",
    "few channels",
    "depthwise",
    "gates",
    "pairs",
    "zero channels",
    "attention",
    "layer norms",
)
"""Statistics of groups and batches, and of norms in evaluation; PReLU, sigmoid, SiLU and GELU after norms; sums fused
with norms; bias gradients that are zero; biases that a norm removes; volumes of twice the size; convolutions of few
channels to few; depthwise ones; volumes times one channel; convolutions of few channels over groups of voxels, or with
channels of zeros; attention without stored scores; layer norms of short lines."""

_off: set[str] = set()


def is_on(name: str) -> bool:
    """Return whether a fusion is on; all are by default."""
    assert name in NAMES, name
    return name not in _off


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Switch fusions off in this block.

    Raises
    ------
    ValueError
        If no fusion has that name.
    """
    if unknown := set(names) - set(NAMES):
        raise ValueError(f"unknown fusions {sorted(unknown)}; available: {', '.join(NAMES)}")
    before = set(_off)
    _off.update(names)
    try:
        yield
    finally:
        _off.clear()
        _off.update(before)
