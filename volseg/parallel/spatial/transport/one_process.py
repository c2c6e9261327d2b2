"""Shards on devices of this process: plain tensor copies, so autograd's own threads run the backward pass."""

from collections.abc import Sequence
from itertools import product
from math import prod

import torch
from torch import Tensor

from volseg.errors import ParallelError
from volseg.parallel.spatial.plan.shards import Span, spans, transfers
from volseg.parallel.spatial.transport.communicator import Communicator, narrow_to

__all__ = ["LocalDevices"]


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
        self,
        devices: Sequence[str | int | torch.device],
        grid: Sequence[int] | None = None,
        fixed_order: bool = False,
    ) -> None:
        self.fixed_order = fixed_order
        self.devices = [torch.device(device) for device in devices]
        self.grid = tuple(grid) if grid is not None else (len(self.devices),)
        if prod(self.grid) != len(self.devices) or not self.devices:
            raise ParallelError(f"a grid of {self.grid} needs {prod(self.grid)} devices, got {len(self.devices)}")
        self.coordinates = list(product(*map(range, self.grid)))
        self.home = self.devices[0]

    def fetch(
        self, slabs: Sequence[Tensor], axis: int, dim: int, size: int, wanted: Sequence[Span], unit: int = 1
    ) -> list[Tensor]:
        """Copy planes between devices; see ``Communicator``. A slab that stays as it is comes back itself."""
        owned = spans(size, self.grid[axis], unit)
        if list(wanted) == owned:  # no view of it either, whose backward pass would copy the gradient
            return list(slabs)
        moves = transfers(size, wanted, unit)
        held = dict(zip(self.coordinates, slabs, strict=True))
        fetched = []
        for coordinates, slab, device in zip(self.coordinates, slabs, self.devices, strict=True):
            here = coordinates[axis]
            pieces = []
            for move in (move for move in moves if move.target == here):
                source = held[(*coordinates[:axis], move.source, *coordinates[axis + 1 :])]
                planes = source.narrow(dim, move.start - owned[move.source][0], move.stop - move.start)
                pieces.append(planes.to(device, non_blocking=True))
            if not pieces:
                pieces = [slab.narrow(dim, 0, 0)]
            fetched.append(pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim))
        return fetched

    def collect(self, partials: Sequence[Tensor]) -> Tensor:
        """Stack the shards' values on the home device; one shard's is not copied."""
        if len(partials) == 1:
            return partials[0].unsqueeze(0)
        return torch.stack([partial.to(self.home, non_blocking=True) for partial in partials])

    def gather(self, slabs: Sequence[Tensor], dims: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Assemble the volume on the home device."""
        del sizes
        parts = [slab.to(self.home, non_blocking=True) for slab in slabs]
        for dim, count in zip(reversed(dims), reversed(self.grid), strict=True):
            parts = [torch.cat(parts[start : start + count], dim) for start in range(0, len(parts), count)]
        return parts[0]

    def spread(self, whole: Tensor) -> list[Tensor]:
        """Copy a whole value to each device."""
        return [whole.to(device, non_blocking=True) for device in self.devices]

    def cut(self, whole: Tensor, dims: Sequence[int]) -> list[Tensor]:
        """Copy each slab to its device."""
        owned = self.owned([whole.shape[dim] for dim in dims])
        return [
            narrow_to(whole, dims, spans_).to(device, non_blocking=True)
            for spans_, device in zip(owned, self.devices, strict=True)
        ]

    def share(self, parameters: Sequence[Tensor]) -> list[list[Tensor]]:
        """Copy each parameter once to each device."""
        copies: dict[torch.device, list[Tensor]] = {}
        for device in dict.fromkeys(self.devices):
            copies[device] = [parameter.to(device, non_blocking=True) for parameter in parameters]
        return [[copies[device][index] for device in self.devices] for index in range(len(parameters))]
