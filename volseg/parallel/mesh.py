"""Process mesh of a job: ``data x spatial``.

``rank = replica * spatial + shard``: processes that share a volume have neighbouring ranks, so they are on one machine
if its number of devices is a multiple of theirs.
"""

from dataclasses import dataclass

import torch.distributed as dist

from volseg.errors import ParallelError
from volseg.parallel.devices import count_launched, count_processes
from volseg.parallel.processes.group import make_groups, start_group
from volseg.parallel.replicas import Replicas


@dataclass(frozen=True, slots=True)
class Mesh:
    """Process mesh of a job, and this process's position.

    Attributes
    ----------
    data, spatial
        Processes along each dimension.
    replica, shard
        Position of this process.
    data_group
        The processes that hold the same shard of different replicas; None for one replica.
    spatial_group
        The processes that share a volume; None for one process per volume.
    """

    data: int
    spatial: int
    replica: int
    shard: int
    data_group: dist.ProcessGroup | None = None
    spatial_group: dist.ProcessGroup | None = None

    def replicas(self, count: int | None = None, fixed_order: bool = False) -> Replicas:
        """Return the replicas along ``data``; ``count`` logical ones if given, otherwise one per process."""
        everyone = dist.group.WORLD if self.data > 1 and self.spatial > 1 else None
        return Replicas(self.data if count is None else count, self.data_group, fixed_order, everyone)


def join_mesh(data: int = 1, spatial: int = 1) -> Mesh:
    """Start the process group if necessary, and return this process's position in a mesh.

    Every process of the job must call this.

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
            f"a mesh of data {data} x spatial {spatial} needs {data * spatial} processes, but there are "
            f"{processes}; start as many (torchrun --nproc-per-node), or choose another mesh"
        )
    if processes == 1:
        return Mesh(1, 1, 0, 0)
    start_group()
    replica, shard = divmod(dist.get_rank(), spatial)
    rows = [[r * spatial + s for s in range(spatial)] for r in range(data)]
    columns = [list(column) for column in zip(*rows, strict=True)]
    return Mesh(
        data,
        spatial,
        replica,
        shard,
        make_groups(columns) if data > 1 else None,
        make_groups(rows) if spatial > 1 else None,
    )
