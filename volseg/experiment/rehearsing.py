"""Run a network and its losses once on next to nothing, before a run folder is begun.

What a network needs besides its parameters (a package that MONAI imports late, a size, an output for each label) shows
when it runs, and not when it is built. On meta tensors a run costs no memory and a tenth of a second; a network that
looks at values, which these have not, runs on the smallest volume that it takes.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from volseg.config.registry import explain_import
from volseg.config.schema import ExperimentConfig
from volseg.data.cases import Task
from volseg.data.labels import num_indices
from volseg.device.compiler_internals import explain_no_compiler
from volseg.device.torch_internals import tree_leaves
from volseg.errors import ConfigError, ParallelError, VolsegError
from volseg.models import FitGrid
from volseg.models.grids import run_on_copies
from volseg.parallel import CompiledNetwork, FastKernels
from volseg.parallel.compiled_network import refusing
from volseg.parallel.fast_kernels import explain_absence
from volseg.parallel.state.module import remember
from volseg.parallel.state.random import own_random_numbers
from volseg.workflow.components import is_fused_on_gpu
from volseg.workflow.named import Named
from volseg.workflow.objective import Objective
from volseg.workflow.precision import Precision

__all__ = [
    "OneOutput",
    "explain_eager",
    "explain_slowness",
    "rehearse_losses",
    "rehearse_network",
    "require_window",
    "with_compiled_kernels",
    "with_fast_kernels",
]

logger = logging.getLogger(__name__)


SIDES = (16, 16, 16)
"""Of the volumes on which losses are tried, in voxels."""

SAMPLES = 2


class OneOutput(nn.Module):
    """A network of several outputs of which one is asked for.

    Parameters
    ----------
    model : callable
        Returns a tuple or list.
    index : int
        Of the output.
    """

    def __init__(self, model: Callable[[Tensor], Any], index: int) -> None:
        super().__init__()
        self.model = model
        self.index = index

    def forward(self, image: Tensor) -> Any:
        """Return the output for ``image`` (B, C, D, H, W)."""
        return self.model(image)[self.index]


def rehearse_network(network: FitGrid, config: ExperimentConfig, task: Task) -> dict[str, Any]:
    """Return the outputs of the network in training, by name: tensors on meta or of a small volume, lists of such.

    Raises
    ------
    ConfigError
        If it does not run, lacks a package, or its outputs are not those that ``network.outputs`` names, logits with
        a channel per label among them.
    """
    name = config.network.name
    shape, output = _run_once(network, name, task.num_channels, config.patch.size)
    try:
        made = Named(lambda _: output, ["image"], config.network.outputs)({"image": None})
    except VolsegError as fault:
        raise ConfigError(f"network {name}: {fault}; network.outputs names what it returns") from fault
    heads = list(made["logits"]) if isinstance(made["logits"], list | tuple) else [made["logits"]]
    came = [tuple(head.shape) if isinstance(head, Tensor) else type(head).__name__ for head in heads]
    wanted = (shape[0], task.num_outputs, *shape[2:])
    if came[:1] != [wanted] or any(len(head) != 5 or head[1] != wanted[1] for head in came):
        raise ConfigError(
            f"network {name} must return logits (B, K, D, H, W) = {wanted} for an image of {shape}, K being the "
            f"task's {task.num_outputs} labels, got {came}; a network of several outputs names them in network.outputs"
        )
    return made


def _run_once(network: FitGrid, name: str, num_channels: int, patch: Sequence[int]) -> tuple[tuple[int, ...], Any]:
    """Return the shape of an image, and the network's output for it."""
    mode, sides = network.training, network.rule.sides(patch)
    shape = (1, num_channels, *sides)
    network.train()
    try:
        with torch.random.fork_rng([]), torch.no_grad():
            try:
                image = torch.empty(shape, device="meta")
                return shape, run_on_copies(network, partial(torch.empty_like, device="meta"), image)
            except ImportError:
                raise
            except Exception:  # noqa: S110 - meta tensors have no values, at which the network may look
                pass
            shape = (1, num_channels, *network.rule.sides(network.rule.minimum))
            # Clones, as a norm's statistics would be moved.
            return shape, run_on_copies(network, torch.clone, torch.zeros(shape))
    except ImportError as fault:
        raise ConfigError(f"network {name} {explain_import(fault)}") from fault
    except VolsegError:
        raise
    except Exception as fault:  # whatever a network of the user's own runs into
        raise ConfigError(f"network {name} cannot be run on an image of {shape}: {_tell(fault)}") from fault
    finally:
        network.train(mode)


