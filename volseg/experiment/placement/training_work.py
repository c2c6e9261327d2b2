"""Describe a config's training for an estimate: its step, its open settings, and the other memory of a GPU.

Needs no GPU and reads no volume. The step is that of the training itself (`TrainingStep`): its network for the spacing
of the data, its losses, clipping, optimizer and average of the weights.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from volseg.config.schema import ExperimentConfig
from volseg.data.case_store.volume_cache import choose_budget
from volseg.estimate.candidate import Batch, Freedom, Step, Work
from volseg.experiment.building import build_step
from volseg.experiment.network_plan import FLOAT_BYTES, LABEL_BYTES, DataFacts, plan_for_spacing
from volseg.experiment.placement.placed_network import build_trainable_network, explain_eager, explain_slowness
from volseg.experiment.rehearsing import OneOutput
from volseg.inference.predictor import evaluating
from volseg.inference.window_step import WindowStep
from volseg.models.grids import GridRule
from volseg.workflow.components import build_optimizer
from volseg.workflow.precision import Precision
from volseg.workflow.schedules import WeightAverage

BATCHES_AHEAD = 2
"""Batches on a GPU in addition to that of the step: one waiting batch, and one that is being cut and augmented."""

AUGMENTATION = 48 * 2**20
"""Bytes of the stream that cuts and augments batches of a size: cuBLAS's scratch memory, 32 MiB on an H200, and
segments that torch caches for it. Task04's U-Net with patches of two sizes took 92 MiB more than its step."""


@dataclass(frozen=True, kw_only=True)
class Described:
    """A training to estimate."""

    config: ExperimentConfig
    """Config with the network planned for the spacing."""
    facts: DataFacts
    work: Work
    batches: int
    """Batches of the traced step; each further batch of an optimizer step costs as much."""
    rule: GridRule
    """Rule for the sides that the network supports."""


def describe_training(config: ExperimentConfig, dtype: torch.dtype, facts: DataFacts) -> Described:
    """Return the traced work of a config's training.

    Parameters
    ----------
    config : ExperimentConfig
        Config of the training.
    dtype : torch.dtype
        Type in which the kind of GPU computes; see `choose_dtype`.
    facts : DataFacts
        Facts of its data set.

    Raises
    ------
    ConfigError
        If the network does not run on the patch, or a loss does not accept its outputs.
    """
    config = plan_for_spacing(config, facts.spacing).complete(config)
    with torch.random.fork_rng([]):
        network = build_trainable_network(config, facts.task)
    if config.training.memory_format == "channels_last":
        network.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
    batches, settings = min(config.training.accumulate, 2), config.training

    def make_step(model: nn.Module, optimizer: Optimizer) -> Step:
        precision = Precision(next(model.parameters()).device.type, dtype)
        # Not captured: the tracer accounts for a capture.
        step = build_step(config, facts.task, model, optimizer, precision, record=False)
        average = WeightAverage(model, settings.ema) if settings.ema else None

        def run(batch: Batch) -> Any:
            losses: Mapping[str, Tensor] = {}
            for number in range(batches):
                losses = step(batch, gathered=settings.accumulate, completes=number == batches - 1)
            if average is not None:
                average.update()
            return losses

        return run

    shape = compute_validated_shape(config, facts)
    work = Work(
        build=network.train,
        shape=(config.patch.batch, facts.task.num_inputs, *config.patch.size),
        make_batch=partial(_make_batch, facts, config.patch.size),
        build_optimizer=lambda model: build_optimizer(
            config.optimizer.spec(), model, on_gpu=True, parts=config.optimizer.parts
        ),
        build_step=make_step,
        precision=dtype,
        validate=None if shape is None else partial(_validate, config, facts, dtype, shape),
        name=config.network.name,
    )
    return Described(config=config, facts=facts, work=work, batches=batches, rule=network.rule)


def _make_batch(facts: DataFacts, size: tuple[int, int, int], rows: int, device: torch.device) -> Batch:
    return {
        "image": torch.zeros(rows, facts.task.num_inputs, *size, device=device),
        "label": torch.zeros(rows, 1, *size, dtype=torch.uint8, device=device),
    }


def compute_validated_shape(config: ExperimentConfig, facts: DataFacts) -> tuple[int, ...] | None:
    """Return the shape of the network's inputs in validations between epochs, or None if it is unknown.

    It is one window, or the config's number of windows; without windows, the largest whole volumes.
    """
    settings = config.inference
    if config.split.validation == "none":
        return None
    if settings.window is not None:
        return (settings.windows or 1, facts.task.num_inputs, *settings.window)
    return None if facts.largest is None else (settings.batch, facts.task.num_inputs, *facts.largest)


