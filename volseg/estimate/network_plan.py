"""Plan a network outside of an experiment: ``volseg.plan``, and the choice of ``ModelParallel(strategy="auto")``.

A model does not know its loss and its optimizer. The trace uses a mean of squares, which needs as much as most losses,
and Adam, whose two averages are the most that common optimizers keep: what fits with them fits with others.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from volseg.device.torch_internals import tree_leaves
from volseg.errors import ParallelError, VolsegError
from volseg.estimate.candidate import Batch, Freedom, Step, Work
from volseg.estimate.estimator import Machine, Planned
from volseg.estimate.fake_step.tracing import shorten
from volseg.estimate.gpu_kinds import GpuKind, find_kind
from volseg.estimate.instances import get_instance, get_links
from volseg.estimate.planning import StepPlan, plan_work
from volseg.parallel.devices import list_gpus
from volseg.parallel.fast_kernels import CAPABILITY
from volseg.parallel.pipeline import Pipeline
from volseg.parallel.spatial import Spatial

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
    precision: str | torch.dtype = "auto",
    loss: Loss | None = None,
    optimizer: MakeOptimizer | None = None,
    divisors: Sequence[int] = (1, 1, 1),
    thorough: bool = False,
) -> StepPlan:
    """Estimate a training step of a network on GPUs that need not exist, and choose how the GPUs share it.

    Parameters
    ----------
    net : nn.Module
        Any network, on any device. It is not changed.
    shape : sequence of int
        Shape of a step's images, (B, C, D, H, W).
    gpus : int, optional
        Number of GPUs; by default 1 with ``gpu``, otherwise all GPUs of the instance or of this machine.
    gpu : GpuKind or str, optional
        Kind of the GPUs, such as ``v100-16``; `volseg.estimate.gpu_kinds.KINDS` lists them.
    instance : str, optional
        Instead of ``gpu``, a machine for rent, such as ``p3.8xlarge``.
    precision : str or torch.dtype
        ``fp32``, ``bf16``, ``fp16``, or ``auto``: bf16 if the GPU has units for it, else fp16.
    loss : callable, optional
        Maps the network's outputs to a scalar; by default a mean of squares.
    optimizer : callable, optional
        Maps parameters to an optimizer; by default Adam.
    divisors : sequence of int
        Each side is a multiple of its divisor in the largest volume, which is reported if nothing fits.
    thorough : bool
        Whether to trace also the candidates that cannot be the fastest.

    Returns
    -------
    StepPlan
        ``.chosen``, ``.why``, ``.forecasts``, ``.table()``, ``.to_json()``.

    Raises
    ------
    ConfigError
        If the kind of GPU or the instance is unknown; names the nearest.
    ParallelError
        If no GPU is named and none is visible, if the shape is not that of a batch, or if the network cannot be traced.

    Examples
    --------
    >>> net = nn.Sequential(nn.Conv3d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv3d(8, 2, 1))
    >>> plan(net, (4, 1, 64, 64, 64), gpus=2, gpu="v100-16").chosen.candidate.num_gpus <= 2
    True
    """
    machine = _find_machine(gpus, gpu, instance)
    if len(shape) != 5 or not all(isinstance(side, int) and side > 0 for side in shape):
        raise ParallelError(f"shape is that of a step's images, (B, C, D, H, W), got {tuple(shape)}")
    work = describe_network(net, shape, dtype=_find_dtype(precision, machine.gpu), loss=loss, optimizer=optimizer)

    def resize(sides: Sequence[int]) -> tuple[Work, int]:
        larger = (*shape[:2], *sides)
        return describe_network(net, larger, dtype=work.precision, loss=loss, optimizer=optimizer), 0

    has_fast = machine.gpu.capability >= CAPABILITY and work.precision is torch.bfloat16
    free = Freedom(kernels=("fast", "torch") if has_fast else ("torch",), records=work.precision is not torch.float16)
    d, h, w = divisors
    planned = Planned(work=work, machine=machine, free=free, resize=resize, divisors=(d, h, w))
    return plan_work(planned, thorough=thorough)


def _find_dtype(precision: str | torch.dtype, gpu: GpuKind) -> torch.dtype:
    if isinstance(precision, torch.dtype):
        return precision
    if precision == "auto":
        return torch.bfloat16 if gpu.takes_bfloat16() else torch.float16
    if precision not in PRECISIONS:
        raise ParallelError(f"precision is auto, {', '.join(PRECISIONS)} or a torch.dtype, got {precision!r}")
    return PRECISIONS[precision]


def _find_machine(count: int | None, gpu: GpuKind | str | None, instance: str | None) -> Machine:
    if gpu is not None and instance is not None:
        raise ParallelError(f"gpu={gpu!r} and instance={instance!r} were given: an instance has GPUs of its own")
    if instance is not None:
        named = get_instance(instance)
        wanted = named.num_gpus if count is None else count
        if not 1 <= wanted <= named.num_gpus:
            raise ParallelError(f"gpus={wanted}, but {named.instance} has {named.num_gpus} GPU(s)")
        return replace(named, num_gpus=wanted)
    if gpu is None:
        there = list_gpus()[:count]
        if not there or any(device.type != "cuda" for device in there):
            raise ParallelError(
                "for which GPUs? None is visible here; name a kind by gpu='v100-16' with gpus=4, or a machine by "
                "instance='p3.8xlarge'"
            )
        gpu, count = torch.cuda.get_device_name(there[0]), count or len(there)
    kind = find_kind(gpu) if isinstance(gpu, str) else gpu
    return Machine(gpu=kind, num_gpus=count or 1, links=get_links(kind), gpu_bytes=kind.memory)


logger = logging.getLogger(__name__)


def square_mean(outputs: Any) -> Tensor:
    """Return the sum of the outputs' mean squares, which replaces an unknown loss."""
    volumes = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return torch.stack([volume.float().square().mean() for volume in volumes]).sum()


