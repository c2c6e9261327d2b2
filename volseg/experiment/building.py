"""Build the objects of a config, except the network: one function for each."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from volseg.config.nearest import did_you_mean
from volseg.config.schema import ExperimentConfig
from volseg.config.sections import BATCH_FIELDS
from volseg.data.augmented import AugmentedBatches, EpochBatches, GrowingBatches
from volseg.data.case_store.volume_cache import VolumeCache
from volseg.data.cases import Case, Task, list_values
from volseg.data.labels import num_indices, targets_of
from volseg.data.patches import PatchBatches
from volseg.errors import ConfigError
from volseg.evaluation.overlap import METRICS
from volseg.evaluation.scoring import Scoring, choose_scoring
from volseg.experiment.rehearsing import OneOutput
from volseg.inference.postprocessing import Postprocessing
from volseg.inference.predictor import Predictor
from volseg.inference.window_step import record_models
from volseg.models.networks import NETWORKS
from volseg.monitoring.progress import progress
from volseg.transforms.augmentation import BatchAugmentation
from volseg.transforms.augmentation.own import OwnAugmentations
from volseg.transforms.preprocessing import Preprocessing, build_preprocessing
from volseg.workflow.checks import stop_if_requested
from volseg.workflow.components import build_loss, build_metric, build_optimizer
from volseg.workflow.hooks import Hook, build_hook
from volseg.workflow.named import Named, Objective
from volseg.workflow.precision import Precision
from volseg.workflow.schedules import SCHEDULES
from volseg.workflow.step import TrainingStep
from volseg.workflow.training import Score, Training
from volseg.workflow.validation import SHOWN, Validation

CASE_FIELDS = ("image", "label", "pred", "spacing")
"""Fields of a case that a metric of the validation can read."""


def check_components(config: ExperimentConfig) -> None:
    """Raise for a component that cannot be built, before any data is read.

    For the network, only name and parameters are checked: its channels and classes follow from the data.

    Raises
    ------
    ConfigError
        With the nearest known names, or the error of the component.
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
            more = " (network.outputs names the outputs of the network)" if kind == "loss" else ""
            raise ConfigError(f"a {kind} needs the field {unknown[0]!r}; {did_you_mean(unknown[0], known)}{more}")
    preprocessing_of(config)


def build_objective(config: ExperimentConfig, task: Task | None = None) -> Objective:
    """Return the losses of the training, for the label maps of ``task``, or for plain classes without it.

    Raises
    ------
    ConfigError
        For a loss that does not support the task's label maps: regions, ignored voxels, hidden classes.
    """
    targets = None if task is None else targets_of(task)
    losses = [
        build_loss(loss.spec(), inputs=loss.inputs, output=loss.output, targets=targets) for loss in config.losses
    ]
    return Objective(losses, [loss.factor for loss in config.losses], targets)


def choose_channel(config: ExperimentConfig, task: Task) -> int:
    """Return the number of the channel that pictures show.

    Raises
    ------
    ConfigError
        If the task's images have no channel of this name or number.
    """
    wanted, names = config.logging.channel, task.modalities
    if isinstance(wanted, str) and names.count(wanted) == 1:
        return names.index(wanted)
    if isinstance(wanted, int) and wanted < len(names):
        return wanted
    known = ", ".join(f"{number} ({name})" for number, name in enumerate(names))
    raise ConfigError(
        f"logging.channel must be the number or name of one channel of {task.name}, got {wanted!r}; the channels are "
        f"{known}"
    )


def build_hooks(config: ExperimentConfig) -> list[Hook]:
    """Return the hooks that the config names."""
    return [build_hook(hook.spec()) for hook in config.hooks]


def preprocessing_of(config: ExperimentConfig) -> Preprocessing:
    """Return the preprocessing of image and label."""
    return build_preprocessing([component.spec() for component in config.preprocessing])


def build_batches(
    config: ExperimentConfig,
    task: Task,
    cases: Sequence[Case],
    device: torch.device,
    *,
    rows: Sequence[slice] | None = None,
    spacing: Sequence[float] = (1.0, 1.0, 1.0),
) -> AugmentedBatches | GrowingBatches:
    """Return augmented training batches of prepared cases with ``spacing`` mm, or some rows of each batch."""
    bank = VolumeCache(
        cases,
        device=device,
        keep=config.data.keep,
        budget_bytes=None if config.data.device_limit is None else int(config.data.device_limit * 2**30),
        num_classes=task.num_classes,
        is_sparse=task.ignore is not None,
    )
    if bank.num_channels != task.num_inputs:
        raise ConfigError(
            f"preprocessing returns {bank.num_channels} channel(s), not {task.num_inputs}; correct its steps"
        )
    num_masks = len(task.stage_labels)
    own = OwnAugmentations([])
    if config.augmentation.enabled:
        own = OwnAugmentations([step.spec() for step in config.augmentation.own], num_masks)

    def build(size: Sequence[int]) -> AugmentedBatches:
        augmentation = BatchAugmentation(
            config.augmentation, size, num_classes=num_indices(task), spacing=spacing, num_masks=num_masks
        )
        batches = PatchBatches(
            bank,
            size,
            batch_size=config.patch.batch,
            iterations=config.training.iterations,
            foreground=config.patch.foreground,
            source_size=augmentation.source_size,
            seed=config.seed,
        )
        return AugmentedBatches(batches, augmentation, seed=config.seed, device=device, rows=rows, own=own)

    if not config.patch.growth:
        return build(config.patch.size)
    made = {size: build(size) for size in config.patch.sizes}
    return GrowingBatches(lambda epoch: made[config.patch.size_in(epoch, config.training.epochs)])


