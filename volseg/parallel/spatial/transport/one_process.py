"""Shards on devices of this process: plain tensor copies, so autograd's own threads run the backward pass."""

import weakref
from collections.abc import Sequence
from functools import cached_property
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor

from volseg.device.first_order import LinearMap, first_order
from volseg.device.peer.values import ValueExchange, ValuesOfSlabs
from volseg.device.triton_tiles import takes
from volseg.errors import ParallelError
from volseg.parallel.buckets import GradientRoom, check_hooks
from volseg.parallel.fixed_order import fold
from volseg.parallel.spatial.plan.shards import Fetch
from volseg.parallel.spatial.transport.communicator import Communicator, narrow_to
from volseg.parallel.spatial.transport.pieces import join_pieces, start_total


class LocalDevices(Communicator):
    """Devices of this process, row-major over the grid; a device may hold several shards.

    Parameters
    ----------
    devices
        One device per shard.
    grid
        Shards along each mesh axis; ``(len(devices),)`` by default.
    fixed_order
        See ``Communicator``.
    """

    def __init__(
        self, devices: Sequence[str | int | torch.device], grid: Sequence[int] | None = None, fixed_order: bool = False
    ) -> None:
        self.fixed_order = fixed_order and len(devices) > 1
        self.devices = [torch.device(device) for device in devices]
        self.grid = tuple(grid) if grid is not None else (len(self.devices),)
        if prod(self.grid) != len(self.devices) or not self.devices:
            raise ParallelError(f"a grid of {self.grid} needs {prod(self.grid)} devices, got {len(self.devices)}")
        self.coordinates = list(product(*map(range, self.grid)))
        self.home = self.devices[0]

    @cached_property
    def values(self) -> ValueExchange | None:  # type: ignore[override]
        """Exchange of a few values in kernels in a fixed order, as between processes; made at the first use."""
        run = self.fixed_order and takes(torch.empty(0, device=self.home))
        return ValuesOfSlabs(len(self.devices), self.home) if run else None

    def fetch(self, slabs: Sequence[Tensor], plan: Fetch) -> list[Tensor]:
        """Copy planes between devices; see ``Communicator``."""
        if list(plan.wanted) == plan.owned:
            return list(slabs)
        if not self.fixed_order:
            return self.move(slabs, plan)
        if plan.stays:
            return self.take_own(slabs, plan)

        def move(*own: Tensor) -> tuple[Tensor, ...]:
            return tuple(self.move(own, plan))

        return list(LinearMap.apply(move, lambda *gradients: self.give_back(gradients, plan), *slabs))

    def move(self, slabs: Sequence[Tensor], plan: Fetch) -> list[Tensor]:
        """Copy planes between devices, even if none moves; arguments as in ``fetch``.

        With a fixed order of sums, assembled planes have the memory layout that processes assemble from messages: a
        library may add in another order in another layout.
        """
        axis, dim, held = plan.axis, plan.dim, dict(zip(self.coordinates, slabs, strict=True))
        fetched = []
        for coordinates, slab, device in zip(self.coordinates, slabs, self.devices, strict=True):
            here = coordinates[axis]
            pieces = []
            for move in (move for move in plan.moves if move.target == here):
                source = held[(*coordinates[:axis], move.source, *coordinates[axis + 1 :])]
                planes = source.narrow(dim, move.start - plan.owned[move.source][0], move.stop - move.start)
                pieces.append(planes if move.source == here else self._send(planes, device))
            if not pieces:
                pieces = [slab.narrow(dim, 0, 0)]
            if self.fixed_order:  # a process copies its wanted planes even if they are one own piece
                fetched.append(join_pieces(pieces, dim, slab))
            else:
                fetched.append(pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim))
        return fetched

    def _send(self, planes: Tensor, device: torch.device) -> Tensor:
        if not self.fixed_order:
            return planes.to(device, non_blocking=True)
        return planes.new_empty(planes.shape, device=device).copy_(planes, non_blocking=True)

    def give_back(self, gradients: Sequence[Tensor], plan: Fetch) -> list[Tensor]:
        """Return every plane to its owner and add returned planes, the owner's first, then by shard.

        Parameters
        ----------
        gradients
            Gradients of the result of ``fetch``.
        plan
            Plan of the ``fetch``.
        """
        axis, dim, held = plan.axis, plan.dim, dict(zip(self.coordinates, gradients, strict=True))
        totals = []
        for coordinates, device in zip(self.coordinates, self.devices, strict=True):
            here = coordinates[axis]
            first, last = plan.owned[here]
            kept: list[tuple[int, Tensor]] = []
            arrivals: list[tuple[int, Tensor]] = []
            for move in (move for move in plan.moves if move.source == here):
                arrived = held[(*coordinates[:axis], move.target, *coordinates[axis + 1 :])]
                planes = arrived.narrow(dim, move.place, move.stop - move.start)
                (kept if move.target == here else arrivals).append((move.start - first, planes))
            total = start_total(held[coordinates], dim, last - first, *(kept.pop(0) if kept else (0, None)))
            for start, planes in (*kept, *arrivals):
                total.narrow(dim, start, planes.shape[dim]).add_(planes.to(device, non_blocking=True))
            totals.append(total)
        return totals

    def collect(self, partials: Sequence[Tensor]) -> Tensor:
        """Stack the shards' values on the home device; a single shard's value is not copied."""
        if len(partials) == 1:
            return partials[0].unsqueeze(0)
        return torch.stack([partial.to(self.home, non_blocking=True) for partial in partials])

    def gather(self, slabs: Sequence[Tensor], dims: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Assemble the volume on the home device."""
        del sizes
        parts = list(slabs)
        for dim, count in zip(reversed(dims), reversed(self.grid), strict=True):
            rows = [parts[start : start + count] for start in range(0, len(parts), count)]
            parts = [
                torch.cat(
                    [first.to(self.home, non_blocking=True), *(self._send(part, self.home) for part in rest)], dim
                )
                for first, *rest in rows
            ]
        return parts[0]

    def spread(self, whole: Tensor) -> list[Tensor]:
        """Copy a whole value to each device; with a fixed order, gradients add up by a tree, as between processes."""
        if not self.fixed_order:
            return [whole.to(device, non_blocking=True) for device in self.devices]
        home = whole.device

        def copy(own: Tensor) -> tuple[Tensor, ...]:
            return tuple(_copy_to(own, device) for device in self.devices)

        def add_up(*gradients: Tensor) -> Tensor:
            return fold([gradient.to(home, non_blocking=True).contiguous() for gradient in gradients], torch.add)

        return list(LinearMap.apply(copy, add_up, whole))

    def cut(self, whole: Tensor, dims: Sequence[int]) -> list[Tensor]:
        """Copy each slab to its device; with a fixed order of sums, in the memory layout of a process."""
        owned = self.owned([whole.shape[dim] for dim in dims])
        slabs = [narrow_to(whole, dims, spans_) for spans_ in owned]
        if self.fixed_order:
            slabs = [slab.clone() for slab in slabs]
        return [slab.to(device, non_blocking=True) for slab, device in zip(slabs, self.devices, strict=True)]

    def share(self, parameters: Sequence[Tensor]) -> list[list[Tensor]]:
        """Copy each parameter once to each device; with a fixed order of sums, once for each shard."""
        if self.fixed_order:
            shared = _ShareLocally.apply(self, *parameters)
            count = len(self.devices)
            return [list(shared[first : first + count]) for first in range(0, len(shared), count)]
        copies: dict[torch.device, list[Tensor]] = {}
        for device in dict.fromkeys(self.devices):
            copies[device] = [parameter.to(device, non_blocking=True) for parameter in parameters]
        return [[copies[device][index] for device in self.devices] for index in range(len(parameters))]


class _ShareLocally(torch.autograd.Function):
    """Pass parameters to every shard; gradients are added in the same way, in one piece of memory as in processes.

    The address of a gradient determines the order in which a library computes its norm.
    """

    @staticmethod
    def forward(ctx: Any, communicator: LocalDevices, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.count, ctx.parameters = len(communicator.devices), [parameter.detach() for parameter in parameters]
        ctx.given = [weakref.ref(parameter) for parameter in parameters]
        ctx.set_materialize_grads(False)
        return tuple(_copy_to(parameter, device) for parameter in parameters for device in communicator.devices)

    @staticmethod
    @first_order
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        by_parameter = [gradients[first : first + ctx.count] for first in range(0, len(gradients), ctx.count)]
        firsts = [next((gradient for gradient in own if gradient is not None), None) for own in by_parameter]
        check_hooks(ctx.given, firsts)
        used = [first is not None for first in firsts]
        if not any(used):
            return None, *([None] * len(used))
        home, room = ctx.parameters[0].device, GradientRoom(ctx.parameters)
        pieces = [
            room.gather([None if g is None else g.to(home, non_blocking=True) for g in of_shard])
            for of_shard in zip(*by_parameter, strict=True)
        ]
        summed = room.split(fold(pieces, torch.add))
        return None, *(total if known else None for total, known in zip(summed, used, strict=True))


def _copy_to(value: Tensor, device: torch.device) -> Tensor:
    return value.view_as(value) if value.device == device else value.to(device, non_blocking=True)
