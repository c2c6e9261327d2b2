"""A step of attention whose volume waits, and what it follows from; see ``scores`` for who makes them."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from volseg.errors import UnsupportedOperatorError
from volseg.parallel.spatial.context import find_autocast
from volseg.parallel.spatial.lazy.product_cut import Cut
from volseg.parallel.spatial.moment import Moment
from volseg.parallel.spatial.pending import Waiting
from volseg.parallel.spatial.recipe import Recipe
from volseg.parallel.spatial.transport.halo import Halo, Wait
from volseg.parallel.spatial.versions import Unchanged
from volseg.parallel.spatial.volume import ShardedVolume

__all__ = ["AddendPlace", "Compute", "Steps", "WaitingScores"]

Compute = Callable[[Sequence[Tensor]], list[Tensor]]
"""Of the slabs."""


@dataclass(frozen=True, slots=True)
class AddendPlace:
    """Which matrices of scores a term is added to (see ``device.attention``), and the shape of one of its own."""

    every: int
    count: int
    sides: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Steps:
    """What a volume of scores, or of weights, follows from.

    Attributes
    ----------
    queries
        ``(..., N, F)`` of each slab.
    key
        ``(..., M, F)``, not gathered yet.
    sizes, cut
        Those in front of the last two dims of the whole product, and how it is cut.
    factor
        Of their product.
    terms, places
        What is added, as the network has it, and to what: of each term, for each slab.
    is_softened
        Whether a softmax over the last dim was taken.
    """

    queries: tuple[Tensor, ...]
    key: ShardedVolume
    sizes: tuple[int, ...]
    cut: Cut
    factor: float = 1.0
    terms: tuple[tuple[Tensor, ...], ...] = ()
    places: tuple[tuple[AddendPlace, ...], ...] = ()
    is_softened: bool = False

    @property
    def is_bare(self) -> bool:
        """Whether it is a product times a factor."""
        return not self.terms and not self.is_softened


class WaitingScores(Waiting):
    """A step of attention.

    Parameters
    ----------
    steps
        All so far.
    before
        The volume of the step before; None of the product.
    compute
        This step, of the one before; of the product it is given the queries.
    stand_ins
        Of the slabs.
    unchanged
        What all steps read.

    Attributes
    ----------
    is_taken
        Whether a product with values was computed together with it.
    is_alone
        Whether it is written only when it is read, because its forward pass is over.
    is_stale
        Whether a tensor has lost its history since, which may be one that it is written from.
    written
        The slabs that were written, once they are: who changes them in place changes what later steps are read from.
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
        stand_ins: Sequence[Tensor],
        unchanged: Unchanged,
    ) -> None:
        self.steps, self.before, self.compute = steps, before, compute
        self.stand_ins, self.room, self.unchanged = list(stand_ins), 0, unchanged
        self.earlier = None if before is None else before.pending
        self.moment = Moment([term for term in chain(*steps.terms) if term.is_leaf])
        self.autocast = find_autocast(self.stand_ins[0])
        self.is_taken = self.is_alone = self.is_stale = False
        self.written: Unchanged | None = None

    def write(self, halos: Sequence[Halo]) -> tuple[list[Tensor], Recipe | None, Wait | None]:
        """Compute this step by torch, and those before it."""
        del halos
        given = self.steps.queries if self.before is None else self.before.slabs
        with self.moment.restored(), self._autocast_again():
            return self.compute(given), None, None

    def check(self) -> None:
        """Refuse to write from what was changed, scores among it that somebody has seen meanwhile."""
        super().check()
        if self.is_stale:
            raise UnsupportedOperatorError(
                "scores of attention are read after a tensor was detached in place, which they may be computed from; "
                "use detach(), or read them before"
            )
        step = self.earlier
        while isinstance(step, WaitingScores):
            if step.written is not None and not step.written.holds():
                raise UnsupportedOperatorError(
                    "scores of attention were changed in place after a softmax or a sum had read them, and what that "
                    "returned is read only now: do that out of place, or read it before"
                )
            step = step.earlier

    def settle(self, volume: ShardedVolume, halos: Sequence[Halo] = ()) -> Wait | None:
        """Write the slabs, and note how they are."""
        wait = super().settle(volume, halos)
        self.written = Unchanged(volume._slabs)
        return wait

    def settle_apart(self, volume: ShardedVolume) -> None:
        """Write, unless a product has taken the step along: it is hardly read again, and refused where it cannot be."""
        if not self.is_taken and not self.is_alone:
            self.settle(volume)

    @property
    def reads_messages(self) -> bool:
        """Whether keys are gathered for it, before anything is changed in place."""
        return self.steps.cut.gathers and not self.is_taken and not self.is_alone

    def wait_for_readers(self) -> None:
        """Be written only when read: who has it yet is each process's own matter."""
        self.is_alone = True

    def settle_with_history(self, volume: ShardedVolume) -> None:
        """Write; but only who reads it may gather keys where processes may have thrown it away."""
        if self.steps.cut.gathers and not self.reads_messages:
            self.is_stale = True
        else:
            self.settle(volume)

    def is_now(self) -> bool:
        """Say whether what is computed now is computed in the same modes, and trains the same terms."""
        modes = self.moment.is_now() and self.autocast == find_autocast(self.stand_ins[0])
        return modes and self.moment.trains_alike()

    def _autocast_again(self) -> AbstractContextManager[Any]:
        device = self.stand_ins[0].device.type
        if self.autocast == find_autocast(self.stand_ins[0]):
            return nullcontext()
        return torch.autocast(device, self.autocast, enabled=self.autocast is not None)
