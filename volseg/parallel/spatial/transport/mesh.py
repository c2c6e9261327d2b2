"""Find the processes that share a volume, from a device mesh or from ``torchrun``'s environment.

A mesh dimension named ``"data"`` holds replicas: processes that train on different volumes. Every other dimension
cuts one axis of the volume. Without a mesh all processes share each volume.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from volseg.device.torch_internals import get_default_group
from volseg.errors import ParallelError
from volseg.parallel.devices import get_own_device
from volseg.parallel.processes.group import make_groups, start_group
from volseg.parallel.spatial.transport.process_group import ProcessGroupShards

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
        raise ParallelError(f"mesh has the dimensions {names}; one besides {DATA!r} is needed to cut the volume")
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
