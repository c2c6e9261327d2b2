"""A waiting step of attention, the inputs of its steps, and the cut of a product of two volumes.

Each shard computes its own part of attention. ``scores`` makes the steps.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from volseg.errors import UnsupportedOperatorError
from volseg.parallel.spatial.context import active_autocast_dtype
from volseg.parallel.spatial.pending import Waiting
from volseg.parallel.spatial.plan.shards import Merged
from volseg.parallel.spatial.sources import Moment, Recipe, Unchanged
from volseg.parallel.spatial.transport.halo import Halo, Wait
from volseg.parallel.spatial.volume import ShardedVolume


def is_cut_once(volume: Any) -> bool:
    """Return whether a value is a volume with one cut dim, and not merged if on a single shard."""
    if not isinstance(volume, ShardedVolume) or len(volume.dims) != 1:
        return False
    return volume.context.communicator.num_shards > 1 or volume.merged is None


@dataclass(frozen=True, slots=True)
class Cut:
    """The cut of a product, and whether its second factor is gathered."""

    dim: int
    merged: Merged | None
    gathers: bool = False


def find_cut(first: ShardedVolume, second: ShardedVolume, along: int, summed: int) -> Cut | None:
    """Return the cut of a product of two volumes by slabs of the first; None if slabs cannot compute the product.

    Parameters
    ----------
    first
        A volume ``(..., N, K)``.
    second
        A volume with the same dims in front of the last two.
    along, summed
        Dim of ``second`` that each row of ``first`` meets whole, and the dim that the product sums over.
    """
    (dim,), rows = first.dims, first.ndim - 2
    if first.context.communicator.num_shards == 1:  # the dim only tells where a cut would be
        if dim != first.ndim - 1:
            return Cut(dim, None)
        if second.dims[0] == summed:
            return None
        return Cut(second.dims[0] if second.dims[0] < rows else first.ndim - 1, None)
    if dim < rows:
        return Cut(dim, first.merged) if (second.dims, second.merged) == (first.dims, first.merged) else None
    if dim > rows or second.dims != (along,) or (second.merged is not None and second.merged.outer > 1):
        return None
    return Cut(dim, first.merged, gathers=True)


def list_shapes(volume: ShardedVolume, *, gathered: bool = False) -> list[tuple[int, ...]]:
    """Return the shape of every shard's slab, or of the whole with ``gathered``; it is the same in all processes."""
    (dim,), (extents,) = volume.dims, volume.extents()
    if gathered or len(extents) == 1:
        return [tuple(volume.shape)] * len(extents)
    return [(*volume.shape[:dim], extent, *volume.shape[dim + 1 :]) for extent in extents]


Compute = Callable[[Sequence[Tensor]], list[Tensor]]
"""Computes a step from the slabs of the previous step."""


@dataclass(frozen=True, slots=True)
class AddendPlace:
    """The matrices of scores that a term is added to (see ``device.attention``), and the shape of a term's matrix."""

    every: int
    count: int
    sides: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Steps:
    """Inputs and settings from which a volume of scores or weights is computed.

    Attributes
    ----------
    queries
        ``(..., N, F)`` of each slab.
    keys
        ``(..., M, F)`` for each slab: its own, or all if the tokens are cut.
    sizes, cut
        Sizes of the whole product in front of its last two dims, and its cut.
    factor
        Factor of the product.
    terms, places
        Added tensors in the network's shape, and their places: for each term, one per slab.
    is_softened
        Whether a softmax over the last dim was taken.
    """

    queries: tuple[Tensor, ...]
    keys: tuple[Tensor, ...]
    sizes: tuple[int, ...]
    cut: Cut
    factor: float = 1.0
    terms: tuple[tuple[Tensor, ...], ...] = ()
    places: tuple[tuple[AddendPlace, ...], ...] = ()
    is_softened: bool = False

    @property
    def is_bare(self) -> bool:
        """Whether the scores are only a product times a factor."""
        return not self.terms and not self.is_softened


class WaitingScores(Waiting):
    """A step of attention.

    Parameters
    ----------
    steps
        All steps so far.
    before
        Volume of the previous step; None for the product.
    compute
        Computes this step from the previous step; the product is computed from the queries.
    stand_ins
        Stand-ins for the slabs.
    unchanged
        Tensors that all steps read.

    Attributes
    ----------
    is_taken
        Whether a product with values was computed together with it.
    written
        The written slabs, if any: an in-place change of them changes the input of later steps.
    """

    refusal = (
        "the queries, the keys, a bias or a mask of attention were changed in place before its scores were used; do "
        "that out of place, or use the scores before"
    )

    def __init__(
        self,
        steps: Steps,
        before: ShardedVolume | None,
        compute: Compute,
        stand_ins: list[Tensor],
        unchanged: Unchanged,
    ) -> None:
        self.steps, self.before, self.compute = steps, before, compute
        self.stand_ins, self.room, self.unchanged = list(stand_ins), 0, unchanged
        self.earlier = None if before is None else before.pending
        self.moment = Moment([term for term in chain(*steps.terms) if term.is_leaf])
        self.autocast = active_autocast_dtype(self.stand_ins[0])
        self.is_taken = False
        self.written: Unchanged | None = None

    def write(self, halos: Sequence[Halo]) -> tuple[list[Tensor], Recipe | None, Wait | None]:
        """Compute this step and the steps before it with torch."""
        del halos
        given = self.steps.queries if self.before is None else self.before.slabs
        with self.moment.restored(), self._autocast_again():
            return self.compute(given), None, None

    def check(self) -> None:
        """Refuse to write from changed tensors, including scores that were read and changed in the meantime."""
        super().check()
        step = self.earlier
        while isinstance(step, WaitingScores):
            if step.written is not None and not step.written.holds():
                raise UnsupportedOperatorError(
                    "scores of attention were changed in place after a softmax or a sum had read them, and what that "
                    "returned is read only now: do that out of place, or read it before"
                )
            step = step.earlier

    def settle(self, volume: ShardedVolume, halos: Sequence[Halo] = ()) -> Wait | None:
        """Write the slabs, and note their versions."""
        wait = super().settle(volume, halos)
        self.written = Unchanged(volume._slabs)
        return wait

    def settle_apart(self, volume: ShardedVolume) -> None:
        """Write, unless a product included the step: it is rarely read again, and invalid reads are refused."""
        if not self.is_taken:
            self.settle(volume)

    def is_now(self) -> bool:
        """Return whether the modes, and the terms that are trained, are the same now."""
        modes = self.moment.is_now() and self.autocast == active_autocast_dtype(self.stand_ins[0])
        return modes and self.moment.trains_alike()

    def _autocast_again(self) -> AbstractContextManager[Any]:
        device = self.stand_ins[0].device.type
        if self.autocast == active_autocast_dtype(self.stand_ins[0]):
            return nullcontext()
        return torch.autocast(device, self.autocast, enabled=self.autocast is not None)
