"""Compute the gradient of a convolution's input from its output's gradient and the neighbours' planes around it.

If there is room around a gradient, as norms leave it, the planes are received there. Otherwise a small gradient is
copied between the planes. The copy of a large one would take as long as half a norm: it is differentiated in place,
as if it had no neighbours, while the planes travel; their share of the slab's outermost planes is computed from the
received planes only, between zeros.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from volseg.device.convolution import choice
from volseg.device.convolution.settings import Settings
from volseg.device.layout import DIM, layout_of
from volseg.parallel.spatial.convolution.plan import AroundPlan
from volseg.parallel.spatial.transport.halo import Halo, Wait, start_filling, start_receiving
from volseg.parallel.spatial.transport.pieces import extend, get_halo_room

LARGE = 2**26
"""Bytes of a slab whose copy takes longer (33 us on an H200) than the few kernels for the outermost planes."""

Found = tuple[Tensor | None, Tensor | None]
"""Gradients of the input's own planes and of the weight; None if not needed."""


class SurroundedGradients:
    """Gradients of the outputs of this process's slabs, while the neighbours' planes arrive.

    Parameters
    ----------
    plan
        Plan of the convolution.
    gradients
        Gradients of the outputs' own planes.
    channels_last
        As in ``choice.differentiate``.
    """

    def __init__(self, plan: AroundPlan, gradients: Sequence[Tensor], channels_last: bool) -> None:
        self.plan, self.gradients, self.channels_last = plan, gradients, channels_last
        pairs = list(zip(gradients, plan.halos, strict=True))
        self.is_apart = plan.alone is not None and all(
            own.nbytes >= LARGE and get_halo_room(own) < max(halo.own) for own, halo in pairs
        )
        if self.is_apart:
            self.edges = [[_make_edge(*pair, plan, side) for side in (0, 1)] for pair in pairs]
            arriving = [
                [None if edge is None else _view_halo(edge, halo, side) for side, edge in enumerate(edges)]
                for edges, halo in zip(self.edges, plan.halos, strict=True)
            ]
            self.wait: Wait | None = start_receiving(gradients, plan.halos, arriving)
        else:
            self.around = [extend(own, get_halo_room(own), halo.own) for own, halo in pairs]
            self.wait = start_filling(self.around, plan.halos)

    def differentiate_inputs(self, slabs: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor | None]:
        """Return only the gradients of the slabs; arguments as in ``differentiate``."""
        return [own for own, _ in self.differentiate(slabs, weights, needs_input=True, needs_weight=False)]

    def differentiate(
        self, slabs: Sequence[Tensor], weights: Sequence[Tensor], needs_input: bool, needs_weight: bool
    ) -> list[Found]:
        """Return the gradients of each slab and of its weight.

        Parameters
        ----------
        slabs
            Their own planes.
        weights
            One for each slab.
        needs_input, needs_weight
            Whether the gradient is needed.
        """
        plan, needed = self.plan, (needs_input, needs_weight)
        if not self.is_apart:
            self._wait_once()
            rows = zip(self.around, slabs, weights, strict=True)
            return [self._differentiate(*row, plan.settings, needed) for row in rows]
        assert plan.alone is not None
        rows = zip(self.gradients, slabs, weights, strict=True)
        found = [self._differentiate(*row, plan.alone, needed) for row in rows]
        self._wait_once()
        for edges, slab, weight, own in zip(self.edges, slabs, weights, found, strict=True):
            for side, edge in enumerate(edges):
                if edge is not None:
                    self._add_edge(edge, side, slab, weight, own)
        return found

    def _add_edge(self, edge: Tensor, side: int, slab: Tensor, weight: Tensor, own: Found) -> None:
        """Add the share of a neighbour's planes to a slab's gradients."""
        count = (edge.shape[DIM] - self.plan.reach) // self.plan.step + 1
        start = slab.shape[DIM] - count if side else 0
        needed = own[0] is not None, own[1] is not None
        more = self._differentiate(edge, slab.narrow(DIM, start, count), weight, self.plan.settings, needed)
        if own[0] is not None and more[0] is not None:
            own[0].narrow(DIM, start, count).add_(more[0])
        if own[1] is not None and more[1] is not None:
            own[1].add_(more[1])

    def _differentiate(
        self, gradient: Tensor, slab: Tensor, weight: Tensor, settings: Settings, needed: tuple[bool, bool]
    ) -> Found:
        asked = *needed, False
        found = choice.differentiate(gradient, slab, weight, None, settings, self.channels_last, asked)
        return found[0], found[1]

    def _wait_once(self) -> None:
        if self.wait is not None:  # a convolution of joined inputs is differentiated part by part
            self.wait()
            self.wait = None


def _make_edge(gradient: Tensor, halo: Halo, plan: AroundPlan, side: int) -> Tensor | None:
    """Return zeros for the output's planes that a slab's outermost planes reach; None without a neighbour."""
    if halo.neighbours[side] is None or not halo.own[side]:
        return None
    shape, reached = list(gradient.shape), -(-halo.own[side] // plan.step)
    shape[DIM] = (reached - 1) * plan.step + plan.reach
    layout = layout_of(gradient)
    return torch.empty(shape, dtype=gradient.dtype, device=gradient.device, memory_format=layout).zero_()


def _view_halo(edge: Tensor, halo: Halo, side: int) -> Tensor:
    planes = halo.own[side]
    return edge.narrow(DIM, edge.shape[DIM] - planes if side else 0, planes)
