"""``training.kernels: measured``: time the kinds of kernels for this network and patch before the training.

Each kind trains its own network for some steps, on random batches of the training's shape. Only the times remain: no
weights, no memory, no change of random numbers. The choice is written into the run folder, and a resumed run reads it
there: its round-off must not change because a machine was busy.

With several processes, only the leader measures, and broadcasts the result.
"""

import logging
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from volseg.checkpointing.folder import RunFolder
from volseg.config.registry import read_record
from volseg.config.schema import ExperimentConfig
from volseg.data.cases import Task
from volseg.data.json_files import read_json
from volseg.errors import CheckpointError, ConfigError, ParallelError
from volseg.experiment.building import build_step, draw_batch
from volseg.experiment.placement.alternatives import free_memory, is_out_of_memory
from volseg.experiment.placement.mesh_resolution import TrainingMesh
from volseg.experiment.placement.placed_network import build_model
from volseg.models.fit_grid import FitGrid
from volseg.parallel import CompiledNetwork, FastKernels, Replicas
from volseg.parallel.data_parallel import DataParallel
from volseg.parallel.devices import is_distributed
from volseg.parallel.processes.group import decide_together
from volseg.parallel.processes.progress import report_progress
from volseg.parallel.state.random import own_random_numbers

logger = logging.getLogger(__name__)

KERNELS = "kernels.json"
"""File of the run folder with the measured and the chosen kernels."""

KINDS = ("fast", "torch", "compiled")
"""Order of preference for about equal speed: the kind with the shortest start comes first."""

MARGIN = 0.03
"""Margin by which a later kind must be faster: medians of the same step differ by less."""

WARM_UP, TIMED = 6, 11
"""Steps before the timed ones, which compile kernels and capture the step; and timed steps."""


@dataclass(frozen=True, kw_only=True)
class MeasuredKernels:
    """Measured times, and the choice."""

    chosen: str
    milliseconds: Mapping[str, float]
    """Median of a training step with each kind."""
    refused: Mapping[str, str]
    """Why other kinds are not available."""
    shape: tuple[int, ...]
    """Shape of the batch (B, C, D, H, W) that one process computes."""
    device: str
    torch: str
    """Version of torch."""

    @classmethod
    def read(cls, content: Any, source: object) -> "MeasuredKernels":
        """Return a record from its fields as plain values.

        Raises
        ------
        CheckpointError
            If the content is not such a record.
        """
        try:
            found = read_record(cls, content)
            if found.chosen not in KINDS:
                raise ValueError(f"chosen must be one of {', '.join(KINDS)}, got {found.chosen!r}")
        except ValueError as fault:
            raise CheckpointError(
                f"{source} should state the kernels that the run started with ({fault}); restore it from a backup, or "
                "set training.kernels to fast, torch or compiled"
            ) from fault
        return found

    def __str__(self) -> str:
        times = ", ".join(f"{kind} {ms:.3g} ms" for kind, ms in self.milliseconds.items())
        lacking = "".join(f"; {kind} is not available: {reason}" for kind, reason in self.refused.items())
        return f"a training step with kernels {times}: {self.chosen}{lacking}"


def choose_fastest(milliseconds: Mapping[str, float], refused: Mapping[str, str] | None = None) -> str:
    """Return the kind of kernels to use: the first of `KINDS` that no later kind clearly beats.

    Parameters
    ----------
    milliseconds : Mapping of str to float
        Time of a training step with each kind.
    refused : Mapping of str to str, optional
        Why other kinds are not available.

    Raises
    ------
    ConfigError
        If no kind is available, with the reason for each.

    Examples
    --------
    >>> [choose_fastest({"fast": 12.3, "compiled": ms}) for ms in (14.1, 12.2, 11.0)]
    ['fast', 'fast', 'compiled']
    """
    if not milliseconds:
        reasons = "; ".join(f"{kind}: {reason}" for kind, reason in (refused or {}).items())
        raise ConfigError(
            f"training.kernels is measured, but no kernels are available ({reasons}); fix one of the causes"
        )
    chosen = next(kind for kind in KINDS if kind in milliseconds)
    for kind in KINDS:
        if milliseconds.get(kind, float("inf")) < (1 - MARGIN) * milliseconds[chosen]:
            chosen = kind
    return chosen


