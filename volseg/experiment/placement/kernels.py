"""Choose the kernels of a network on one device: the fast ones of this package, torch's, or compiled ones."""

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from volseg.config.schema import ExperimentConfig
from volseg.device.compiler_internals import explain_no_compiler
from volseg.device.torch_internals import tree_leaves
from volseg.errors import ConfigError, ParallelError
from volseg.models import FitGrid
from volseg.parallel import CompiledNetwork, FastKernels
from volseg.parallel.compiled_network import refusing
from volseg.parallel.fast_kernels import explain_absence
from volseg.parallel.state.module import remember
from volseg.parallel.state.random import own_random_numbers
from volseg.workflow.components import is_fused_on_gpu
from volseg.workflow.precision import Precision

__all__ = ["explain_eager", "explain_slowness", "with_compiled_kernels", "with_fast_kernels"]

logger = logging.getLogger(__name__)


PAY_IN_BFLOAT16 = "the fast kernels pay in bfloat16, and training.precision is another"
LAUNCHED = "launched one by one they take longer than torch's"


def with_fast_kernels(
    network: FitGrid, config: ExperimentConfig, num_channels: int, device: torch.device, *, trains: bool
) -> FastKernels | None:
    """Return the network on its device with the fast kernels, or None if it should run with torch's.

    Parameters
    ----------
    network : FitGrid
        Any network; it runs once on an empty batch, which leaves no trace.
    config : ExperimentConfig
        ``training.kernels``, and the settings that decide whether the fast kernels pay.
    num_channels : int
        Channels of the image.
    device : torch.device
        Device of the network.
    trains : bool
        Whether it will be trained. Otherwise windows of ``inference.window`` may be captured.

    Raises
    ------
    ConfigError
        If ``training.kernels`` is ``fast`` and they are not available.
    """
    wanted = config.training.kernels
    if wanted == "measured":  # a measured training has its result here
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
    """Return the network; raise if it calls a function that the fast kernels do not support."""
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
    """Return the network on its device with a training pass by torch.compile, compiled for the first patch.

    Parameters
    ----------
    network : FitGrid
        Any network; it runs on an empty batch, forward and backward, which leaves no trace.
    config : ExperimentConfig
        Patch, batch and precision.
    num_channels : int
        Channels of the image.
    device : torch.device
        Device of the network.
    lay_out : callable
        Brings the network into its memory layout; it may run the network.

    Raises
    ------
    ConfigError
        If the network cannot be compiled.
    """
    reason = explain_no_compiler(device)
    if reason is None:
        shape = (config.patch.batch, num_channels, *config.patch.sizes[0])
        network.to(device).run_by(CompiledNetwork)
        try:
            with refusing(config.network.name):  # the backward pass may raise the compiler's errors
                lay_out(network)
            _rehearse_training(network, torch.zeros(shape, device=device), config)
        except ParallelError as fault:
            reason = str(fault).partition("\n")[0]
    if reason is not None:
        raise ConfigError(f"training.kernels is compiled, but {reason}; set it to auto or torch")
    return network


def _rehearse_training(network: FitGrid, image: Tensor, config: ExperimentConfig) -> None:
    """Run forward and backward once, and leave no trace except the compiled code."""
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
    """Return the setting that prevents capturing a training step in ``dtype`` as a whole, or None."""
    settings = config.training
    if not settings.record:
        return "training.record: false"
    if settings.accumulate > 1:
        return f"training.accumulate: {settings.accumulate}"
    if not is_fused_on_gpu(config.optimizer.spec()):
        return f"optimizer {config.optimizer.name}, which is not fused"
    # float16 scales its loss, and reads the values of the gradients in each step.
    return "training.precision: fp16" if dtype is torch.float16 else None


def explain_slowness(config: ExperimentConfig, dtype: torch.dtype) -> str | None:
    """Return why the fast kernels would not pay in a training that computes in ``dtype``, or None."""
    if dtype is not torch.bfloat16:
        return PAY_IN_BFLOAT16
    reason = explain_eager(config, dtype)
    return None if reason is None else f"{LAUNCHED}, and no step is recorded with {reason}"


def _explain_slow_predictions(config: ExperimentConfig, dtype: torch.dtype) -> str | None:
    """Return why the fast kernels would not pay in predictions, or None."""
    if dtype is not torch.bfloat16:
        return PAY_IN_BFLOAT16
    if not config.inference.record:
        return f"{LAUNCHED}, and no window is recorded with inference.record: false"
    if config.inference.window is None:
        return f"{LAUNCHED}, and whole volumes, each of another shape, are not recorded (inference.window: null)"
    return None
