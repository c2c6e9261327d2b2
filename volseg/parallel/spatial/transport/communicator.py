"""Interface of the movements of tensors between shards, each with its gradient.

Two kinds of value exist. A *slab* is one shard's part of a volume: the shards' values differ, and a gradient belongs
to its shard only. A *whole* value is equal on every shard, and so is its gradient, which is always the full one.
The gradient of every movement follows from this:

=============  ====================  ========================================
movement       forward               backward
=============  ====================  ========================================
``fetch``      slabs to slabs        planes go back to their owner, and add up
``collect``    slabs to whole        each shard takes its part; no sum
``gather``     slabs to whole        each shard takes its slab; no sum
``spread``     whole to slabs        summed over the shards
``cut``        whole to slabs        gathered
``share``      parameters to slabs   summed over the shards, a bucket at a time
=============  ====================  ========================================
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from volseg.device.norm.choice import compute_shares
from volseg.device.peer.values import RelayedValues, ValueExchange, ValueMailbox
from volseg.device.triton_tiles import takes
from volseg.parallel.spatial.plan.shards import Fetch, Span, spans

if TYPE_CHECKING:
    from volseg.parallel.replicas import Replicas


class Communicator(ABC):
    """Shards on a grid; this process holds some of them.

    Attributes
    ----------
    grid
        Number of shards along each mesh axis.
    coordinates
        Grid coordinates of the shards that this process holds; slabs are listed in this order.
    devices
        Device of each of these shards.
    home
        Device of whole values.
    values
        Exchange of a few values between shards inside kernels, or None.
    fixed_order
        Whether sums over shards have one order, wherever the shards are.
    """

    grid: tuple[int, ...]
    coordinates: list[tuple[int, ...]]
    devices: list[torch.device]
    home: torch.device
    values: ValueExchange | None = None
    fixed_order: bool = False

    @cached_property
    def num_shards(self) -> int:
        """Number of shards in all processes."""
        return prod(self.grid)

    @property
    def is_direct(self) -> bool:
        """Whether slabs bypass autograd: halos in place, joins not written, inputs kept as recipes.

        One slab per process does, and several slabs if sums have a fixed order, which is the order of one slab each.
        """
        return len(self.devices) == 1 or self.fixed_order

    @property
    def indices(self) -> list[int]:
        """Row-major number of each shard that this process holds."""
        return [self.number_of(coordinates) for coordinates in self.coordinates]

    def number_of(self, coordinates: Sequence[int]) -> int:
        """Return the row-major number of a shard."""
        return int(np.ravel_multi_index(tuple(coordinates), self.grid))

    @cached_property
    def _shares(self) -> dict[tuple[tuple[int, ...], torch.dtype, torch.device], Tensor]:
        return {}

    def shares(self, counts: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return each shard's share of the voxels, ``(shards, 1, 1)``, if the shards have ``counts`` voxels.

        The tensor is kept as long as the communicator: no step waits for its copy, and recorded steps, which hold the
        communicator, read it at its address.
        """
        key = counts, dtype, device
        if key not in self._shares:
            self._shares[key] = compute_shares(*key)
        return self._shares[key]

    def owned(self, sizes: Sequence[int]) -> list[list[Span]]:
        """Return, for each shard of this process, the planes it owns along each mesh axis."""
        layouts = [spans(size, count) for size, count in zip(sizes, self.grid, strict=True)]
        return [
            [layout[position] for layout, position in zip(layouts, coordinates, strict=True)]
            for coordinates in self.coordinates
        ]

    @abstractmethod
    def fetch(self, slabs: Sequence[Tensor], plan: Fetch) -> list[Tensor]:
        """Give each shard its wanted planes of a volume; other dims than the cut one may have any extent.

        An unchanged slab is returned itself: the gradient of a view of it would be copied.
        """

    def take_own(
        self, slabs: Sequence[Tensor], plan: Fetch, take: Callable[..., Tensor] = Tensor.narrow
    ) -> list[Tensor]:
        """Return views of the planes that each shard wants, which are its own; a slab itself where it wants it all.

        ``take(slab, dim, start, count)`` returns a view.
        """
        places = [plan.own_span(coordinates[plan.axis]) for coordinates in self.coordinates]
        pairs = zip(slabs, places, strict=True)
        return [slab if place is None else take(slab, plan.dim, *place) for slab, place in pairs]

    @abstractmethod
    def collect(self, partials: Sequence[Tensor]) -> Tensor:
        """Stack a small tensor of every shard, ``(num_shards, ...)``, in the order of the grid; the result is whole."""

    @abstractmethod
    def gather(self, slabs: Sequence[Tensor], dims: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Assemble the whole volume."""

    @abstractmethod
    def spread(self, whole: Tensor) -> list[Tensor]:
        """Pass a whole value to every shard."""

    @abstractmethod
    def cut(self, whole: Tensor, dims: Sequence[int]) -> list[Tensor]:
        """Cut a whole volume along ``dims``, one for each mesh axis."""

    @abstractmethod
    def share(self, parameters: Sequence[Tensor]) -> list[list[Tensor]]:
        """Pass a bucket of parameters to every shard, one per slab each; their gradients are summed in one call."""

    def convert(self, copy: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a shared parameter in another dtype."""
        return copy.to(dtype)


def narrow_to(whole: Tensor, dims: Sequence[int], owned: Sequence[Span]) -> Tensor:
    """Return a view of the planes in ``owned``, one span for each of ``dims``."""
    for dim, (start, stop) in zip(dims, owned, strict=True):
        whole = whole.narrow(dim, start, stop - start)
    return whole


class SlabsOfReplicas:
    """All slabs of all replicas; the numbers of those of one replica are neighbours.

    Parameters
    ----------
    communicator
        The slabs of this replica.
    replicas
        All replicas; each process computes one.
    """

    def __init__(self, communicator: Communicator, replicas: "Replicas") -> None:
        self.communicator, self.replicas = communicator, replicas

    @cached_property
    def values(self) -> ValueExchange | None:
        """Exchange of values in kernels, or None; made at the first use, which all processes reach together.

        With either exchange, the same kernels add in the order of the slabs, and so get the same bits.
        """
        communicator = self.communicator
        here = len(communicator.devices)
        group = self.replicas.group if here == communicator.num_shards else self.replicas.everyone
        if group is None or not takes(torch.empty(0, device=communicator.home)):
            return None
        mailbox = ValueMailbox.connect(group, communicator.home) if here == 1 else None
        return mailbox or RelayedValues(group, communicator.home, here)
