"""Build the network of a config, on the device or devices that it trains or predicts on, with suitable kernels."""

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from volseg.config.registry import explain_import
from volseg.config.schema import ExperimentConfig
from volseg.data.cases import Task
from volseg.device.compiler_internals import explain_no_compiler
from volseg.device.torch_internals import tree_leaves
from volseg.errors import ConfigError, ParallelError
from volseg.experiment.building import build_objective
from volseg.experiment.rehearsing import rehearse_losses, rehearse_network, require_window
from volseg.memory import total_bytes
from volseg.models.fit_grid import FitGrid
from volseg.models.layout import faster_layout
from volseg.models.networks import build_network
from volseg.parallel import CompiledNetwork, FastKernels, ModelParallel
from volseg.parallel.compiled_network import refusing
from volseg.parallel.data_parallel import DataParallel
from volseg.parallel.devices import (
    count_gpus,
    count_launched,
    current_gpu_or_cpu,
    is_distributed,
    list_devices,
    list_gpus,
    require_devices,
)
from volseg.parallel.fast_kernels import explain_absence
from volseg.parallel.model_parallel import StrategyOptions
from volseg.parallel.processes.group import largest_over_processes
from volseg.parallel.state.module import remember
from volseg.parallel.state.random import own_random_numbers
from volseg.workflow.components import freeze_parts, is_fused_on_gpu, list_frozen_norms
from volseg.workflow.precision import Precision

if TYPE_CHECKING:
    from volseg.experiment.placement.mesh_resolution import TrainingMesh

logger = logging.getLogger(__name__)

PAY_IN_BFLOAT16 = "the fast kernels are faster only in bfloat16, but training.precision differs"
LAUNCHED = "without recording they are slower than torch's"


def choose_device(config: ExperimentConfig) -> torch.device:
    """Return the device of the training: the first GPU if there is one.

    Raises
    ------
    ConfigError
        If the config requires a GPU and there is none.
    """
    if config.device == "cpu":
        return torch.device("cpu")
    device = current_gpu_or_cpu()
    if config.device == "cuda" and device.type != "cuda":
        raise ConfigError("device is cuda, but no GPU is visible; set device to auto or cpu")
    return device


def build_plain_network(config: ExperimentConfig, task: Task) -> FitGrid:
    """Return the network with its initial weights, on the CPU; it supports any volume size."""
    network = build_network(
        config.network.spec(), in_channels=task.num_inputs, out_channels=task.num_outputs, patch_size=config.patch.size
    )
    try:
        return FitGrid(network, divisors=getattr(network, "divisors", None))
    except ImportError as fault:  # FitGrid has called its forward to find the sizes that it supports
        raise ConfigError(f"network {config.network.name} {explain_import(fault)}") from fault


def build_trainable_network(
    config: ExperimentConfig, task: Task, begin: Callable[[FitGrid], object] | None = None, *, is_shared: bool = False
) -> FitGrid:
    """Return the network to train, on the CPU: it and its losses have run once, and its frozen parts are frozen.

    Parameters
    ----------
    config : ExperimentConfig
        Network, losses and frozen parts.
    task : Task
        Channels and classes.
    begin : callable, optional
        Initialises the network's weights.
    is_shared : bool
        Whether replicas share a batch.

    Raises
    ------
    ConfigError
        If the network does not run on the patch, a loss does not accept its outputs, or is not a mean over the samples
        of a batch that replicas share.
    """
    network = build_plain_network(config, task)
    require_window(network, config)
    made = rehearse_network(network, config, task)
    rehearse_losses(build_objective(config, task), made, task.num_inputs, is_shared=is_shared)
    if begin is not None:
        begin(network)
    freeze_parts(network, config.training.frozen)
    network.hold_in_evaluation(list_frozen_norms(network))
    return network


