"""``DataParallel``: replicas of a network share each batch, with the results of one process and the whole batch.

Each replica computes its rows. The loss of a replica, a mean over its rows, is multiplied by its part of the batch, and
the gradients are *summed*: shares of any size give the gradient of the mean over the whole batch. Other functions over
several samples use all replicas: batch norm in training takes the statistics of the whole batch.

Random numbers of a pass (dropout) are drawn from a seed for the pass and the logical replica. The seed comes from a
generator that is equal in all processes (``CommonSeeds``); a pass leaves the default generators unchanged.

DataParallel raises where results would not be exact: a gradient that bypasses the sums, parameters that only some
replicas use, a batch norm whose batch is computed in parts one after the other, buffers that differ, or buffers that
each of several replicas of a process would change. It cannot detect a function that mixes samples (``x.flip(0)``): the
function mixes the samples of one replica.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from volseg.device.gpus import is_recording
from volseg.device.torch_internals import get_version
from volseg.errors import ParallelError
from volseg.parallel.gradient_sums import GradientSums
from volseg.parallel.model_parallel import ModelParallel, check_network
from volseg.parallel.norms import check_norms, norms_over_replicas
from volseg.parallel.pipeline.strategy import PipelineStrategy
from volseg.parallel.processes.group import agree
from volseg.parallel.replica_strategies import OneDevice, Piped
from volseg.parallel.replicas import Replicas
from volseg.parallel.spatial.replication import check_alike, replicate
from volseg.parallel.spatial.strategy import SpatialStrategy
from volseg.parallel.state.random import CommonSeeds, RandomState, mix, seeded

NUM_CHECKED = 2
"""Number of training passes that first compare the replicas: the first pass, and the pass after the first step."""

OF_ONE_REPLICA = {"partition", "is_shared", "is_recordable", "is_replaying", "step_devices", "volumes"}
"""Properties of a strategy that are those of one replica's."""


