"""Compare a network on several devices with the same network on one, in every mode that training meets.

The comparison runs in float64, so that faults of the method exceed round-off. Each mode (training or evaluation,
activations recomputed or kept, recorded or not) runs fresh copies for two steps of gradient descent, with real copies
between devices, and is compared value by value. The report names the values that cannot be compared: see `Report`.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from volseg.errors import ParallelError
from volseg.parallel.devices import list_gpus
from volseg.parallel.state.random import seeded
from volseg.parallel.verification.comparison import default_objective
from volseg.parallel.verification.modes import Comparison, make_copies
from volseg.parallel.verification.report import Report

ROUND_OFF = 1e-6
"""Largest relative error that counts as equal: round-off of deep networks on small volumes, where a norm over a few
voxels amplifies it. Real faults are above 1e-4."""

SHARDS = 4
"""Number of shards if the machine has fewer than two GPUs."""


def verify(
    net: nn.Module,
    shape: Sequence[int],
    devices: Sequence[str | int | torch.device] | None = None,
    objective: Callable[[Any], Tensor] = default_objective,
    tolerance: float = ROUND_OFF,
    *,
    strategy: str = "spatial",
    more: Sequence[Any] = (),
    **options: Any,
) -> Report:
    """Compare ``net`` on ``devices`` with ``net`` on one of them, in float64, on a random volume, mode by mode.

    Each mode compares the output, the gradients of inputs and parameters, buffers, attributes of modules, the
    parameters after a step, the inputs after the call, and all of it in a second step. Modes: training and
    evaluation, without gradients, with and without recomputation (spatial) or micro-batches (pipeline), recorded.

    Dropout is turned off (the two sides would draw different masks); batch norm stays in training mode. The network
    itself does not change: copies are compared.

    Parameters
    ----------
    net
        The network. Its modules in eval mode stay in eval mode.
    shape
        Input shape ``(B, C, D, H, W)`` or ``(B, C, H, W)``; a small one is enough. A pipeline's micro-batches need a
        ``B`` of two or more.
    devices
        Shards (or stages) of this process; by default all visible GPUs, or four copies on the CPU. ``["cpu"] * 4``
        becomes ``["cpu", "cpu:1", ...]``, between which tensors are copied as between GPUs. Under ``torchrun``, leave
        it out.
    objective
        Maps outputs to a loss.
    tolerance
        Largest relative error that counts as equal.
    strategy
        ``"spatial"`` or ``"pipeline"``.
    more
        Further arguments of ``forward`` after the volume, such as a tensor of time steps.
    options
        Options of ``ModelParallel``. ``checkpoint`` is the setting of the recomputed modes, ``"all"`` by default.

    Raises
    ------
    ParallelError
        For a shape that cannot be cut over the devices, fewer than two devices, or a network that cannot be copied.
    GridError
        If the plain network itself fails on this shape.
    UnsupportedOperatorError
        If every mode was refused; otherwise the report names the refused modes.

    Examples
    --------
    >>> report = verify(nn.Conv3d(1, 2, 3, padding=1), (1, 1, 8, 6, 6), devices=["cpu"] * 2)
    >>> report.ok
    True
    """
    if strategy not in ("spatial", "pipeline"):
        raise ParallelError(f"verify compares strategy='spatial' or 'pipeline', got {strategy!r}")
    if len(shape) not in (4, 5) or min(shape) < 1:
        raise ParallelError(
            f"shape must be (B, C, D, H, W) or (B, C, H, W) with sides of 1 or more, got {tuple(shape)}"
        )
    with seeded(0, list_gpus()), _hear() as said:
        comparison = Comparison(
            net, tuple(shape), more, _devices(devices, strategy), objective, tolerance, strategy, options
        )
        return comparison.report(said)


def _devices(devices: Sequence[str | int | torch.device] | None, strategy: str) -> list[torch.device] | None:
    """Return the devices to compare on, with real copies for shards that share the CPU; None within a process group."""
    if devices is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        if strategy == "pipeline":
            raise ParallelError("a pipeline runs in one process; name its devices, such as devices=['cpu'] * 2")
        return None
    if devices is None:
        gpus = torch.cuda.device_count()
        devices = list(range(gpus)) if gpus > 1 else [f"{'cuda' if gpus else 'cpu'}:0"] * SHARDS
    chosen = [torch.device("cuda", device) if isinstance(device, int) else torch.device(device) for device in devices]
    if len(chosen) < 2:
        raise ParallelError(
            f"verify compares several devices with one and got {len(chosen)}; name one several times, such as "
            f"devices=['{chosen[0] if chosen else 'cpu'}'] * 2"
        )
    if all(device.type == "cpu" for device in chosen) and len(set(chosen)) < len(chosen):
        return make_copies(len(chosen))
    return chosen


@contextmanager
def _hear() -> Iterator[list[str]]:
    """Collect the warnings of this package instead of printing them once for each copy of the network."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(__name__.partition(".")[0])
    propagates, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates
