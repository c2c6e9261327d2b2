"""From a config to the objects it describes; every function here makes one of them."""

import math
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import nn

from volseg.config.nearest import did_you_mean
from volseg.config.schema import ExperimentConfig
from volseg.data.augmented import AugmentedBatches, EpochBatches
from volseg.data.bank import CaseBank
from volseg.data.cases import Case, Task
from volseg.data.patches import PatchBatches
from volseg.errors import ConfigError, ParallelError
from volseg.experiment.kernels import with_fast_kernels
from volseg.inference.predictor import Predictor
from volseg.models import FitGrid, build_network
from volseg.models.layout import faster_layout
from volseg.models.networks import NETWORKS
from volseg.parallel import ModelParallel
from volseg.parallel.devices import count_launched, find_current_device, is_distributed, require_devices
from volseg.parallel.processes import start_group
from volseg.transforms.augmentation import BatchAugmentation
from volseg.transforms.preprocessing import Preprocessing, build_preprocessing
from volseg.workflow.components import build_loss, build_metric, build_optimizer
from volseg.workflow.hooks import Hook
from volseg.workflow.interrupts import stop_if_requested
from volseg.workflow.named import Named
from volseg.workflow.objective import Objective
from volseg.workflow.precision import Precision
from volseg.workflow.schedules import SCHEDULES
from volseg.workflow.training import Score, Training

__all__ = [
    "build_batches",
    "build_metrics",
    "build_model",
    "build_predictor",
    "build_training",
    "check_components",
    "choose_device",
    "join_processes",
    "preprocessing_of",
]

BATCH_FIELDS = ("image", "label", "logits")
"""What a loss can read."""

CASE_FIELDS = ("image", "label", "pred", "spacing")
"""What a metric of the validation can read."""


def check_components(config: ExperimentConfig) -> None:
    """Raise for a component that cannot be built, before anything is read.

    Of the network only name and parameters are looked at: it takes channels and classes from the data.

    Raises
    ------
    ConfigError
        With the nearest known names, or what the component refused.
    """
    NETWORKS.check(config.network.spec())
    SCHEDULES.check(config.schedule.spec())
    build_optimizer(config.optimizer.spec(), nn.Linear(1, 1), on_gpu=False)
    losses = [build_loss(loss.spec(), inputs=loss.inputs, output=loss.output) for loss in config.losses]
    Objective(losses, [loss.weight for loss in config.losses])
    metrics = [
        build_metric(metric.spec(), inputs=metric.inputs, output=metric.output, num_classes=2)
        for metric in config.metrics
    ]
    for kind, known, components in (("loss", BATCH_FIELDS, losses), ("metric", CASE_FIELDS, metrics)):
        if unknown := [name for component in components for name in component.inputs if name not in known]:
            raise ConfigError(f"a {kind} needs the field {unknown[0]!r}; {did_you_mean(unknown[0], known)}")
    preprocessing_of(config)


def choose_device(config: ExperimentConfig) -> torch.device:
    """Return where to train: the first GPU if there is one.

    Raises
    ------
    ConfigError
        If the config insists on a GPU and there is none.
    """
    if config.device == "cpu":
        return torch.device("cpu")
    device = find_current_device()
    if config.device == "cuda" and device.type != "cuda":
        raise ConfigError("device is cuda, but no GPU is visible; set device to auto or cpu")
    return device


def join_processes(config: ExperimentConfig) -> None:
    """Start the process group of a job of several processes (``torchrun``, ``--gpus``).

    Raises
    ------
    ConfigError
        If the config's strategy uses one process only.
    """
    count = count_launched()
    if count == 1:
        return
    parallel = config.parallel
    if parallel.strategy not in ("spatial", "auto") or not (parallel.devices is None or parallel.is_on_one_device):
        raise ConfigError(
            f"{count} processes were started, which need parallel.strategy: spatial and one device each (leave out "
            f"parallel.devices, or 1), got {parallel.strategy} and {parallel.devices}"
        )
    start_group()


def preprocessing_of(config: ExperimentConfig) -> Preprocessing:
    """Return the preprocessing of image and label."""
    return build_preprocessing([component.spec() for component in config.preprocessing])


def build_model(config: ExperimentConfig, task: Task, device: torch.device, *, trains: bool = True) -> nn.Module:
    """Return the network on its device or devices; it takes any volume size and gives logits.

    Parameters
    ----------
    config : ExperimentConfig
        Its network, kernels, memory layout and parallel strategy.
    task : Task
        Channels and classes.
    device : torch.device
        Of this process; a strategy may take others besides.
    trains : bool
        Whether the network will be trained, or only predict.
    """
    network = FitGrid(
        build_network(
            config.network.spec(),
            in_channels=task.num_channels,
            out_channels=task.num_classes,
            patch_size=config.patch.size,
        )
    )
    _require_window(network, config)
    parallel = config.parallel
    if parallel.strategy == "none":
        fast = with_fast_kernels(network, config, task.num_channels, device, trains=trains)
        return fast or _laid_out(network.to(device), config, task)
    if parallel.only_chooses_kernels and not is_distributed():
        warnings.warn(
            "parallel: {strategy: spatial, devices: 1} cuts nothing, and goes with the next release: leave it out, and "
            "training.kernels: auto takes the fast kernels by itself (or set that to fast)",
            FutureWarning,
            stacklevel=2,
        )
    return ModelParallel(
        network,
        strategy=parallel.strategy,
        devices=_devices(config, device),
        split_size=parallel.split_size,
        on_unsupported=parallel.on_unsupported,
        checkpoint=parallel.checkpoint,
    )