class DataParallel(ModelParallel):
    """Replicas of a network, each of which computes its rows of every batch.

    Parameters
    ----------
    model
        A network on one device, `FastKernels`, or a `ModelParallel` whose volumes are cut over ``mesh.spatial_group``.
        It is used in place; parameters and buffers get the values of the first replica. Names are the network's own.
    replicas
        Number of replicas, and those that this process computes; see ``Mesh.replicas``.

    Raises
    ------
    ParallelError
        If the model averages its gradients already, or holds a norm that the replicas cannot share.

    Examples
    --------
    One process computes both replicas here. Under ``torchrun`` with two processes,
    ``join_mesh(data=2).replicas()`` gives one replica to each process, and the loop is the same.

    >>> import torch
    >>> from volseg.parallel import RoundSums, join_mesh
    >>> net = torch.nn.Conv3d(1, 2, 3, padding=1)
    >>> model = DataParallel(net, join_mesh().replicas(2))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> batch = torch.randn(5, 1, 8, 8, 8)  # the rows of this process's replicas, one replica after the other
    >>> shares = model.replicas.shares(5)
    >>> sums = RoundSums(model.parameters(), len(shares))
    >>> for share in shares:
    ...     with model.as_replica(share.replica):
    ...         loss = model(batch[share.rows]).square().mean() * share.weight
    ...     loss.backward()
    ...     sums.push()
    >>> sums.put_back()
    >>> optimizer.step()
    """

    model: nn.Module
    strategy: "_Replicated"  # type: ignore[assignment]

    def __init__(self, model: nn.Module, replicas: Replicas) -> None:
        self._wrap(model, replicas)
        strategy = self.strategy
        replicas.require_alike(strategy.home, count=replicas.count, fixed_order=replicas.fixed_order)
        if replicas.group is not None:
            replicate(self.module, [replicas.group], strategy.home)
        if strategy.seeds is not None:
            strategy.seeds.agree()

    def _wrap(self, model: nn.Module, replicas: Replicas) -> None:
        """Build the wrapper without sending anything."""
        nn.Module.__init__(self)
        if isinstance(model, DataParallel):
            raise ParallelError("the model is already a DataParallel; wrap its network only once")
        check_network(model)
        net = model.module if isinstance(model, ModelParallel) else model
        _check_not_nested(net)
        self.replicas = replicas
        self.chosen, self.why = (model.chosen, model.why) if isinstance(model, ModelParallel) else ("none", "")
        self._tries = False
        object.__setattr__(self, "model", model)
        object.__setattr__(self, "module", net)
        object.__setattr__(self, "strategy", _Replicated(model, net, replicas))
        self._share_registries()
        self.training = net.training

    def as_replica(self, replica: int) -> AbstractContextManager[None]:
        """Run the block as the given replica of this process; passes outside a block belong to its first replica.

        Raises
        ------
        ParallelError
            If another process computes the replica.
        """
        return self.strategy.as_replica(replica)

    def check_alike(self, shards: bool = True) -> None:
        """Compare the networks of all replicas; all processes call this together.

        Parameters
        ----------
        shards
            Whether to compare also the processes that share a volume.

        Raises
        ------
        ParallelError
            If networks differ; names the parameters and buffers.
        """
        self.strategy.check_alike(shards)

    def train(self, mode: bool = True) -> "DataParallel":
        """Set the mode of the network and of the wrappers."""
        self.model.train(mode)
        self.training = mode
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "DataParallel":
        # One process may copy without the others: nothing is sent. The copy draws the same numbers as the original.
        result = DataParallel.__new__(DataParallel)
        result._wrap(copy.deepcopy(self.model, memo), self.replicas)
        seeds, own = self.strategy.seeds, result.strategy.seeds
        if seeds is not None and own is not None:
            own.follow(seeds)
        return self._hand_over(result, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the network and the number of replicas."""
        if self.replicas.group is not None:
            raise ParallelError(
                "a DataParallel over processes cannot be pickled, as process groups belong to the running "
                "processes; save model.state_dict(), or pickle model.module, and wrap the loaded network again"
            )
        return _rebuild, (self.model, self.replicas.count, self.replicas.fixed_order), self._list_own()

    def extra_repr(self) -> str:
        """Format the number of replicas."""
        return f"{self.replicas.count} replicas on {self.replicas.num_processes} processes"


def get_replicas(network: nn.Module) -> Replicas | None:
    """Return the replicas that share a network's batches; None without replicas."""
    return network.replicas if isinstance(network, DataParallel) else None


class _Replicated:
    """The strategy of one replica, and its exchanges with the others."""

    def __init__(self, model: nn.Module, net: nn.Module, replicas: Replicas) -> None:
        self.replicas, self._net, self._call = replicas, net, model
        self._placed: SpatialStrategy | PipelineStrategy | OneDevice
        if isinstance(model, ModelParallel):
            placed = model.strategy
            self._placed = placed if isinstance(placed, PipelineStrategy) else placed.volumes
        else:
            self._placed = OneDevice(model, replicas)
        self.inner: SpatialStrategy | OneDevice | Piped
        if isinstance(self._placed, PipelineStrategy):
            self.inner, devices = Piped(model, self._placed, replicas), self._placed.devices
        else:
            self.inner, devices = self._placed, self._placed.step_devices
        self.home = devices[0]
        check_norms(net, replicas)
        self._devices = list(dict.fromkeys(devices))
        self._replica = replicas.own[0]
        self._num_checked = 0
        self._draws = False
        self._pass_seeds: list[int] = []
        self._passes = 0
        spatial = [self.inner.group] if isinstance(self.inner, SpatialStrategy) and self.inner.group is not None else []
        self._groups = [*spatial, *([] if replicas.group is None else [replicas.group])]
        self.seeds: CommonSeeds | None = None
        if replicas.count > 1:
            self.seeds = CommonSeeds(self._groups, self.home)
            if isinstance(self.inner, SpatialStrategy):
                self.inner.seeds = None  # the seeds of a replica's passes are set here
                self.inner.context.share_batches(replicas, norms_over_replicas)
        elif isinstance(self.inner, SpatialStrategy):
            self.seeds = self.inner.seeds
        self._sums = self._sum_gradients()

    def _sum_gradients(self) -> GradientSums | None:
        """Make the strategy sum its gradients over processes, and return the sums; None for a single process."""
        group, fixed_order = self.replicas.group, self.replicas.fixed_order
        if group is None:
            return None
        if isinstance(self.inner, SpatialStrategy):
            return self.inner.sum_gradients(group, fixed_order=fixed_order)
        self.inner.sums = GradientSums(group, self.home, fixed_order=fixed_order)
        return self.inner.sums

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the network on rows of one replica."""
        if self.replicas.count == 1:
            return self._run(*args, **kwargs)
        is_training = self._net.training and torch.is_grad_enabled()
        if is_training and self._num_checked < NUM_CHECKED and self._replica == self.replicas.own[0]:
            self._num_checked += 1
            self.check_alike()
        with self._randomness(), self._keeping_buffers():
            return self._run(*args, **kwargs)

    @contextmanager
    def _keeping_buffers(self) -> Iterator[None]:
        """Refuse a pass that changes buffers if other replicas of this process would change them again."""
        if len(self.replicas.own) == 1:
            yield
            return
        before = {name: (buffer, get_version(buffer)) for name, buffer in self._net.named_buffers()}
        yield
        for name, buffer in self._net.named_buffers():
            known, version = before.get(name, (None, 0))
            if known is not buffer or get_version(buffer) != version:
                raise ParallelError(
                    f"the network's forward changes its buffer {name}, but this process computes "
                    f"{len(self.replicas.own)} replicas one after the other, each of which would change it again; "
                    "start one process per replica"
                )

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self.inner, SpatialStrategy):
            return self.inner(*args, **kwargs)
        # Each replica validates its own number of volumes: a norm there exchanges nothing.
        is_alone = not (self._net.training or torch.is_grad_enabled())
        with self.inner.context.without_replicas() if is_alone else nullcontext():
            return self._call(*args, **kwargs)  # FastKernels does more than its strategy

    @contextmanager
    def as_replica(self, replica: int) -> Iterator[None]:
        if replica not in self.replicas.own:
            raise ParallelError(f"this process computes the replicas {self.replicas.own}, got {replica}")
        before, self._replica, self._passes = self._replica, replica, 0
        if replica == self.replicas.own[0]:
            self._pass_seeds = []
        try:
            yield
        finally:
            self._replica = before

    def check_alike(self, shards: bool = True) -> None:
        """Refuse replicas that differ; with ``shards`` also processes of one volume that differ."""
        replicas = [] if self.replicas.group is None else [self.replicas.group]
        if groups := self._groups if shards else replicas:
            check_alike(self._net, groups, self.home)
        if self._sums is not None:
            self._sums.look()

    @contextmanager
    def _randomness(self) -> Iterator[None]:
        """Seed the random numbers of this block for this pass and replica."""
        if self.seeds is None or is_recording(self.home):
            yield
            return
        with seeded(mix(self._get_seed(), self._replica), self._devices):
            begin = None if self._draws else RandomState(self._devices, foreign=False)
            yield
            self._draws = self._draws or (begin is not None and begin.torch_moved())

    def _get_seed(self) -> int:
        """Return the seed of this pass: equal for all replicas in the same pass over their rows."""
        assert self.seeds is not None
        training = self._net.training
        if not training or len(self.replicas.own) == 1:
            return self.seeds.draw(training)
        self._passes += 1
        if self._replica == self.replicas.own[0]:
            self._pass_seeds.append(self.seeds.draw(True))
        elif self._passes > len(self._pass_seeds):
            raise ParallelError(
                f"replica {self._replica} made {self._passes} passes, but the first replica of this process "
                f"made {len(self._pass_seeds)}; run each replica equally often, inside as_replica(...), starting with "
                "the first"
            )
        return self._pass_seeds[self._passes - 1]

    def __getattr__(self, name: str) -> Any:
        if name not in OF_ONE_REPLICA:
            raise AttributeError(f"replicas have no {name}")
        return getattr(self._placed, name)

    def agree(self, yes: bool) -> bool:
        """Return whether all processes that run a step together agree."""
        return agree(yes, self._groups, self.home)

    def prepare_recording(self) -> list[torch.Generator]:
        """Prepare a CUDA graph of a step.

        Raises
        ------
        ParallelError
            If a recording could not draw the random numbers of each of several replicas.
        """
        if len(self.replicas.own) > 1 and self._draws:
            raise ParallelError(
                f"the network draws random numbers, for which each of the {len(self.replicas.own)} replicas of this "
                "process needs its own seed, but a recorded step has only one; start one process per replica"
            )
        return self._get_recordable().prepare_recording()

    @contextmanager
    def replaying(self, generators: Sequence[torch.Generator]) -> Iterator[None]:
        """Replay in this block, with a seed for every step and replica."""
        if self._sums is not None:
            self._sums.look()
        self._passes, self._pass_seeds = 0, []
        with self._randomness(), self._get_recordable().replaying(generators):
            yield

    def _get_recordable(self) -> SpatialStrategy | OneDevice:
        if isinstance(self._placed, PipelineStrategy):
            raise ParallelError("a pipeline records its batches itself: call the replicas without RecordedStep")
        return self._placed


def _rebuild(model: nn.Module, count: int, fixed_order: bool) -> DataParallel:
    return DataParallel(model, Replicas(count, None, fixed_order))


def _check_not_nested(net: nn.Module) -> None:
    """Refuse wrappers inside the network, whose gradients would be summed twice."""
    for name, module in net.named_modules():
        if isinstance(module, ModelParallel | nn.parallel.DistributedDataParallel | nn.DataParallel):
            raise ParallelError(
                f"{name or 'the network'} is a {type(module).__name__}; wrap only the whole network, not a "
                "module inside it"
            )
