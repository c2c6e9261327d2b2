"""The processes of a job as a grid: ``data x spatial``.

``rank = replica * spatial + shard``: the processes that share a volume have neighbouring ranks, and so lie on one
machine wherever its number of devices is a multiple of theirs.
"""

from dataclasses import dataclass

import torch.distributed as dist

from volseg.errors import ParallelError
from volseg.parallel.devices import count_launched, count_processes
from volseg.parallel.processes.group import make_groups, start_group
from volseg.parallel.replicas import Replicas

__all__ = ["Mesh", "join_mesh"]


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
    """

    data: int
    spatial: int
    replica: int
    shard: int
    data_group: dist.ProcessGroup | None = None
    spatial_group: dist.ProcessGroup | None = None

    def replicas(self, count: int | None = None, fixed_order: bool = False) -> Replicas:
        """Return the replicas along ``data``; as many as processes, unless ``count`` says how many logical ones."""
        everyone = dist.group.WORLD if self.data > 1 and self.spatial > 1 else None
        return Replicas(self.data if count is None else count, self.data_group, fixed_order, everyone)


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
