"""Shards on the processes of a group (NCCL on GPUs, gloo on CPUs), one shard each.

Every process runs the same operators in the same order. The backward pass keeps that order: autograd runs the nodes
of one device in the reverse order of their creation. So each function below is called by all processes or by none,
also by a process that has nothing to send.

``join`` finds the processes that share a volume, from a device mesh or from ``torchrun``'s environment. A mesh
dimension named ``"data"`` holds replicas: processes that train on different volumes. Every other dimension cuts one
axis of the volume. Without a mesh all processes share each volume.
"""

from collections.abc import Sequence
from functools import cached_property, partial
from math import prod
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from volseg.device.first_order import LinearMap
from volseg.device.gpus import is_gpu, is_recording
from volseg.device.peer.planes import PlaneMailbox
from volseg.device.peer.values import RelayedValues, ValueExchange, ValueMailbox
from volseg.device.torch_internals import gather_into, get_default_group
from volseg.device.triton_tiles import takes
from volseg.errors import ParallelError
from volseg.parallel.devices import get_own_device
from volseg.parallel.fixed_order import add_up
from volseg.parallel.processes.group import make_groups, start_group
from volseg.parallel.spatial.plan.shards import Fetch
from volseg.parallel.spatial.transport.communicator import Communicator, narrow_to
from volseg.parallel.spatial.transport.message_buffers import MessageBuffers, Messages
from volseg.parallel.spatial.transport.pieces import join_pieces, start_total
from volseg.parallel.spatial.transport.shared_parameters import SharedParameters


