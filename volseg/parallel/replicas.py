"""Logical replicas of a network: their rows of each batch, and the processes that compute them.

Results depend only on the number ``D`` of logical replicas: replica ``r`` gets the rows ``deal(batch)[r]``. The number
of processes decides only where they are computed. With ``fixed_order`` every sum over replicas follows one binary tree
over the logical replicas, first over processes and then over the rounds of one process, so that 1, 2 and 4 processes
give the same bits.

A `Mesh` has ``data x spatial`` processes, ``rank = replica * spatial + shard``: processes that share a volume have
neighbouring ranks, so they are on one machine if its number of devices is a multiple of theirs.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from volseg.device.gpus import get_host_readable_device, host_values
from volseg.device.torch_internals import gather_into
from volseg.errors import ParallelError
from volseg.parallel.devices import count_launched, count_processes
from volseg.parallel.fixed_order import add_up, fold
from volseg.parallel.processes.group import make_groups, start_group
from volseg.parallel.spatial.plan.shards import spans


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a batch that one logical replica computes.

    Attributes
    ----------
    replica
        Number of the replica.
    rows
        Rows of the replica within this process's rows, which are those of all its replicas, one after the other.
    weight
        Share of the whole batch, by which the replica's mean loss is multiplied.
    """

    replica: int
    rows: slice
    weight: float


class Replicas:
    """Logical replicas of a network, and those that this process computes.

    Parameters
    ----------
    count
        Logical replicas.
    group
        The processes that compute them (those that hold the same shard of different replicas); None if this process
        computes all. Process ``p`` of ``P`` computes the replicas ``p``, ``p + P``, and so on.
    fixed_order
        Whether sums use one order, and so give the same bits, for any number of processes.
    everyone
        The processes of all shards of all replicas, the shards of one replica after the other; by default ``group``,
        if each of its processes holds a whole replica.

    Attributes
    ----------
    own
        Logical replicas of this process, in the order in which they are computed.

    Raises
    ------
    ParallelError
        If the replicas cannot be dealt evenly to the processes, or their sums could not use one order.

    Examples
    --------
    >>> Replicas(2).deal(5)
    [slice(0, 2, None), slice(2, 5, None)]
    """

    def __init__(
        self,
        count: int,
        group: dist.ProcessGroup | None = None,
        fixed_order: bool = False,
        everyone: dist.ProcessGroup | None = None,
    ) -> None:
        processes = 1 if group is None else dist.get_world_size(group)
        rounds = count // processes
        if count < 1 or count % processes or (processes > 1 and rounds & (rounds - 1)):
            raise ParallelError(
                f"{processes} processes cannot share {count} replicas: each must compute the same number of them, a "
                "power of two, so that sums keep their order; start one process per replica, half or a quarter ... as "
                "many, or one process"
            )
        rank = 0 if group is None else dist.get_rank(group)
        self.count, self.group, self.fixed_order = count, group, fixed_order
        self.everyone = everyone
        self.num_processes = processes
        self.own: tuple[int, ...] = tuple(range(rank, count, processes))

    def deal(self, batch_size: int) -> list[slice]:
        """Return the rows of each logical replica; their numbers differ by at most one.

        Raises
        ------
        ParallelError
            If there are fewer rows than replicas.
        """
        if batch_size < self.count:
            raise ParallelError(
                f"a batch of {batch_size} cannot be dealt to {self.count} replicas; use a batch of {self.count} or "
                "more, or fewer replicas"
            )
        return [slice(*span) for span in spans(batch_size, self.count)]

    def shares(self, batch_size: int) -> list[Share]:
        """Return the shares of this process's replicas in a batch, in order.

        Parameters
        ----------
        batch_size
            Rows of the whole batch, over all replicas.
        """
        dealt, begin, shares = self.deal(batch_size), 0, []
        for replica in self.own:
            size = dealt[replica].stop - dealt[replica].start
            shares.append(Share(replica, slice(begin, begin + size), size / batch_size))
            begin += size
        return shares

    def gather(self, values: Tensor) -> Tensor:
        """Return a small tensor of every process, ``(P, ...)``, in the order of the replicas; without gradient."""
        if self.group is None:
            return values.detach().unsqueeze(0)
        stacked = values.new_empty((self.num_processes, *values.shape))
        gather_into(stacked.view(-1), values.detach().contiguous().view(-1), group=self.group)
        return stacked

    def require_alike(self, device: torch.device, **numbers: int) -> None:
        """Refuse numbers that differ between the replicas' processes; all of them must call this.

        Raises
        ------
        ParallelError
            If a number differs; names the first such number and its value on each process.
        """
        with host_values():
            found = self.gather(torch.tensor(list(numbers.values()), device=get_host_readable_device(device))).tolist()
        for name, *values in zip(numbers, *found, strict=True):
            if len(set(values)) > 1:
                raise ParallelError(f"all processes of the replicas need the same {name}, got {values}")

    def join_moments(self, mean: Tensor, variance: Tensor, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Merge mean, biased variance and number of values over all replicas, by one message; without gradient.

        Parameters
        ----------
        mean, variance
            Statistics of this process's values of each channel, ``(C,)``.
        number
            This process's number of values per channel.
        """
        own = torch.cat([mean, variance, mean.new_full((1,), number)])
        means, variances, numbers = self.gather(own).split([len(mean), len(mean), 1], 1)
        count = numbers.sum(0)
        shares = numbers / count
        mean = (means * shares).sum(0)
        return mean, ((variances + (means - mean).square()) * shares).sum(0), count

    def add_up(self, values: Tensor) -> Tensor:
        """Return a small tensor summed over the replicas' processes, by one message in one order; without gradient."""
        return fold(self.gather(values).unbind(), torch.add)

    def check_norm(self, over_batch: bool, has_running: bool) -> None:
        """Refuse a norm in training if it cannot compute the statistics of the whole batch.

        Raises
        ------
        ParallelError
            For batch norm if this process computes several replicas, one after the other, and for an instance norm with
            running statistics, which are a mean over the samples.
        """
        if over_batch and len(self.own) > 1:
            raise ParallelError(
                f"batch norm uses the statistics of a whole batch, but this process computes {len(self.own)} "
                "parts of it one after the other; start one process per replica, or use instance or group norm"
            )
        if not over_batch and has_running:
            raise ParallelError(
                "an instance norm with running statistics cannot be trained by several replicas, as each of them would "
                "have its own; use track_running_stats=False"
            )

    def sum_values(self, values: Tensor) -> Tensor:
        """Return a small tensor summed over the replicas' processes, without gradient; the same on all of them.

        A `RoundSums` adds the values of several rounds.
        """
        if self.group is None:
            return values
        return add_up(values.detach().clone(), self.group, self.fixed_order)


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
            f"{processes}; start that many (torchrun --nproc-per-node), or choose another mesh"
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
