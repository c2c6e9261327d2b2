"""Who computes Dice plus cross entropy: Triton's kernels where they take the tensor, else plain torch."""

from collections.abc import Sequence

from torch import Tensor

from volseg.device.triton_tiles import takes
from volseg.losses.dice import passes, reference
from volseg.losses.dice.terms import Terms

__all__ = ["combine", "gradient", "sums"]


def sums(logits: Tensor, label: Tensor, squared: bool) -> Tensor:
    """Compute ``reference.sums``; here the parts may be many."""
    compute = passes.sums if takes(logits) else reference.sums
    return compute(logits, label, squared)


def combine(sums: Tensor, terms: Terms, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Compute ``reference.combine``."""
    compute = passes.combine if takes(sums) else reference.combine
    return compute(sums, terms, shape)


def gradient(logits: Tensor, label: Tensor, slopes: Tensor, squared: bool) -> Tensor:
    """Compute ``reference.gradient``."""
    compute = passes.gradient if takes(logits) else reference.gradient
    return compute(logits, label, slopes, squared)