def rehearse_losses(objective: Objective, made: Mapping[str, Any], task: Task) -> None:
    """Compute every loss once on random volumes.

    Parameters
    ----------
    objective : Objective
        On the CPU.
    made : mapping
        What the network returns, by name; see `rehearse_network`.
    task : Task
        Its channels and labels.

    Raises
    ------
    ConfigError
        If a loss refuses them or gives no number, with what it said.
    """
    generator = torch.Generator().manual_seed(0)
    label = torch.randint(num_indices(task), (SAMPLES, 1, *SIDES), generator=generator)
    fields: dict[str, Any] = {
        "image": torch.randn(SAMPLES, task.num_channels, *SIDES, generator=generator),
        "label": label.to(torch.uint8),
        **{name: _draw_like(value, generator) for name, value in made.items()},
    }
    for loss in objective.losses:
        try:
            values = loss(fields)
        except ImportError as fault:
            raise ConfigError(f"loss {loss.title} {explain_import(fault)}") from fault
        except Exception as fault:  # whatever MONAI's or the user's own code runs into
            if isinstance(fault, VolsegError) and not isinstance(fault, ValueError | KeyError):
                raise
            given = {name: _describe(fields[name]) for name in loss.inputs}
            raise ConfigError(f"loss {loss.title} cannot be computed of {given}: {_tell(fault)}") from fault
        for value in values.values():
            if not (isinstance(value, Tensor) and value.numel() == 1):
                raise ConfigError(f"loss {loss.title} must give one number, got {_describe(value)}")


def _draw_like(value: Any, generator: torch.Generator, level: int = 0) -> Any:
    """Return random numbers in place of an output: volumes on the grid of ``SIDES``, coarser ones on half of it."""
    if isinstance(value, list | tuple):
        finest = value[0].shape[-1] if value and isinstance(value[0], Tensor) and value[0].ndim else 1
        levels = [round(finest / head.shape[-1]).bit_length() - 1 if head.ndim == 5 else 0 for head in value]
        return [_draw_like(head, generator, each) for head, each in zip(value, levels, strict=True)]
    if not isinstance(value, Tensor):
        return value
    if value.ndim != 5:
        return torch.randn(SAMPLES if value.ndim else 1, *value.shape[1:], generator=generator).squeeze(0)
    sides = [max(1, side >> level) for side in SIDES]
    return torch.randn(SAMPLES, value.shape[1], *sides, generator=generator)