def build_metrics(config: ExperimentConfig, task: Task) -> list[Named]:
    """Return the further metrics of a validation."""
    structures = list(map(list_values, task.structures))
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
    exclusive: bool = False,
    kind: type[Predictor] = Predictor,
) -> Predictor:
    """Return the predictor that applies a model, or the average of several, to whole volumes.

    Parameters
    ----------
    config : ExperimentConfig
        Window, overlap and precision.
    task : Task
        Task of the models.
    models : sequence of nn.Module
        The models from `build_model`.
    mirror : bool or sequence of int
        Whether to average over mirrorings, or the axes of the mirrorings.
    exclusive : bool
        Whether no training shares the device: its memory is then available for captures and batches of windows.
    kind : type
        Class with the rules for positions and averages of windows.
    """
    device, outputs, settings = next(models[0].parameters()).device, config.network.outputs, config.inference
    dtype = Precision.choose(config.training.precision, device).dtype
    if len(outputs) > 1:
        models = [OneOutput(model, outputs.index("logits")) for model in models]
    return kind(
        model=record_models(models) if exclusive and settings.record and settings.window is not None else models,
        num_classes=task.num_outputs,
        values=task.output_values,
        regions=bool(task.regions),
        window=config.inference.window,
        overlap=config.inference.overlap,
        mirror=mirror,
        windows_per_step=settings.windows or (None if exclusive else 1),
        fast=False,
        samples_per_pass=settings.batch if settings.window is None else 1,
        device=device,
        autocast=None if dtype is torch.float32 else dtype,
        before_pass=stop_if_requested,
        skip_background=settings.skip_background,
        postprocess=Postprocessing.keep_largest(task, settings.keep_largest) if settings.keep_largest else None,
    )


def build_step(
    config: ExperimentConfig,
    task: Task,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    precision: Precision | None = None,
    *,
    record: bool,
) -> TrainingStep:
    """Return a single training step, without a check of its loss; by default with the config's optimizer."""
    device = next(model.parameters()).device
    return TrainingStep(
        Named(model, inputs=["image"], outputs=config.network.outputs),
        build_objective(config, task).to(device),
        optimizer or _build_optimizer(config, model),
        precision or Precision.choose(config.training.precision, device),
        clip=config.training.clip,
        record=record,
        batch_size=config.patch.batch,
        look=lambda _: None,
    )


def _build_optimizer(config: ExperimentConfig, model: nn.Module) -> Optimizer:
    on_gpu = next(model.parameters()).device.type == "cuda"
    return build_optimizer(config.optimizer.spec(), model, on_gpu=on_gpu, parts=config.optimizer.parts)


def draw_batch(task: Task, rows: int, sides: Sequence[int], device: torch.device) -> dict[str, Tensor]:
    """Return a batch of random voxels and labels."""
    return {
        "image": torch.randn(rows, task.num_inputs, *sides, device=device),
        "label": torch.randint(num_indices(task), (rows, 1, *sides), dtype=torch.uint8, device=device),
    }


def build_validation(
    config: ExperimentConfig,
    task: Task,
    predictor: Predictor,
    cases: Sequence[Case],
    *,
    folder: Path | None,
    show: bool,
) -> Validation:
    """Return a validation of prepared cases, written to ``folder``; ``show`` adds a progress bar."""
    return Validation(
        predictor,
        cases,
        task.structures,
        ignore=task.ignore,
        values=task.class_values,
        metrics=build_metrics(config, task),
        scoring=build_scoring(config, task),
        folder=folder,
        batch_size=config.inference.batch,
        show=partial(progress, title="validating", total=len(cases)) if show else iter,
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
        The model from `build_model`.
    batches : EpochBatches
        Training batches.
    validation : callable or None
        Called for each validation.
    hooks : sequence of Hook
        Called in this order.
    task : Task, optional
        Task of the label maps; see `build_objective`.
    """
    settings, objective = config.training, build_objective(config, task)
    return Training(
        Named(model, inputs=["image"], outputs=config.network.outputs),
        objective.losses,
        _build_optimizer(config, model),
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


def build_scoring(config: ExperimentConfig, task: Task) -> Scoring:
    """Return the scores to compute for the task's structures.

    Raises
    ------
    ConfigError
        If the config names an unknown label.
    """
    asked = config.evaluation
    return choose_scoring(
        task.structures,
        task.name,
        distances=asked.distances,
        tolerance=asked.tolerance,
        lesions=asked.lesions,
        lesion_overlap=asked.lesion_overlap,
    )


def list_scores(config: ExperimentConfig, task: Task) -> list[str]:
    """Return the names of the numbers that each validation computes; see `Validated.scores`."""
    own, scoring = [each.output for each in config.metrics], build_scoring(config, task)
    shown = [name for name in SHOWN if name in (*METRICS, *scoring.names)]
    only_for = {"NSD": scoring.tolerances, "lesion_F1": scoring.lesions}
    names = ["dice_mean", *own]
    for key, label in task.structures.items():
        measured = [name.lower() for name in shown if key in only_for.get(name, task.structures)]
        names += [f"{name}/{label}" for name in (*measured, *own)]
    return names