def _validate(
    config: ExperimentConfig, facts: DataFacts, dtype: torch.dtype, shape: tuple[int, ...], model: nn.Module
) -> None:
    """Run the prediction of `build_predictor` for a model in training, on one batch of windows."""
    outputs, task = config.network.outputs, facts.task
    called = OneOutput(model, outputs.index("logits")) if len(outputs) > 1 else model
    autocast = None if dtype is torch.float32 else dtype
    step = WindowStep(models=(called,), num_classes=task.num_outputs, regions=bool(task.regions), autocast=autocast)
    with torch.no_grad(), evaluating((model,)):
        step(torch.zeros(shape, device=next(model.parameters()).device))


def describe_freedom(config: ExperimentConfig, dtype: torch.dtype, *, has_fast_kernels: bool) -> Freedom:
    """Return the open settings of a config, and the kernels and captures of its training on a kind of GPU.

    Parameters
    ----------
    config : ExperimentConfig
        Config of the training.
    dtype : torch.dtype
        Type in which the GPU computes.
    has_fast_kernels : bool
        Whether that kind of GPU has the fast kernels.
    """
    parallel = config.parallel
    data, spatial, pipeline = parallel.data, parallel.spatial, parallel.pipeline
    if parallel.model_strategy == "spatial":
        data, pipeline = data or (None if spatial else 1), 1
    elif parallel.model_strategy == "pipeline":
        data, spatial = data or 1, 1
    return Freedom(
        data=data,
        spatial=spatial,
        pipeline=pipeline,
        split_size=parallel.split_size if isinstance(parallel.split_size, int) else None,
        checkpoint=parallel.checkpoint,
        kernels=list_kernels(config, dtype, has_fast_kernels),
        records=explain_eager(config, dtype) is None,
        whole=bool(config.patch.growth),  # the mesh is resolved for one size
    )


def list_kernels(
    config: ExperimentConfig, dtype: torch.dtype, has_fast_kernels: bool
) -> tuple[Literal["fast", "torch"], ...]:
    """Return the kernels on one GPU by the rule of `with_fast_kernels`, the preferred ones first.

    Compiled kernels cannot be traced: torch's kernels replace them, and `estimate_reserve` adds a note.
    """
    match config.training.kernels:
        case "torch" | "compiled":
            return ("torch",)
        case "fast":
            return ("fast",)
    pays = has_fast_kernels and explain_slowness(config, dtype) is None
    return ("fast", "torch") if pays else ("torch",)


def estimate_reserve(described: Described, gpu_bytes: int) -> tuple[int, list[str]]:
    """Return the bytes of a GPU for uses other than the step, and notes about them.

    Parameters
    ----------
    described : Described
        The training.
    gpu_bytes : int
        Memory of the GPU.
    """
    config, facts = described.config, described.facts
    task = facts.task
    per_voxel = FLOAT_BYTES * task.num_inputs + LABEL_BYTES
    ahead = BATCHES_AHEAD * config.patch.batch * math.prod(config.patch.size) * per_voxel
    notes = list(_list_not_followed(config))
    bank = 0
    if config.data.keep != "memory":
        limit = None if config.data.device_limit is None else int(config.data.device_limit * 2**30)
        share = gpu_bytes if config.data.keep == "device" else choose_budget(gpu_bytes, limit)
        bank = share if facts.case_bytes is None else min(share, facts.case_bytes)
        if facts.case_bytes is None and config.data.keep == "device":
            bank = 0
            notes.append("the cases that data.keep: device puts on the GPU are not counted: their sizes are unknown")
        elif bank:
            notes.append(f"{bank / 2**30:.2f} GiB of each GPU are for prepared cases (data.device_limit)")
    if config.split.validation != "none" and compute_validated_shape(config, facts) is None:
        notes.append("a validation of whole volumes is not counted: their sizes are unknown (inference.window)")
    return ahead + AUGMENTATION * len(set(config.patch.sizes)) + bank, notes


def _list_not_followed(config: ExperimentConfig) -> Iterator[str]:
    """Yield the parts of a config that the estimate does not cover."""
    if config.augmentation.enabled and config.augmentation.own:
        names = ", ".join(each.name for each in config.augmentation.own)
        yield f"the memory that augmentations of your own ({names}) use is not counted"
    if not config.training.can_be_followed:
        yield (
            "memory and times are those of torch's kernels: compiled kernels (training.kernels: compiled) cannot be "
            "traced, and differ in memory and time"
        )
    elif config.training.kernels == "measured":
        yield (
            "memory and times are those of the fast kernels, or torch's: if training.kernels: measured chooses "
            "compiled ones, which cannot be traced, they differ"
        )


def at_size(described: Described, size: tuple[int, int, int]) -> Described:
    """Return the training on patches of another size; the planned network stays the same."""
    work, config = described.work, described.config.with_values(patch={"size": size})
    make_batch = partial(_make_batch, described.facts, size)
    resized = replace(work, shape=(*work.shape[:2], *size), make_batch=make_batch)
    return replace(described, config=config, work=resized)