def _describe(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__


def _tell(fault: Exception) -> str:
    return f"{type(fault).__name__}: {str(fault).strip().partition(chr(10))[0]}"


def require_window(network: FitGrid, config: ExperimentConfig) -> None:
    """Raise for a network of one size without a window of it: the first whole volume may come after hours."""
    rule, window = network.rule, config.inference.window
    if rule.fixed and any(side > most for side, most in zip(window or (math.inf,) * 3, rule.minimum, strict=True)):
        raise ConfigError(
            f"network {config.network.name} takes volumes of {rule.minimum} voxels only; set inference.window to "
            f"{list(rule.minimum)}, got {window and list(window)}"
        )


# With which kernels a network runs on one device: this package's fast ones where they pay, torch's, compiled ones.


PAY_IN_BFLOAT16 = "the fast kernels pay in bfloat16, and training.precision is another"
LAUNCHED = "launched one by one they take longer than torch's"


def with_fast_kernels(
    network: FitGrid, config: ExperimentConfig, num_channels: int, device: torch.device, *, trains: bool
) -> FastKernels | None:
    """Return the network on its device with the fast kernels, or None where it is to run with torch's.

    Parameters
    ----------
    network : FitGrid
        Any network; it is run once on an empty batch, of which no trace is left.
    config : ExperimentConfig
        ``training.kernels`` and what decides whether the fast kernels pay.
    num_channels : int
        Of the image.
    device : torch.device
        Where the network will run.
    trains : bool
        Whether it will be trained. Otherwise windows of ``inference.window`` are what may be recorded.

    Raises
    ------
    ConfigError
        If ``training.kernels`` is ``fast`` and they cannot be had.
    """
    wanted = config.training.kernels
    if wanted == "measured":  # of a training that was measured, what it came to stands here
        wanted = "auto"
    is_open = wanted == "auto"
    if wanted in ("torch", "compiled") or (is_open and device.type == "cpu"):
        return None
    reason = explain_absence(device)
    if reason is None and is_open:
        explain = explain_slowness if trains else _explain_slow_predictions
        reason = explain(config, Precision.choose(config.training.precision, device).dtype)
    if reason is None:
        batch, size = (config.patch.batch, config.patch.size) if trains else (1, config.inference.window)
        shape = (batch, num_channels, *network.rule.sides(size or config.patch.size))
        try:
            return _rehearse(network, shape, config, device)
        except ParallelError as fault:
            reason = str(fault).partition("\n")[0]
    if not is_open:
        raise ConfigError(f"training.kernels is fast, but {reason}; set it to auto or torch")
    logger.info("training.kernels is auto and takes torch's: %s", reason)
    return None


def _rehearse(network: FitGrid, shape: Sequence[int], config: ExperimentConfig, device: torch.device) -> FastKernels:
    """Return the network, which has called no function without a form among the fast kernels."""
    model = FastKernels(network, device)
    with Precision.choose(config.training.precision, device).autocast():
        model.rehearse(torch.zeros(*shape, device=device))
    return model


def with_compiled_kernels(
    network: FitGrid,
    config: ExperimentConfig,
    num_channels: int,
    device: torch.device,
    lay_out: Callable[[nn.Module], nn.Module],
) -> FitGrid:
    """Return the network on its device, with its training pass as torch.compile makes it, compiled for the first patch.

    Parameters
    ----------
    network : FitGrid
        Any network; it is run on an empty batch, forward and backward, of which no trace is left.
    config : ExperimentConfig
        Patch, batch and precision.
    num_channels : int
        Of the image.
    device : torch.device
        Where the network will run.
    lay_out : callable
        Brings the network into the memory layout that it is to have; it may run it.

    Raises
    ------
    ConfigError
        If it cannot be compiled.
    """
    reason = explain_no_compiler(device)
    if reason is None:
        shape = (config.patch.batch, num_channels, *config.patch.sizes[0])
        network.to(device).run_by(CompiledNetwork)
        try:
            with refusing(config.network.name):  # a backward pass raises what the compiler does
                lay_out(network)
            _rehearse_training(network, torch.zeros(shape, device=device), config)
        except ParallelError as fault:
            reason = str(fault).partition("\n")[0]
    if reason is not None:
        raise ConfigError(f"training.kernels is compiled, but {reason}; set it to auto or torch")
    return network


def _rehearse_training(network: FitGrid, image: Tensor, config: ExperimentConfig) -> None:
    """Run forward and backward once, and leave no trace of it but what was compiled."""
    before, mode = remember(network), network.training
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    try:
        with own_random_numbers([image.device]), torch.enable_grad():
            network.train()
            with Precision.choose(config.training.precision, image.device).autocast():
                leaves = tree_leaves(network(image))
            volumes = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
            if volumes and trained:
                with refusing(config.network.name):
                    total = torch.stack([volume.float().mean() for volume in volumes]).sum()
                    torch.autograd.grad(total, trained, allow_unused=True)
    finally:
        network.train(mode)
        before.put_back()


def explain_eager(config: ExperimentConfig, dtype: torch.dtype) -> str | None:
    """Return the setting with which a training step in ``dtype`` is not recorded as a whole; None where it can be."""
    settings = config.training
    if not settings.record:
        return "training.record: false"
    if settings.accumulate > 1:
        return f"training.accumulate: {settings.accumulate}"
    if not is_fused_on_gpu(config.optimizer.spec()):
        return f"optimizer {config.optimizer.name}, which is not fused"
    # float16 scales its loss, and looks at the values of the gradients in each step.
    return "training.precision: fp16" if dtype is torch.float16 else None


def explain_slowness(config: ExperimentConfig, dtype: torch.dtype) -> str | None:
    """Return why the fast kernels would not pay in a training that computes in ``dtype``; None where they do."""
    if dtype is not torch.bfloat16:
        return PAY_IN_BFLOAT16
    reason = explain_eager(config, dtype)
    return None if reason is None else f"{LAUNCHED}, and no step is recorded with {reason}"


def _explain_slow_predictions(config: ExperimentConfig, dtype: torch.dtype) -> str | None:
    """Return why the fast kernels would not pay in predictions; None where they do."""
    if dtype is not torch.bfloat16:
        return PAY_IN_BFLOAT16
    if not config.inference.record:
        return f"{LAUNCHED}, and no window is recorded with inference.record: false"
    if config.inference.window is None:
        return f"{LAUNCHED}, and whole volumes, each of another shape, are not recorded (inference.window: null)"
    return None