class ProcessGroupShards(Communicator):
    """One shard per process.

    Parameters
    ----------
    group
        The processes that share a volume, in row-major order of ``grid``.
    grid
        Shards along each mesh axis.
    device
        This process's device.
    fixed_order
        See ``Communicator``.
    """

    def __init__(
        self, group: dist.ProcessGroup, grid: Sequence[int], device: torch.device, fixed_order: bool = False
    ) -> None:
        self.group, self.fixed_order = group, fixed_order
        self.grid = tuple(grid)
        self.home = device
        self.devices = [device]
        self.rank = dist.get_rank(group)
        self.coordinates = [tuple(map(int, np.unravel_index(self.rank, self.grid)))]
        self.shared = SharedParameters(group, device, fixed_order)

    @cached_property
    def mailbox(self) -> ValueMailbox | None:
        """Mailbox for a few values; made at the first use, which all processes reach together.

        Not earlier: copying a model in one process only must wait for no other process. The communicator owns the
        mailbox.
        """
        return ValueMailbox.connect(self.group, self.home)

    @cached_property
    def values(self) -> ValueExchange | None:  # type: ignore[override]
        """Exchange of a few values in kernels; with a fixed order the same kernels run with or without a mailbox."""
        several = self.fixed_order and self.num_shards > 1
        if several and self.mailbox is None and takes(torch.empty(0, device=self.home)):
            return RelayedValues(self.group, self.home)
        return self.mailbox

    @cached_property
    def plane_mailbox(self) -> PlaneMailbox | None:
        """Mailbox for planes of halos; made in the same way."""
        return PlaneMailbox.connect(self.group, self.home)

    @cached_property
    def _buffers(self) -> MessageBuffers:
        return MessageBuffers(self.home)

    def begin_messages(self, axis: int = 0) -> Messages:
        """Return an exchange of messages with the processes on this process's line of the grid."""
        keeps = is_gpu(self.home) and not is_recording(self.home)
        return Messages(self.home, self._buffers if keeps else None, self.group, lambda place: self.peer(axis, place))

    def peer(self, axis: int, position: int) -> int:
        """Return the global rank of the process at ``position`` on this process's line of the grid."""
        own = self.coordinates[0]
        return dist.get_global_rank(self.group, self.number_of((*own[:axis], position, *own[axis + 1 :])))

    def fetch(self, slabs: Sequence[Tensor], plan: Fetch) -> list[Tensor]:
        """Exchange planes with their owners; see ``Communicator``."""
        if plan.stays:
            return self.take_own(slabs, plan)
        maps = partial(self.exchange, plan=plan), partial(self.give_back, plan=plan)
        return [LinearMap.apply(*maps, slabs[0])]

    def exchange(self, slab: Tensor, plan: Fetch) -> Tensor:
        """Return the wanted planes, outside autograd; see ``Communicator.fetch``."""
        here, dim = self.coordinates[0][plan.axis], plan.dim
        shape = list(slab.shape)
        messages = self.begin_messages(plan.axis)
        pieces = []
        for move in plan.moves:
            shape[dim] = move.stop - move.start
            if move.source == here:
                planes = slab.narrow(dim, move.start - plan.owned[here][0], shape[dim])
                if move.target == here:
                    pieces.append(planes)
                else:
                    messages.send(planes, move.target)
            elif move.target == here:
                pieces.append(messages.receive(messages.make_room(shape, slab.dtype), move.source))
        messages.start()()
        whole = join_pieces(pieces or [slab.narrow(dim, 0, 0)], dim, slab)
        messages.end()
        return whole

    def give_back(self, planes: Tensor, plan: Fetch) -> Tensor:
        """Return every plane to its owner and add what comes back: the transpose of ``exchange``."""
        here, dim = self.coordinates[0][plan.axis], plan.dim
        shape = list(planes.shape)
        first, last = plan.owned[here]
        messages = self.begin_messages(plan.axis)
        kept: list[tuple[int, Tensor]] = []
        arrivals = []
        for move in plan.moves:
            count = move.stop - move.start
            if move.target == here:
                piece = planes.narrow(dim, move.place, count)
                if move.source == here:
                    kept.append((move.start - first, piece))
                else:
                    messages.send(piece, move.source)
            elif move.source == here:
                shape[dim] = count
                arrival = messages.receive(messages.make_room(shape, planes.dtype), move.target)
                arrivals.append((move.start - first, arrival))
        wait = messages.start()
        total = start_total(planes, dim, last - first, *(kept.pop(0) if kept else (0, None)))
        wait()
        for start, piece in (*kept, *arrivals):
            total.narrow(dim, start, piece.shape[dim]).add_(piece)
        messages.end()
        return total

    def stack(self, partial: Tensor) -> Tensor:
        """Return every process's tensor, ``(num_shards, ...)``, outside autograd."""
        if self.mailbox is not None and self.mailbox.takes(partial):
            return self.mailbox.stack(partial)
        partial = partial.contiguous()
        stacked = partial.new_empty((self.num_shards, *partial.shape))
        gather_into(stacked.view(-1), partial.view(-1), group=self.group)
        return stacked

    def collect(self, partials: Sequence[Tensor]) -> Tensor:
        """Stack the processes' values; each process gets all of them in the same order, so sums agree bit for bit."""
        stacked: Tensor = LinearMap.apply(self.stack, lambda gradient: gradient[self.rank], partials[0])
        return stacked

    def gather(self, slabs: Sequence[Tensor], dims: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Assemble the volume on every process."""
        own = self.owned(sizes)[0]

        def take(gradient: Tensor) -> Tensor:
            return narrow_to(gradient, dims, own)

        whole: Tensor = LinearMap.apply(lambda slab: self.assemble(slab, dims, sizes), take, slabs[0])
        return whole

    def assemble(self, slab: Tensor, dims: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Return the whole volume, outside autograd."""
        for axis, (dim, size) in enumerate(zip(dims, sizes, strict=True)):
            slab = self.exchange(slab, Fetch(axis, dim, size, [(0, size)] * self.grid[axis]))
        return slab

    def add_up(self, partial: Tensor) -> Tensor:
        """Return the sum of every process's tensor, outside autograd; the tensor may be overwritten."""
        return add_up(partial, self.group, self.fixed_order)

    def spread(self, whole: Tensor) -> list[Tensor]:
        """Mark a whole value as used by the shards; its gradient is summed over them."""

        def add_up(gradient: Tensor) -> Tensor:
            return self.add_up(gradient.clone(memory_format=torch.contiguous_format))

        return [LinearMap.apply(lambda own: own.view_as(own), add_up, whole)]

    def cut(self, whole: Tensor, dims: Sequence[int]) -> list[Tensor]:
        """Return this process's slab as a copy, so that the memory of the whole volume can be freed."""
        sizes = [whole.shape[dim] for dim in dims]
        own = self.owned(sizes)[0]

        def assemble(gradient: Tensor) -> Tensor:
            return self.assemble(gradient.contiguous(), dims, sizes)

        return [LinearMap.apply(lambda given: narrow_to(given, dims, own).clone(), assemble, whole)]

    def look(self) -> None:
        """Refuse sums of gradients that do not belong together; see `SharedParameters`."""
        self.shared.look()

    def share(self, parameters: Sequence[Tensor]) -> list[list[Tensor]]:
        """Mark parameters as used by the shards; their gradients are summed as soon as all have arrived."""
        return [[copy] for copy in self.shared.share(parameters)]

    def convert(self, copy: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a parameter in another dtype; its gradient goes to the bucket's sum as soon as it is computed."""
        return self.shared.convert(copy, dtype)


DATA = "data"


def join(
    mesh: Any, grid: Sequence[int] | None, fixed_order: bool = False
) -> tuple[ProcessGroupShards, dist.ProcessGroup | None]:
    """Return the communicator of this process, and the replicas that it averages with, or None.

    Parameters
    ----------
    mesh
        A ``DeviceMesh``, the group of the processes that share a volume, or None for all processes.
    grid
        Shards along each mesh axis; by default as in the mesh.
    fixed_order
        See ``Communicator``.

    Raises
    ------
    ParallelError
        If the mesh has no dimension to cut volumes with, or ``grid`` has another number of shards.
    """
    if mesh is not None and not isinstance(mesh, DeviceMesh | dist.ProcessGroup):
        raise ParallelError(
            f"mesh must be a torch.distributed.device_mesh.DeviceMesh, or a group, got {type(mesh).__name__}"
        )
    start_group()
    device = get_own_device()
    if not isinstance(mesh, DeviceMesh):
        group = get_default_group() if mesh is None else mesh
        shape = _grid(grid, [dist.get_world_size(group)])
        return ProcessGroupShards(group, shape, device, fixed_order), None
    names = mesh.mesh_dim_names or tuple(f"spatial{index}" for index in range(mesh.ndim))
    cutting = [name for name in names if name != DATA]
    if not cutting:
        raise ParallelError(f"mesh has only the dimensions {names}; it needs one other than {DATA!r} to cut the volume")
    sizes = [mesh.mesh.shape[names.index(name)] for name in cutting]
    # Row-major over the cutting dimensions, one group per replica; every process makes every group, as torch requires.
    replica_dim = names.index(DATA) if DATA in names else None
    ranks = mesh.mesh if replica_dim is None else mesh.mesh.movedim(replica_dim, 0)
    rows = ranks.reshape(-1, prod(sizes)).tolist()
    group = make_groups(rows)
    replicas = make_groups([list(column) for column in zip(*rows, strict=True)]) if len(rows) > 1 else None
    return ProcessGroupShards(group, _grid(grid, sizes), device, fixed_order), replicas


def _grid(grid: Sequence[int] | None, sizes: Sequence[int]) -> tuple[int, ...]:
    chosen = tuple(grid) if grid is not None else tuple(sizes)
    if prod(chosen) != prod(sizes):
        raise ParallelError(f"a grid of {chosen} needs {prod(chosen)} processes, the mesh has {prod(sizes)}")
    return chosen
