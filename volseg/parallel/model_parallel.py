"""``ModelParallel``: one ``nn.Module`` that runs a plain network over several devices.

The wrapper is a thin dispatcher. A *strategy* object places the network and runs it: ``SpatialStrategy`` cuts the
volume into slabs, ``PipelineStrategy`` cuts the network into stages. Everything that a training loop does to
a module (parameters, state, modes) reaches the plain network under the plain network's names.

It refuses to be moved: ``.cuda()`` and ``.to(device)`` would tear the placement apart, and raise.
"""

import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import nn

from volseg.errors import ParallelError, PlacementError

__all__ = ["ModelParallel", "Strategy"]

logger = logging.getLogger(__name__)

STRATEGIES = ("auto", "spatial", "pipeline")


class Strategy(Protocol):
    """What ``ModelParallel`` asks of a way to parallelise."""

    @property
    def partition(self) -> Any:
        """Describe which device does what; printable."""

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
        where ``split_size`` is given, else the spatial split, which also divides a batch of one.
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
        chosen = _choose(strategy, split_size)
        if strategy == "auto":
            why = "no split_size was given" if split_size is None else f"split_size={split_size!r} was given"
            logger.info("ModelParallel(strategy='auto') takes %s: %s", chosen, why)
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
            from volseg.parallel.sharding import SpatialStrategy

            built: Strategy = SpatialStrategy(net, on_unsupported=on_unsupported, checkpoint=checkpoint, **common)
        else:
            from volseg.parallel.pipeline import PipelineStrategy

            if on_unsupported != "raise" or checkpoint is not None:
                raise ParallelError(
                    f"on_unsupported={on_unsupported!r} and checkpoint={checkpoint!r} belong to strategy='spatial'; "
                    "leave them out for a pipeline, which runs every operator as it is"
                )

            built = PipelineStrategy(net, split_size=split_size, **common)
        object.__setattr__(self, "strategy", built)
        self._share_registries()
        self.training = net.training

    def _share_registries(self) -> None:
        """Hold the network's own dictionaries, so that recursion over modules sees its plain names."""
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            object.__setattr__(self, name, getattr(self.module, name))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the network over the devices; spatial outputs are sharded volumes."""
        return self.strategy(*args, **kwargs)

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
        # Devices and process groups are shared; the network is copied.
        return ModelParallel(copy.deepcopy(self.module, memo), **self._arguments)  # type: ignore[arg-type]

    def extra_repr(self) -> str:
        """Name the strategy."""
        return type(self.strategy).__name__


def _choose(strategy: str, split_size: int | str | None) -> str:
    if strategy not in STRATEGIES:
        raise ParallelError(f"strategy must be one of {', '.join(STRATEGIES)}, got {strategy!r}")
    if strategy == "auto":
        return "spatial" if split_size is None else "pipeline"
    if strategy == "spatial" and split_size is not None:
        raise ParallelError(
            f"split_size={split_size!r} is the micro-batch of strategy='pipeline'; the spatial split has none: leave "
            f"it out"
        )
    return strategy