def require_room(config: ExperimentConfig, task: Task, *, trains: bool = True) -> None:
    """Raise if images and logits of a window exceed this machine's memory, or those of a batch the memory of all GPUs.

    Raises
    ------
    ConfigError
        With the size and the memory.
    """
    channels = task.num_inputs + task.num_outputs + 4  # and the weights of a window
    batch, window = config.patch.batch if trains else 1, config.inference.window or ()
    patch = config.patch.size
    for key, sides, count in (("patch.size", patch, batch), ("patch.size", patch, 1), ("inference.window", window, 1)):
        needed, total = 4 * channels * math.prod(sides) * count, total_bytes()
        if count > 1:  # dealt to the processes of all machines, and made on their GPUs
            gpus = (torch.cuda.get_device_properties(gpu).total_memory for gpu in list_gpus())
            total = max(total, sum(gpus)) * count_launched()
        if needed > total:
            times = f" times patch.batch {count}" if count > 1 else ""
            raise ConfigError(
                f"{key} {list(sides)}{times} takes {needed / 2**30:.1f} GiB for an image and its logits, but there "
                f"are {total / 2**30:.1f} GiB; choose a smaller size"
            )


def build_model(
    config: ExperimentConfig,
    task: Task,
    device: torch.device,
    *,
    trains: bool = True,
    mesh: "TrainingMesh | None" = None,
    begin: Callable[[FitGrid], object] | None = None,
) -> nn.Module:
    """Return the network on its device or devices; it supports any volume size and returns logits.

    Parameters
    ----------
    config : ExperimentConfig
        Network, kernels, memory layout and parallel strategy. The network is planned for the run's spacing
        (`NetworkPlan.complete`); values that its spec leaves open are planned for cubic voxels.
    task : Task
        Channels and classes.
    device : torch.device
        Device of this process; a strategy may use others too.
    trains : bool
        Whether the network will be trained; otherwise a single process predicts.
    mesh : TrainingMesh, optional
        The processes that train together; only this process by default.
    begin : callable, optional
        Initialises the network's weights, still on the CPU.

    Raises
    ------
    ConfigError
        If the network cannot be built or run, or does not return logits of the task's labels.
    """
    require_room(config, task, trains=trains)
    if trains:
        is_shared = mesh is not None and mesh.replicas is not None
        network = build_trainable_network(config, task, begin, is_shared=is_shared)
    else:
        network = build_plain_network(config, task)
        require_window(network, config)
    if config.parallel.model_strategy == "none":
        model = _place_on_one(network, config, task, device, trains=trains, mesh=mesh)
    else:
        model = _place_on_several(network, config, device, trains=trains, mesh=mesh)
    return model if mesh is None or mesh.replicas is None else DataParallel(model, mesh.replicas)


def _place_on_one(
    network: FitGrid,
    config: ExperimentConfig,
    task: Task,
    device: torch.device,
    *,
    trains: bool,
    mesh: "TrainingMesh | None",
) -> nn.Module:
    """Return the network on one device, with suitable kernels and layout."""
    if mesh is not None:  # rehearsals and measurements use the share of this process
        rows = max(part.stop - part.start for part in mesh.deal(config.patch.batch))
        config = config.with_values(patch={"batch": rows})
    agree = mesh is not None and mesh.replicas is not None
    if trains and config.training.kernels == "compiled":
        lay_out = partial(_laid_out, config=config, task=task, agree=agree)
        return with_compiled_kernels(network, config, task.num_inputs, device, lay_out)
    fast = with_fast_kernels(network, config, task.num_inputs, device, trains=trains)
    # Gradients are summed in memory order: the layout must be the same in all processes.
    if agree and largest_over_processes(int(fast is None), device):
        fast = None
    return fast or _laid_out(network.to(device), config, task, agree=agree)


def _place_on_several(
    network: FitGrid, config: ExperimentConfig, device: torch.device, *, trains: bool, mesh: "TrainingMesh | None"
) -> nn.Module:
    parallel = config.parallel
    if trains and parallel.only_chooses_kernels and not is_distributed():
        raise ConfigError(
            "parallel: {strategy: spatial, devices: 1} has no effect in one process. Leave it out: "
            "training.kernels: auto uses the fast kernels, and fast requires them"
        )
    group = None if mesh is None else mesh.mesh.spatial_group
    fixed_order = config.training.deterministic and parallel.model_strategy == "spatial"
    options = StrategyOptions(fixed_order=True) if fixed_order else StrategyOptions()
    return ModelParallel(
        network,
        strategy=parallel.model_strategy,
        devices=None if group is not None else _devices(config, device, trains=trains, mesh=mesh),
        mesh=group,
        split_size=parallel.split_size,
        on_unsupported=parallel.on_unsupported,
        checkpoint=parallel.checkpoint,
        **options,
    )


