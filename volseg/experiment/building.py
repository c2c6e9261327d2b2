"""From a config to the objects it describes; every function here makes one of them."""

import math
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import nn

from volseg.config.nearest import did_you_mean
from volseg.config.registry import explain_import
from volseg.config.schema import BATCH_FIELDS, ExperimentConfig
from volseg.data.augmented import AugmentedBatches, EpochBatches
from volseg.data.bank import CaseBank
from volseg.data.cases import Case, Task
from volseg.data.labels import num_indices, targets_of
from volseg.data.patches import PatchBatches
from volseg.errors import ConfigError, ParallelError
from volseg.experiment.kernels import with_fast_kernels
from volseg.experiment.rehearsing import OneOutput, rehearse_losses, rehearse_network
from volseg.experiment.training_mesh import TrainingMesh
from volseg.inference.predictor import Predictor
from volseg.inference.recorded_model import choose_windows_per_step, record_models
from volseg.models import FitGrid, build_network
from volseg.models.layout import faster_layout
from volseg.models.networks import NETWORKS
from volseg.parallel import ModelParallel
from volseg.parallel.data_parallel import DataParallel
from volseg.parallel.devices import (
    count_gpus,
    find_current_device,
    is_distributed,
    list_devices,
    list_gpus,
    require_devices,
)
from volseg.transforms.augmentation import BatchAugmentation
from volseg.transforms.augmentation.own import OwnAugmentations
from volseg.transforms.preprocessing import Preprocessing, build_preprocessing
from volseg.workflow.components import build_loss, build_metric, build_optimizer
from volseg.workflow.hooks import Hook, build_hook
from volseg.workflow.interrupts import stop_if_requested
from volseg.workflow.named import Named
from volseg.workflow.objective import Objective
from volseg.workflow.parts import find_frozen_norms, freeze_parts
from volseg.workflow.precision import Precision
from volseg.workflow.processes import largest_over_processes
from volseg.workflow.records import Score
from volseg.workflow.schedules import SCHEDULES
from volseg.workflow.training import Training

__all__ = [
    "build_batches",
    "build_hooks",
    "build_metrics",
    "build_model",
    "build_objective",
    "build_plain_network",
    "build_predictor",
    "build_training",
    "check_components",
    "choose_device",
    "preprocessing_of",
]

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
    SCHEDULES.bind(config.schedule.spec())(0.0)
    build_optimizer(config.optimizer.spec(), nn.Linear(1, 1), on_gpu=False)
    build_hooks(config)
    OwnAugmentations([step.spec() for step in config.augmentation.own])
    losses = build_objective(config).losses
    metrics = [
        build_metric(metric.spec(), inputs=metric.inputs, output=metric.output, num_classes=2)
        for metric in config.metrics
    ]
    fields = (*sorted(BATCH_FIELDS), *config.network.outputs)
    for kind, known, components in (("loss", fields, losses), ("metric", CASE_FIELDS, metrics)):
        if unknown := [name for component in components for name in component.inputs if name not in known]:
            more = " (several outputs of a network are named in network.outputs)" if kind == "loss" else ""
            raise ConfigError(f"a {kind} needs the field {unknown[0]!r}; {did_you_mean(unknown[0], known)}{more}")
    preprocessing_of(config)


def build_objective(config: ExperimentConfig, task: Task | None = None) -> Objective:
    """Return what the training minimises, on the label maps of ``task``; without it, on those of classes.

    Raises
    ------
    ConfigError
        For a loss that does not know what the task's label maps hold: regions, ignored voxels, hidden classes.
    """
    targets = None if task is None else targets_of(task)
    losses = [
        build_loss(loss.spec(), inputs=loss.inputs, output=loss.output, targets=targets) for loss in config.losses
    ]
    return Objective(losses, [loss.factor for loss in config.losses])


def build_hooks(config: ExperimentConfig) -> list[Hook]:
    """Return the hooks that the config names."""
    return [build_hook(hook.spec()) for hook in config.hooks]


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


def preprocessing_of(config: ExperimentConfig) -> Preprocessing:
    """Return the preprocessing of image and label."""
    return build_preprocessing([component.spec() for component in config.preprocessing])


def build_plain_network(config: ExperimentConfig, task: Task) -> FitGrid:
    """Return the network as it is initialised, on the CPU; it takes any volume size."""
    network = build_network(
        config.network.spec(),
        in_channels=task.num_channels,
        out_channels=task.num_outputs,
        patch_size=config.patch.size,
    )
    try:
        return FitGrid(network, divisors=getattr(network, "divisors", None))
    except ImportError as fault:  # its forward was asked which sizes it takes
        raise ConfigError(f"network {config.network.name} {explain_import(fault)}") from fault