def describe_network(
    net: nn.Module, shape: Sequence[int], *, dtype: torch.dtype, loss: Any = None, optimizer: Any = None
) -> Work:
    """Return the training step of a network outside of an experiment.

    Parameters
    ----------
    net : nn.Module
        The network. A fake copy is traced; the network is not changed.
    shape : sequence of int
        Shape of the image of a whole batch, (B, C, D, H, W).
    dtype : torch.dtype
        Type of the forward pass, by autocast unless it is float32.
    loss : callable, optional
        Maps the network's outputs to a scalar; by default a mean of squares.
    optimizer : callable, optional
        Maps an iterable of parameters to an optimizer; by default Adam.
    """
    criterion = square_mean if loss is None else loss
    rest = tuple(shape[1:])

    def make_batch(rows: int, device: torch.device) -> Batch:
        return {"image": torch.zeros(rows, *rest, device=device, dtype=torch.float32)}

    def build_optimizer(model: nn.Module) -> Optimizer:
        made: Optimizer = Adam(model.parameters(), fused=True) if optimizer is None else optimizer(model.parameters())
        return made

    def build_step(model: nn.Module, built: Optimizer) -> Step:
        def step(batch: Batch) -> Any:
            image = batch["image"]
            with torch.autocast(image.device.type, dtype=dtype, enabled=dtype is not torch.float32):
                value = criterion(model(image))
            value.backward()
            built.step()
            built.zero_grad()
            return value.detach()

        return step

    return Work(
        build=lambda: net,
        shape=tuple(shape),
        make_batch=make_batch,
        build_optimizer=build_optimizer,
        build_step=build_step,
        precision=dtype,
        name=type(net).__name__,
    )


def choose_for_first_batch(
    net: nn.Module, devices: Sequence[torch.device], args: tuple[Any, ...]
) -> tuple[Spatial | Pipeline, str] | None:
    """Return the strategy that is estimated to be fastest on several GPUs, and the reason.

    If nothing fits, it is the strategy of the least memory.

    Return None on a CPU, on one GPU, and for a call with more than one argument; also, with a warning, if the network
    cannot be traced.
    """
    gpus = list(dict.fromkeys(devices))
    is_known = len(gpus) > 1 and len(gpus) == len(devices) and all(device.type == "cuda" for device in gpus)
    if not is_known or len(args) != 1 or not isinstance(args[0], Tensor) or args[0].ndim < 3:
        return None
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else torch.float32
    try:
        kind = find_kind(torch.cuda.get_device_name(gpus[0]))
        # Free memory, and the memory that this process has reserved.
        usable = min(torch.cuda.mem_get_info(gpu)[0] + torch.cuda.memory_reserved(gpu) for gpu in gpus)
        machine = Machine(gpu=kind, num_gpus=len(gpus), links=get_links(kind), gpu_bytes=usable)
        work = describe_network(net, args[0].shape, dtype=dtype)
        planned = Planned(work=work, machine=machine, free=Freedom(one_process=True))
        found = plan_work(planned, only=lambda candidate: candidate.num_gpus == len(gpus))
    except VolsegError as fault:
        logger.warning("ModelParallel(strategy='auto') forecasts nothing: %s", shorten(fault))
        return None
    known = (each for each in found.forecasts if each.memory is not None)
    candidate = (found.chosen or min(known, key=lambda each: each.needed)).candidate
    if candidate.pipeline > 1:
        return Pipeline(split_size=candidate.split_size or "auto"), found.why
    return Spatial(checkpoint=candidate.checkpoint), found.why