def _require_window(network: FitGrid, config: ExperimentConfig) -> None:
    """Raise for a network of one size without a window of it: the first whole volume may come after hours."""
    rule, window = network.rule, config.inference.window
    if rule.fixed and any(side > most for side, most in zip(window or (math.inf,) * 3, rule.minimum, strict=True)):
        raise ConfigError(
            f"network {config.network.name} takes volumes of {rule.minimum} voxels only; set inference.window to "
            f"{list(rule.minimum)}, got {window and list(window)}"
        )


def _laid_out(network: nn.Module, config: ExperimentConfig, task: Task) -> nn.Module:
    """Return the network in the memory layout that the config asks for."""
    layouts = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last_3d}
    wanted = config.training.memory_format
    if wanted == "auto" and config.training.deterministic:  # what is measured may differ next time
        wanted = "contiguous"
    if wanted == "auto":
        device = next(network.parameters()).device
        shape = (config.patch.batch, task.num_channels, *config.patch.size)
        faster_layout(network, shape, Precision.choose(config.training.precision, device).autocast)
        return network
    return network.to(memory_format=layouts[wanted])  # type: ignore[call-overload]


def _devices(config: ExperimentConfig, device: torch.device) -> list[str] | None:
    """Return the names of the devices of this process; None for the strategy's own choice."""
    wanted = config.parallel.devices
    if wanted is None or is_distributed():
        return None
    try:
        return require_devices(wanted, device.type)
    except ParallelError as fault:
        raise ConfigError(f"parallel.{fault}") from None


def build_batches(
    config: ExperimentConfig, task: Task, cases: Sequence[Case], device: torch.device
) -> AugmentedBatches:
    """Return augmented training batches of prepared cases."""
    augmentation = BatchAugmentation(config.augmentation, config.patch.size, num_classes=task.num_classes)
    bank = CaseBank(cases, device=device, keep=config.data.keep)
    batches = PatchBatches(
        bank,
        config.patch.size,
        batch_size=config.patch.batch,
        iterations=config.training.iterations,
        foreground=config.patch.foreground,
        source_size=augmentation.source_size,
        seed=config.seed,
    )
    return AugmentedBatches(batches, augmentation, seed=config.seed, device=device)


def build_metrics(config: ExperimentConfig, task: Task) -> list[Named]:
    """Return the further metrics of a validation."""
    return [
        build_metric(metric.spec(), inputs=metric.inputs, output=metric.output, num_classes=task.num_classes)
        for metric in config.metrics
    ]


def build_predictor(config: ExperimentConfig, task: Task, model: nn.Module, *, mirror: bool) -> Predictor:
    """Return how the model is applied to whole volumes."""
    device = next(model.parameters()).device
    dtype = Precision.choose(config.training.precision, device).dtype
    return Predictor(
        model=model,
        num_classes=task.num_classes,
        window=config.inference.window,
        overlap=config.inference.overlap,
        mirror=mirror,
        device=device,
        autocast=None if dtype is torch.float32 else dtype,
        before_pass=stop_if_requested,
    )


def build_training(
    config: ExperimentConfig,
    model: nn.Module,
    batches: EpochBatches,
    *,
    validation: Callable[[], Score] | None,
    hooks: Sequence[Hook],
) -> Training:
    """Return the training that the config describes.

    Parameters
    ----------
    config : ExperimentConfig
        Losses, optimizer, schedule and loop.
    model : nn.Module
        As `build_model` made it.
    batches : EpochBatches
        What it trains on.
    validation : callable or None
        Called when one is due.
    hooks : sequence of Hook
        Called in this order.
    """
    settings = config.training
    on_gpu = next(model.parameters()).device.type == "cuda"
    return Training(
        Named(model, inputs=["image"], outputs=["logits"]),
        [build_loss(loss.spec(), inputs=loss.inputs, output=loss.output) for loss in config.losses],
        build_optimizer(config.optimizer.spec(), model, on_gpu=on_gpu),
        batches,
        epochs=settings.epochs,
        loss_weights=[loss.weight for loss in config.losses],
        validation=validation,
        validate_every=settings.validate_every,
        schedule=SCHEDULES.bind(config.schedule.spec()),
        warmup=config.schedule.warmup,
        precision=settings.precision,
        clip=settings.clip,
        accumulate=settings.accumulate,
        average_decay=settings.ema,
        record=settings.record,
        hooks=hooks,
    )