def build_model(
    config: ExperimentConfig,
    task: Task,
    device: torch.device,
    *,
    trains: bool = True,
    mesh: TrainingMesh | None = None,
    begin: Callable[[FitGrid], object] | None = None,
) -> nn.Module:
    """Return the network on its device or devices; it takes any volume size and gives logits.

    Parameters
    ----------
    config : ExperimentConfig
        Its network, kernels, memory layout and parallel strategy. The network as it was planned for the run's spacing
        (`NetworkPlan.complete`); what its spec leaves open is planned for cubic voxels.
    task : Task
        Channels and classes.
    device : torch.device
        Of this process; a strategy may take others besides.
    trains : bool
        Whether the network will be trained, or only predict, which one process does by itself.
    mesh : TrainingMesh, optional
        With whom it is trained; by itself by default.
    begin : callable, optional
        Gives the network, still on the CPU, its first weights.

    Raises
    ------
    ConfigError
        If the network cannot be built or run, or gives no logits of the task's labels.
    """
    network = build_plain_network(config, task)
    _require_window(network, config)
    if trains:
        made = rehearse_network(network, config, task)
        rehearse_losses(build_objective(config, task), made, task)
        if begin is not None:
            begin(network)
        freeze_parts(network, config.training.frozen)
        network.hold_in_evaluation(find_frozen_norms(network))
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
    mesh: TrainingMesh | None,
) -> nn.Module:
    """Return the network on one device, with the kernels and in the layout that suit it."""
    if mesh is not None:  # what is rehearsed and measured is what this process computes
        rows = max(part.stop - part.start for part in mesh.deal(config.patch.batch))
        config = config.model_copy(update={"patch": config.patch.model_copy(update={"batch": rows})})
    fast = with_fast_kernels(network, config, task.num_channels, device, trains=trains)
    # Gradients are summed as they lie in memory: what each process found must not differ.
    agree = mesh is not None and mesh.replicas is not None
    if agree and largest_over_processes(int(fast is None), device):
        fast = None
    return fast or _laid_out(network.to(device), config, task, agree=agree)


def _place_on_several(
    network: FitGrid, config: ExperimentConfig, device: torch.device, *, trains: bool, mesh: TrainingMesh | None
) -> nn.Module:
    parallel = config.parallel
    if parallel.only_chooses_kernels and not is_distributed():
        warnings.warn(
            "parallel: {strategy: spatial, devices: 1} cuts nothing, and goes with the next release: leave it out, and "
            "training.kernels: auto takes the fast kernels by itself (or set that to fast)",
            FutureWarning,
            stacklevel=3,
        )
    group = None if mesh is None else mesh.mesh.spatial_group
    options = {"fixed_order": True} if config.training.deterministic and parallel.model_strategy == "spatial" else {}
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


def _require_window(network: FitGrid, config: ExperimentConfig) -> None:
    """Raise for a network of one size without a window of it: the first whole volume may come after hours."""
    rule, window = network.rule, config.inference.window
    if rule.fixed and any(side > most for side, most in zip(window or (math.inf,) * 3, rule.minimum, strict=True)):
        raise ConfigError(
            f"network {config.network.name} takes volumes of {rule.minimum} voxels only; set inference.window to "
            f"{list(rule.minimum)}, got {window and list(window)}"
        )


def _laid_out(network: nn.Module, config: ExperimentConfig, task: Task, *, agree: bool) -> nn.Module:
    """Return the network in the memory layout that the config asks for, in all processes the same if they ``agree``."""
    layouts = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last_3d}
    wanted = config.training.memory_format
    if wanted == "auto" and config.training.deterministic:  # what is measured may differ next time
        wanted = "contiguous"
    if wanted == "auto":
        device = next(network.parameters()).device
        shape = (config.patch.batch, task.num_channels, *config.patch.size)
        faster = faster_layout(network, shape, Precision.choose(config.training.precision, device).autocast)
        slower_somewhere = agree and largest_over_processes(int(faster is torch.contiguous_format), device)
        wanted = "contiguous" if slower_somewhere or faster is torch.contiguous_format else "channels_last"
    return network.to(memory_format=layouts[wanted])  # type: ignore[call-overload]


def _devices(
    config: ExperimentConfig, device: torch.device, *, trains: bool, mesh: TrainingMesh | None
) -> Sequence[str | torch.device] | None:
    """Return the devices of this process; None for the strategy's own choice."""
    parallel = config.parallel
    if mesh is not None and mesh.plan.is_cut_in_process:
        return [device] * mesh.plan.spatial
    if is_distributed():
        if mesh is None:
            return None
        return [device] if parallel.pipeline is None else _deal_devices(parallel.pipeline, device)
    wanted = parallel.devices
    if parallel.pipeline is not None or parallel.spatial is not None:
        wanted = parallel.pipeline or parallel.spatial
        assert wanted is not None
        if not trains:  # where a network only predicts, its layers and slabs lie on what there is
            wanted = min(wanted, len(list_devices()))
    try:
        return None if wanted is None else require_devices(wanted, device.type)
    except ParallelError as fault:
        raise ConfigError(f"parallel.{fault}") from None