def resolve_kernels(
    folder: RunFolder, config: ExperimentConfig, mesh: TrainingMesh, task: Task, device: torch.device, *, resume: bool
) -> tuple[ExperimentConfig, MeasuredKernels | None]:
    """Return the config with the kernels to train with, and their record; every process calls this function.

    Parameters
    ----------
    folder : RunFolder
        Folder of the run; keeps the choice for a resumed run.
    config : ExperimentConfig
        Config of the training; a config that names its kernels is returned unchanged.
    mesh : TrainingMesh
        The processes and their shares.
    task : Task
        Channels and labels.
    device : torch.device
        Device of this process.
    resume : bool
        Whether the run is resumed.

    Raises
    ------
    CheckpointError
        If the run folder's file is damaged.
    """
    if config.training.kernels != "measured":
        return config, None

    def decide() -> dict[str, Any]:
        file = folder.path / KERNELS
        if resume and file.exists():
            found = MeasuredKernels.read(read_json(file), file)
        else:
            with own_random_numbers([device]):
                found = measure_kernels(config, mesh, task, device)
        logger.info("training.kernels: measured. %s", found)
        return asdict(found)

    told = MeasuredKernels.read(decide_together(decide), KERNELS)
    return config.with_values(training={"kernels": told.chosen}), told


def measure_kernels(config: ExperimentConfig, mesh: TrainingMesh, task: Task, device: torch.device) -> MeasuredKernels:
    """Time a training step with each kind of kernels, in this process only."""
    rows = max(part.stop - part.start for part in mesh.deal(config.patch.batch))
    # The size of most steps: earlier sizes of a growing patch are smaller.
    config = config.with_values(patch={"batch": rows, "growth": ()})
    milliseconds: dict[str, float] = {}
    refused: dict[str, str] = {}
    shares = mesh.replicas is not None and mesh.replicas.count > 1
    for kind in KINDS:
        report_progress("measure kernels", item=kind)
        try:
            milliseconds[kind] = time_steps(config.with_values(training={"kernels": kind}), task, device, shares=shares)
        except (ConfigError, ParallelError) as fault:
            refused[kind] = str(fault).partition("\n")[0]
        except RuntimeError as fault:  # from torch, cuDNN or Triton
            if not is_out_of_memory(fault):
                raise
            refused[kind] = "its step ran out of memory"
        free_memory()
    return MeasuredKernels(
        chosen=choose_fastest(milliseconds, refused),
        milliseconds=milliseconds,
        refused=refused,
        shape=(rows, task.num_inputs, *config.patch.size),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        torch=torch.__version__,
    )


def time_steps(config: ExperimentConfig, task: Task, device: torch.device, *, shares: bool) -> float:
    """Return the median milliseconds of a training step on random voxels, with a new network.

    Parameters
    ----------
    config : ExperimentConfig
        Config of one process, with the kernels to try.
    task : Task
        Channels and labels.
    device : torch.device
        Device of the training.
    shares : bool
        Whether several replicas share each batch: then compiled norms over a whole batch are refused.
    """
    settings = config.training
    model = build_model(config, task, device)
    if is_distributed():  # a step that only this process runs is captured only with one replica
        model = DataParallel(model, Replicas(1, None, False))
    step = build_step(config, task, model, record=settings.record and settings.accumulate == 1)
    batch = draw_batch(task, config.patch.batch, config.patch.size, device)
    model.train()
    times = []
    try:
        for _ in range(WARM_UP + TIMED):
            begin = time.perf_counter()
            for number in range(settings.accumulate):
                step(batch, gathered=settings.accumulate, completes=number + 1 == settings.accumulate)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(1e3 * (time.perf_counter() - begin))
            report_progress("measure kernels", item=settings.kernels)
    finally:
        step.release()
    compiled = get_compiled(model)
    if shares and compiled is not None and (reason := compiled.explain_replicas()):
        raise ParallelError(f"replicas cannot share it: {reason}")
    return statistics.median(times[WARM_UP:])


def get_compiled(model: torch.nn.Module) -> CompiledNetwork | None:
    """Return the compiled network that a model runs, if it is one."""
    while isinstance(model, DataParallel | FastKernels):
        model = model.module
    inner = model.net if isinstance(model, FitGrid) else model
    return inner if isinstance(inner, CompiledNetwork) else None
