"""What ``ModelParallel(strategy="auto")`` takes: chosen at the first batch, by a forecast of the step.

Neither the loss nor the optimizer is known to a model. What is followed is a mean of squares, which needs what most
losses do, and Adam, whose two averages are the most that common optimizers keep: what fits with them fits with others.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from volseg.device.torch_internals import tree_leaves
from volseg.errors import VolsegError
from volseg.estimate.candidate_list import Freedom
from volseg.estimate.estimator import Machine, Planned
from volseg.estimate.gpu_kinds import find_kind
from volseg.estimate.instances import find_links
from volseg.estimate.planning import StepPlan, plan_work
from volseg.estimate.work import Batch, Step, Work
from volseg.parallel.pipeline import Pipeline
from volseg.parallel.spatial import Spatial
from volseg.parallel.strategy import Options

__all__ = ["choose_for_first_batch", "describe_network", "square_mean", "take_options"]

logger = logging.getLogger(__name__)


def square_mean(outputs: Any) -> Tensor:
    """Return the mean square of all outputs, which stands for a loss that is not known."""
    volumes = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return torch.stack([volume.float().square().mean() for volume in volumes]).sum()


def describe_network(
    net: nn.Module,
    shape: Sequence[int],
    *,
    dtype: torch.dtype,
    loss: Any = None,
    optimizer: Any = None,
) -> Work:
    """Return the training step of a network by itself.

    Parameters
    ----------
    net : nn.Module
        It is followed as a copy without values, and left as it is.
    shape : sequence of int
        Of the image of a whole batch, (B, C, D, H, W).
    dtype : torch.dtype
        In which the forward pass is computed; autocast, unless that is float32.
    loss : callable, optional
        From the network's outputs to a scalar; by default a mean of squares.
    optimizer : callable, optional
        From an iterable of parameters to an optimizer; by default Adam.
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
) -> tuple[Options, str] | None:
    """Return the strategy that is forecast to be fastest on several GPUs, and why.

    None where there is nothing to forecast: on a CPU, on one GPU, for a call with more than one volume, and where the
    network cannot be followed, which is said.
    """
    gpus = list(dict.fromkeys(devices))
    is_known = len(gpus) > 1 and len(gpus) == len(devices) and all(device.type == "cuda" for device in gpus)
    if not is_known or len(args) != 1 or not isinstance(args[0], Tensor) or args[0].ndim < 3:
        return None
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else torch.float32
    try:
        kind = find_kind(torch.cuda.get_device_name(gpus[0]))
        usable = min(map(_count_usable_bytes, gpus))
        machine = Machine(gpu=kind, num_gpus=len(gpus), links=find_links(kind), gpu_bytes=usable)
        work = describe_network(net, args[0].shape, dtype=dtype)
        planned = Planned(work=work, machine=machine, free=Freedom(one_process=True))
        plan = plan_work(planned, only=lambda candidate: candidate.num_gpus == len(gpus))
    except VolsegError as fault:
        logger.warning("ModelParallel(strategy='auto') forecasts nothing: %s", str(fault).partition("\n")[0])
        return None
    return take_options(plan)


def take_options(plan: StepPlan) -> tuple[Options, str]:
    """Return the options of a plan's choice; where nothing fits, of what needs least, and let the run tell."""
    best = plan.chosen
    if best is None:
        best = min(
            (each for each in plan.forecasts if each.memory is not None),
            key=lambda each: 0 if each.memory is None else each.memory.total,
        )
    candidate = best.candidate
    if candidate.pipeline > 1:
        return Pipeline(split_size=candidate.split_size or "auto"), plan.why
    return Spatial(checkpoint=candidate.checkpoint), plan.why


def _count_usable_bytes(device: torch.device) -> int:
    """Return what this process may take of a GPU: what is free, and what it has already."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free) + torch.cuda.memory_reserved(device)