def _deal_devices(count: int, own: torch.device) -> Sequence[str | torch.device]:
    """Return the devices of this process, its own first; a machine's are dealt to its processes as cards are."""
    if own.type == "cpu":
        return [own] * count
    gpus, step = list_gpus(), count_gpus() // count
    if gpus.index(own) >= step:
        raise ConfigError(
            f"parallel.pipeline takes {count} GPUs of each process, and of the {len(gpus)} that are visible process "
            f"{gpus.index(own)} of this machine finds none left; start {step} processes on a machine"
        )
    return gpus[gpus.index(own) :: step][:count]


def build_batches(
    config: ExperimentConfig,
    task: Task,
    cases: Sequence[Case],
    device: torch.device,
    *,
    rows: Sequence[slice] | None = None,
    spacing: Sequence[float] = (1.0, 1.0, 1.0),
) -> AugmentedBatches:
    """Return augmented training batches of prepared cases with ``spacing`` mm, or some rows of each."""
    augmentation = BatchAugmentation(
        config.augmentation, config.patch.size, num_classes=num_indices(task), spacing=spacing
    )
    bank = CaseBank(
        cases,
        device=device,
        keep=config.data.keep,
        budget_bytes=None if config.data.device_limit is None else int(config.data.device_limit * 2**30),
        num_classes=task.num_classes,
        is_sparse=task.ignore is not None,
    )
    batches = PatchBatches(
        bank,
        config.patch.size,
        batch_size=config.patch.batch,
        iterations=config.training.iterations,
        foreground=config.patch.foreground,
        source_size=augmentation.source_size,
        seed=config.seed,
    )
    own = OwnAugmentations([step.spec() for step in config.augmentation.own] if config.augmentation.enabled else [])
    return AugmentedBatches(batches, augmentation, seed=config.seed, device=device, rows=rows, own=own)


def build_metrics(config: ExperimentConfig, task: Task) -> list[Named]:
    """Return the further metrics of a validation."""
    structures = [key if isinstance(key, tuple) else (key,) for key in task.structures]
    columns = structures if task.regions else [(0,), *structures]
    return [
        build_metric(metric.spec(), inputs=metric.inputs, output=metric.output, columns=columns)
        for metric in config.metrics
    ]


def build_predictor(
    config: ExperimentConfig,
    task: Task,
    models: Sequence[nn.Module],
    *,
    mirror: bool | Sequence[int],
    alone: bool = False,
    kind: type[Predictor] = Predictor,
) -> Predictor:
    """Return how the model, or the average of several, is applied to whole volumes.

    Parameters
    ----------
    config : ExperimentConfig
        Window, overlap and precision.
    task : Task
        Of the models.
    models : sequence of nn.Module
        As `build_model` made them.
    mirror : bool or sequence of int
        Whether to average over mirrorings, or the axes along which.
    alone : bool
        Whether nothing is trained beside it: the device's memory is then for recordings and batches of windows.
    kind : type
        By whose rules windows lie and are averaged.
    """
    device, outputs, settings = next(models[0].parameters()).device, config.network.outputs, config.inference
    dtype = Precision.choose(config.training.precision, device).dtype
    if len(outputs) > 1:
        models = [OneOutput(model, outputs.index("logits")) for model in models]
    windows = settings.windows or 1
    if alone and settings.windows is None and settings.window is not None:
        windows = choose_windows_per_step(settings.window, task.num_outputs, device)
    return kind(
        model=record_models(models) if alone and settings.record and settings.window is not None else models,
        num_classes=task.num_outputs,
        values=task.output_values,
        regions=bool(task.regions),
        window=config.inference.window,
        overlap=config.inference.overlap,
        mirror=mirror,
        windows_per_step=windows,
        device=device,
        autocast=None if dtype is torch.float32 else dtype,
        before_pass=stop_if_requested,
        skip_background=settings.skip_background,
    )


def build_training(
    config: ExperimentConfig,
    model: nn.Module,
    batches: EpochBatches,
    *,
    validation: Callable[[], Score] | None,
    hooks: Sequence[Hook],
    task: Task | None = None,
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
    task : Task, optional
        Whose label maps the batches hold; see `build_objective`.
    """
    settings, objective = config.training, build_objective(config, task)
    on_gpu = next(model.parameters()).device.type == "cuda"
    return Training(
        Named(model, inputs=["image"], outputs=config.network.outputs),
        objective.losses,
        build_optimizer(config.optimizer.spec(), model, on_gpu=on_gpu, parts=config.optimizer.parts),
        batches,
        epochs=settings.epochs,
        loss_weights=objective.weights,
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
