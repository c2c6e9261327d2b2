"""The processes of a job as a grid: ``data x spatial``.

``rank = replica * spatial + shard``: the processes that share a volume have neighbouring ranks, and so lie on one
machine wherever its number of devices is a multiple of theirs.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from volseg.errors import ParallelError
from volseg.parallel.devices import count_launched, count_processes, find_own_device
from volseg.parallel.processes import make_groups, start_group
from volseg.parallel.replicas import Replicas
from volseg.parallel.spatial.transport.mesh import DATA

__all__ = ["SPATIAL", "Mesh", "join_mesh"]

SPATIAL = "spatial"


@dataclass(frozen=True, slots=True)
class Mesh:
    """A grid of processes, and the place of this one.

    Attributes
    ----------
    data, spatial
        Processes along each dimension.
    replica, shard
        The place of this process.
    data_group
        The processes that hold the same shard of different replicas; None where there is one.
    spatial_group
        The processes that share a volume; None where there is one.
    device_mesh
        torch's form of it; None for one process that has joined no group.
    """

    data: int
    spatial: int
    replica: int
    shard: int
    data_group: dist.ProcessGroup | None = None
    spatial_group: dist.ProcessGroup | None = None
    device_mesh: DeviceMesh | None = None

    def replicas(self, count: int | None = None, fixed_order: bool = False) -> Replicas:
        """Return the replicas along ``data``; as many as processes, unless ``count`` says how many logical ones."""
        return Replicas(self.data if count is None else count, self.data_group, fixed_order)


def join_mesh(data: int = 1, spatial: int = 1) -> Mesh:
    """Start the process group where it is not, and find the own place in a grid of its processes.

    Every process of the job calls it.

    Raises
    ------
    ParallelError
        Unless ``data * spatial`` is the number of processes.

    Examples
    --------
    >>> join_mesh(data=1, spatial=1).replica
    0
    """
    processes = max(count_processes(), count_launched())
    if data < 1 or spatial < 1 or data * spatial != processes:
        raise ParallelError(
            f"a mesh of data {data} x spatial {spatial} needs {data * spatial} processes, and there are {processes}; "
            "start as many (torchrun --nproc-per-node), or choose another mesh"
        )
    if processes == 1:
        return Mesh(1, 1, 0, 0)
    start_group()
    ranks = torch.arange(processes).view(data, spatial)
    # Not by init_device_mesh, whose groups give up after minutes, whatever the one of all processes does.
    groups = [make_groups(ranks.T.tolist()), make_groups(ranks.tolist())]
    device_mesh = DeviceMesh.from_group(groups, find_own_device().type, ranks, mesh_dim_names=(DATA, SPATIAL))
    replica, shard = divmod(dist.get_rank(), spatial)
    return Mesh(
        data,
        spatial,
        replica,
        shard,
        device_mesh.get_group(DATA) if data > 1 else None,
        device_mesh.get_group(SPATIAL) if spatial > 1 else None,
        device_mesh,
    )
