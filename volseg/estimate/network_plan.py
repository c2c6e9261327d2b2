"""``volseg.plan``: what fits, and what is fastest, for a network in a loop of one's own."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from volseg.errors import ParallelError
from volseg.estimate.auto_strategy import describe_network
from volseg.estimate.candidate_list import Freedom
from volseg.estimate.estimator import Machine, Planned
from volseg.estimate.gpu_kinds import GpuKind, find_kind
from volseg.estimate.instances import find_instance, find_links
from volseg.estimate.planning import StepPlan, plan_work
from volseg.estimate.work import Work
from volseg.parallel.devices import list_gpus, name_devices
from volseg.parallel.fast_kernels import CAPABILITY

__all__ = ["plan"]

Loss = Callable[[Any], Tensor]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def plan(
    net: nn.Module,
    shape: Sequence[int],
    *,
    gpus: int | None = None,
    gpu: GpuKind | str | None = None,
    instance: str | None = None,
    devices: int | Sequence[str | int | torch.device] | None = None,
    precision: str | torch.dtype = "auto",
    loss: Loss | None = None,
    optimizer: MakeOptimizer | None = None,
    divisors: Sequence[int] = (1, 1, 1),
    thorough: bool = False,
) -> StepPlan:
    """Estimate a training step of a network on GPUs that need not be there, and choose how these share it.

    Parameters
    ----------
    net : nn.Module
        Any network, on any device. It is left as it is.
    shape : sequence of int
        Of a step's images, (B, C, D, H, W).
    gpus : int, optional
        How many; by default 1, all of the instance's, or all of this machine's.
    gpu : GpuKind or str, optional
        What they are, such as ``v100-16``; `volseg.estimate.gpu_kinds.name_kinds` lists them.
    instance : str, optional
        In place of that, a machine that can be rented, such as ``p3.8xlarge``.
    devices : sequence, optional
        In place of these, which GPUs of this machine; a number means ``gpus``.
    precision : str or torch.dtype
        ``fp32``, ``bf16``, ``fp16``, or ``auto``: bf16 where the GPU has units for it, else fp16.
    loss : callable, optional
        From the network's outputs to a scalar; by default a mean of squares.
    optimizer : callable, optional
        From parameters to an optimizer; by default Adam.
    divisors : sequence of int
        What sides must be multiples of, for the largest volume that is told where nothing fits.
    thorough : bool
        Whether to follow candidates too that cannot be the fastest.

    Returns
    -------
    StepPlan
        ``.chosen``, ``.why``, ``.forecasts``, ``.table()``, ``.to_json()``.

    Raises
    ------
    ConfigError
        For an unknown kind of GPU or instance; names the nearest.
    ParallelError
        If no GPUs are named and none is there, the shape is none of a batch, or the network cannot be followed.

    Examples
    --------
    >>> net = nn.Sequential(nn.Conv3d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv3d(8, 2, 1))
    >>> plan(net, (4, 1, 64, 64, 64), gpus=2, gpu="v100-16").chosen.candidate.num_gpus <= 2
    True
    """
    if gpus is not None and devices is not None:
        raise ParallelError(f"{gpus=} and {devices=} were given: give one of them, gpus for a number")
    machine = _find_machine(devices if gpus is None else gpus, gpu, instance)
    work = describe_network(
        net, _check(shape), dtype=_find_dtype(precision, machine.gpu), loss=loss, optimizer=optimizer
    )

    def resize(sides: Sequence[int]) -> tuple[Work, int]:
        larger = (*shape[:2], *sides)
        return describe_network(net, larger, dtype=work.precision, loss=loss, optimizer=optimizer), 0

    has_fast = machine.gpu.capability >= CAPABILITY and work.precision is torch.bfloat16
    free = Freedom(kernels=("fast", "torch") if has_fast else ("torch",), records=work.precision is not torch.float16)
    d, h, w = divisors
    planned = Planned(work=work, machine=machine, free=free, resize=resize, divisors=(d, h, w))
    return plan_work(planned, thorough=thorough)


def _check(shape: Sequence[int]) -> tuple[int, ...]:
    if len(shape) != 5 or not all(isinstance(side, int) and side > 0 for side in shape):
        raise ParallelError(f"shape is that of a step's images, (B, C, D, H, W), got {tuple(shape)}")
    return tuple(shape)


def _find_dtype(precision: str | torch.dtype, gpu: GpuKind) -> torch.dtype:
    if isinstance(precision, torch.dtype):
        return precision
    if precision == "auto":
        return torch.bfloat16 if gpu.takes_bfloat16() else torch.float16
    if precision not in PRECISIONS:
        raise ParallelError(f"precision is auto, {', '.join(PRECISIONS)} or a torch.dtype, got {precision!r}")
    return PRECISIONS[precision]


def _find_machine(
    devices: int | Sequence[str | int | torch.device] | None, gpu: GpuKind | str | None, instance: str | None
) -> Machine:
    if gpu is not None and instance is not None:
        raise ParallelError(f"gpu={gpu!r} and instance={instance!r} were given: an instance has GPUs of its own")
    count = devices if isinstance(devices, int) else None
    if instance is not None:
        named = find_instance(instance)
        wanted = named.num_gpus if count is None else count
        if not 1 <= wanted <= named.num_gpus:
            raise ParallelError(f"gpus={wanted}, and {named.instance} has {named.num_gpus} GPU(s)")
        return replace(named, num_gpus=wanted)
    if gpu is None:
        there = list_gpus() if devices is None or isinstance(devices, int) else name_devices(devices)
        there = there[:count]
        if not there or any(device.type != "cuda" for device in there):
            raise ParallelError(
                "for which GPUs? None is visible here; name a kind by gpu='v100-16' with gpus=4, or a machine by "
                "instance='p3.8xlarge'"
            )
        gpu, count = torch.cuda.get_device_name(there[0]), count or len(there)
    kind = find_kind(gpu) if isinstance(gpu, str) else gpu
    return Machine(gpu=kind, num_gpus=count or 1, links=find_links(kind), gpu_bytes=kind.memory)
