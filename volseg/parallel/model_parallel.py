"""``ModelParallel``: one ``nn.Module`` that runs a plain network over several devices.

The wrapper is a thin dispatcher. A *strategy* object places the network and runs it: ``SpatialStrategy`` cuts the
volume into slabs, ``PipelineStrategy`` cuts the network into stages. Everything that a training loop does to
a module (parameters, state, modes) reaches the plain network under the plain network's names.

``strategy="auto"`` takes the spatial split, and the layers where the first volume meets an operator without a sharded
form: only the run itself tells what a network calls, and a rehearsal on other shapes or devices could take another
branch. That first attempt leaves no trace: neither in buffers and attributes, nor in random numbers, nor in the input.

It refuses to be moved: ``.cuda()`` and ``.to(device)`` would tear the placement apart, and raise.
"""

import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from volseg.errors import ParallelError, PlacementError, UnsupportedOperatorError
from volseg.parallel.pipeline import PipelineStrategy
from volseg.parallel.spatial import SpatialStrategy
from volseg.parallel.spatial.transport.one_process import LocalDevices
from volseg.parallel.state.module import remember
from volseg.parallel.state.random import RandomState

__all__ = ["ModelParallel", "Strategy"]

logger = logging.getLogger(__name__)

STRATEGIES = ("auto", "spatial", "pipeline")


class Strategy(Protocol):
    """What ``ModelParallel`` asks of a way to parallelise."""

    @property
    def partition(self) -> Any:
        """Describe which device does what; printable."""

    @property
    def is_shared(self) -> bool:
        """Whether volumes lie on several processes, all of which run the network together."""

    @property
    def is_recordable(self) -> bool:
        """Whether a process runs the network on one device, so that a whole step can be one CUDA graph there."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the network's own ``forward``."""


class ModelParallel(nn.Module):
    """Run a network over several devices, exactly as on one.

    Parameters
    ----------
    net
        Any module. It is used in place (not copied) and stays reachable as ``.module``.
    strategy
        ``"spatial"`` cuts volumes into slabs, ``"pipeline"`` cuts the layers into stages. ``"auto"`` takes the pipeline
        where ``split_size`` is given, else the spatial split, which also divides a batch of one; in one process, and
        without options of the spatial split, it takes the pipeline after all where the first volume meets an operator
        without a sharded form.
    devices
        Devices of this process; all visible GPUs by default (the CPU where there is none). A device may be named
        several times. Under ``torchrun`` each process has one device, and the shards are the processes of ``mesh``.
    split_size
        Samples per micro-batch, or ``"auto"``: pipeline only.
    mesh
        A ``torch.distributed.device_mesh.DeviceMesh``. A dimension named ``"data"`` holds replicas, whose gradients are
        averaged; each other dimension cuts one axis of the volume. By default all processes share each volume.
    on_unsupported
        ``"raise"`` for an operator without a sharded form, or ``"gather"`` to run it on whole tensors and say so once.
    checkpoint
        Activations to recompute instead of keep: ``None``, ``"all"``, or the number of finest levels (spatial only).
    options
        Passed on to the strategy, see ``SpatialStrategy`` and ``PipelineStrategy``.

    Attributes
    ----------
    chosen, why : str
        The strategy in use, ``"spatial"`` or ``"pipeline"``, and the reason.

    Raises
    ------
    ParallelError
        If the strategy is unknown or the devices do not fit it.

    Examples
    --------
    >>> import torch
    >>> net = torch.nn.Conv3d(1, 2, 3, padding=1)
    >>> model = ModelParallel(net, strategy="spatial", devices=["cpu", "cpu"])
    >>> sorted(model.state_dict())
    ['bias', 'weight']
    >>> model(torch.zeros(1, 1, 8, 8, 8)).full_tensor().shape
    torch.Size([1, 2, 8, 8, 8])
    """

    module: nn.Module
    strategy: Strategy

    def __init__(
        self,
        net: nn.Module,
        strategy: str = "auto",
        devices: Sequence[str | int | torch.device] | None = None,
        split_size: int | str | None = None,
        mesh: Any = None,
        on_unsupported: Literal["raise", "gather"] = "raise",
        checkpoint: str | int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        replicated = options.pop("replicated", True)
        _check_not_lazy(net)
        chosen, self.why = _choose(strategy, split_size)
        self.chosen = chosen
        if strategy == "auto":
            logger.info("ModelParallel(strategy='auto') takes %s: %s", chosen, self.why)
        self._arguments = dict(
            strategy=strategy,
            devices=devices,
            split_size=split_size,
            mesh=mesh,
            on_unsupported=on_unsupported,
            checkpoint=checkpoint,
            **options,
        )
        # Registered nowhere: a registered child would put "module." before every key.
        object.__setattr__(self, "module", net)
        object.__setattr__(self, "strategy", None)
        common = {"devices": devices, "mesh": mesh, **options}
        if chosen == "spatial":
            common |= {"on_unsupported": on_unsupported, "checkpoint": checkpoint, "replicated": replicated}
            built: Strategy = SpatialStrategy(net, **common)
        else:
            if on_unsupported != "raise" or checkpoint is not None:
                raise ParallelError(
                    f"on_unsupported={on_unsupported!r} and checkpoint={checkpoint!r} belong to strategy='spatial'; "
                    "leave them out for a pipeline, which runs every operator as it is"
                )

            built = PipelineStrategy(net, split_size=split_size, **common)
        object.__setattr__(self, "strategy", built)
        may_change = strategy == "auto" and chosen == "spatial" and on_unsupported == "raise" and checkpoint is None
        self._tries = may_change and mesh is None and not options and _is_in_one_process(built)
        self._share_registries()
        self.training = net.training

    def _share_registries(self) -> None:
        """Hold the network's own dictionaries, so that recursion over modules sees its plain names."""
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            object.__setattr__(self, name, getattr(self.module, name))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the network over the devices; spatial outputs are sharded volumes."""
        if self._tries:
            return self._first_forward(*args, **kwargs)
        return self.strategy(*args, **kwargs)

    def _first_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the spatial split, or the pipeline if it cannot; the choice is made then."""
        attempt = _Attempt(self.module, args, kwargs)
        try:
            result = self.strategy(*args, **kwargs)
        except UnsupportedOperatorError as fault:
            attempt.put_back()
            self._take_layers(str(fault).partition("\n")[0])
            return self.strategy(*args, **kwargs)
        self._tries = False
        self.why = "every operator of the first volume has a sharded form"
        return result

    def _take_layers(self, reason: str) -> None:
        pipeline = PipelineStrategy(self.module, devices=self._arguments["devices"])
        object.__setattr__(self, "strategy", pipeline)
        self._tries, self.chosen = False, "pipeline"
        self.why = f"an operator of the network has no sharded form: {reason}"
        logger.warning("ModelParallel(strategy='auto') takes the pipeline: %s", self.why)

    @property
    def partition(self) -> Any:
        """Which device does what, as the strategy tells it; print it."""
        return self.strategy.partition

    def train(self, mode: bool = True) -> "ModelParallel":
        """Set the mode of the network and of the wrapper."""
        self.module.train(mode)
        self.training = mode
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the plain network's state under its plain keys."""
        return self.module.state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.module._load_from_state_dict(*args, **kwargs)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "ModelParallel":
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            moved = fn(torch.empty(0, dtype=tensor.dtype, device=tensor.device)).device
            if moved != tensor.device:
                raise PlacementError(
                    f"the parameters of this ModelParallel are placed on {tensor.device} and were asked to move to "
                    f"{moved}; pass devices=[...] to ModelParallel instead of calling .to(), .cuda() or .cpu()"
                )
        self.module._apply(fn, recurse)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModelParallel":
        # Devices and process groups are shared; the network is copied. One process may copy alone: nothing is sent.
        arguments: dict[str, Any] = {**self._arguments, "replicated": False}
        return ModelParallel(copy.deepcopy(self.module, memo), **arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the network and the arguments; whoever loads them needs the same devices."""
        if self._arguments["mesh"] is not None:
            raise ParallelError(
                "a ModelParallel on a mesh cannot be pickled, as process groups belong to the running processes; save "
                "model.state_dict(), or pickle model.module, and wrap that again"
            )
        return _rebuilt, (self.module, self._arguments)

    def extra_repr(self) -> str:
        """Name the strategy."""
        return type(self.strategy).__name__


def _choose(strategy: str, split_size: int | str | None) -> tuple[str, str]:
    """Return the strategy to begin with, and why."""
    if strategy not in STRATEGIES:
        raise ParallelError(f"strategy must be one of {', '.join(STRATEGIES)}, got {strategy!r}")
    if strategy == "auto":
        if split_size is None:
            return "spatial", "no split_size was given"
        return "pipeline", f"split_size={split_size!r} was given"
    if strategy == "spatial" and split_size is not None:
        raise ParallelError(
            f"split_size={split_size!r} is the micro-batch of strategy='pipeline'; the spatial split has none: leave "
            f"it out"
        )
    return strategy, "it was asked for"


def _is_in_one_process(strategy: Strategy) -> bool:
    return isinstance(strategy, SpatialStrategy) and isinstance(strategy.communicator, LocalDevices)


def _check_not_lazy(net: nn.Module) -> None:
    """Refuse parameters whose shape the first batch decides: they must be placed before it comes."""
    lazy = [name for name, tensor in (*net.named_parameters(), *net.named_buffers()) if is_lazy(tensor)]
    if lazy:
        raise ParallelError(
            f"{', '.join(lazy)} of {type(net).__name__} have no shape yet (lazy modules); run one batch through the "
            "plain network first, under torch.no_grad(), and wrap it then"
        )


def _rebuilt(net: nn.Module, arguments: dict[str, Any]) -> ModelParallel:
    return ModelParallel(net, **arguments)


class _Attempt:
    """What a forward pass that may be given up could change: the network, random numbers, and its own input."""

    def __init__(self, net: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self._net = remember(net)
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        self._random = RandomState([torch.device("cuda", index) for index in devices])
        given = [leaf for leaf in tree_leaves((args, kwargs)) if type(leaf) is Tensor and not leaf.is_inference()]
        self._inputs = [(leaf, leaf._version, leaf.detach().clone()) for leaf in given]

    def put_back(self) -> None:
        """Undo the attempt."""
        self._net.put_back()
        self._random.put_back()
        for tensor, version, value in self._inputs:
            if tensor._version == version:
                continue
            if tensor.requires_grad:
                raise ParallelError(
                    f"the network changes its input of shape {tuple(tensor.shape)} in place, which needs a gradient, "
                    "and has operators without a sharded form, before which the change cannot be undone; choose "
                    "strategy='pipeline', or pass input.clone()"
                )
            with torch.no_grad():
                tensor.copy_(value)