def _laid_out(network: nn.Module, config: ExperimentConfig, task: Task, *, agree: bool) -> nn.Module:
    """Return the network in the config's memory layout, the same in all processes if they ``agree``."""
    layouts = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last_3d}
    wanted = config.training.memory_format
    if wanted == "auto" and config.training.deterministic:  # measurements may differ next time
        wanted = "contiguous"
    if wanted == "auto":
        device = next(network.parameters()).device
        shape = (config.patch.batch, task.num_inputs, *config.patch.size)
        faster = faster_layout(network, shape, Precision.choose(config.training.precision, device).autocast)
        slower_somewhere = agree and largest_over_processes(int(faster is torch.contiguous_format), device)
        wanted = "contiguous" if slower_somewhere or faster is torch.contiguous_format else "channels_last"
    return network.to(memory_format=layouts[wanted])  # type: ignore[call-overload]


def _devices(
    config: ExperimentConfig, device: torch.device, *, trains: bool, mesh: "TrainingMesh | None"
) -> Sequence[str | torch.device] | None:
    """Return the devices of this process, or None for the strategy's own choice."""
    parallel = config.parallel
    if mesh is not None and mesh.plan.is_cut_in_process:
        return [device] * mesh.plan.spatial
    if is_distributed():
        if mesh is None:
            return None
        return [device] if parallel.pipeline is None else _deal_devices(parallel.pipeline, device)
    count = parallel.pipeline or parallel.spatial
    if count is not None and not trains:  # for predictions, layers and slabs use the available devices
        count = min(count, len(list_devices()))
    wanted = count or parallel.devices
    try:
        return None if wanted is None else require_devices(wanted, device.type)
    except ParallelError as fault:
        raise ConfigError(f"parallel.{fault}") from None


def count_devices(config: ExperimentConfig, device: torch.device) -> int:
    """Return the number of devices that this process trains on, if its strategy uses more than one."""
    if config.parallel.model_strategy == "none":
        return 1
    named = _devices(config, device, trains=True, mesh=None)
    return len(list_devices()) if named is None and not is_distributed() else len(named or (device,))


def _deal_devices(count: int, own: torch.device) -> Sequence[str | torch.device]:
    """Return the devices of this process, its own first; a machine's devices are dealt round-robin to its processes."""
    if own.type == "cpu":
        return [own] * count
    gpus, step = list_gpus(), count_gpus() // count
    if gpus.index(own) >= step:
        raise ConfigError(
            f"parallel.pipeline needs {count} GPUs per process, but of the {len(gpus)} visible GPUs none is left for "
            f"process {gpus.index(own)} of this machine; start {step} processes per machine"
        )
    return gpus[gpus.index(own) :: step][:count]


# Choose the kernels of a network on one device: the fast ones of this package, torch's, or compiled ones.


def with_fast_kernels(
    network: FitGrid, config: ExperimentConfig, num_channels: int, device: torch.device, *, trains: bool
) -> FastKernels | None:
    """Return the network on its device with the fast kernels, or None if it should run with torch's.

    Parameters
    ----------
    network : FitGrid
        Any network; it runs once on an empty batch, without lasting effects.
    config : ExperimentConfig
        ``training.kernels``, and the settings that decide whether the fast kernels are faster.
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
    is_open = wanted in ("auto", "measured")  # a measured training has its result here
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
    logger.info("torch's kernels are used (training.kernels: auto): %s", reason)
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
        Any network; it runs on an empty batch, forward and backward, without lasting effects.
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
    """Run forward and backward once; the only lasting effect is the compiled code."""
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
    """Return why the fast kernels would not be faster in a training that computes in ``dtype``, or None."""
    if dtype is not torch.bfloat16:
        return PAY_IN_BFLOAT16
    reason = explain_eager(config, dtype)
    return None if reason is None else f"{LAUNCHED}, and no step is recorded with {reason}"


def _explain_slow_predictions(config: ExperimentConfig, dtype: torch.dtype) -> str | None:
    """Return why the fast kernels would not be faster in predictions, or None."""
    if dtype is not torch.bfloat16:
        return PAY_IN_BFLOAT16
    if not config.inference.record:
        return f"{LAUNCHED}, and no window is recorded with inference.record: false"
    if config.inference.window is None:
        return f"{LAUNCHED}, and whole volumes of different shapes are not recorded (inference.window: null)"
    return None
