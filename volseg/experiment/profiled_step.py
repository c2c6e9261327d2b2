"""Run some steps of a config's training, the last of them under torch's profiler.

The training is the real one: its loop, network, losses, optimizer, augmentation and strategy. Its cases are random
voxels, since the duration of a step does not depend on them. No data are read.
"""

import gzip
import json
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from volseg.config.schema import ExperimentConfig
from volseg.data.augmented import EpochBatches
from volseg.data.case_store.preparing import PreparedCases
from volseg.data.cases import Batch, Case, Task
from volseg.data.labels import num_indices
from volseg.experiment.building import build_training
from volseg.experiment.network_plan import DataFacts
from volseg.experiment.placement.mesh_resolution import CaseReading, resolve_mesh
from volseg.experiment.placement.placed_network import build_model, choose_device
from volseg.models.fit_grid import FitGrid
from volseg.parallel import ModelParallel
from volseg.parallel.data_parallel import DataParallel
from volseg.profiling.kernels import AUGMENTATION, MARK, OUTSIDE
from volseg.profiling.places import PlaceWatch
from volseg.workflow.hooks import Hook
from volseg.workflow.precision import seed_everything
from volseg.workflow.training import Training

WARM_UP = 5
"""Steps before the timed ones: three run eagerly, the fourth is captured, the fifth is the first replay."""

NUM_CASES = 2


@dataclass(frozen=True, kw_only=True)
class BuiltTraining:
    """A training that is ready to run."""

    config: ExperimentConfig
    """The settled config: its network planned, its mesh resolved."""
    task: Task
    model: nn.Module
    batches: EpochBatches
    device: torch.device


@dataclass(kw_only=True)
class WatchedSteps:
    """Measurements of some steps."""

    seconds: float = 0.0
    """Duration of a step without the profiler."""
    watched_seconds: float = 0.0
    """Duration of a step under the profiler."""
    batch_seconds: float = 0.0
    """Time per step that the training waits for its batch."""
    events: Sequence[Mapping[str, Any]] = field(default_factory=list)
    """Events of the trace."""
    file: bytes = b""
    """The trace file, compressed by gzip."""
    is_recorded: bool = False
    not_recorded: str | None = None
    precision: str = ""
    shape: tuple[int, ...] = ()


def find_network(module: nn.Module) -> nn.Module | None:
    """Return the network inside a training's module, with the names of its own modules, or None."""
    while isinstance(module, ModelParallel | DataParallel):
        module = module.module
    return module if isinstance(module, FitGrid) else None


def build_profiled(config: ExperimentConfig, facts: DataFacts, steps: int) -> BuiltTraining:
    """Return the training of a config, on random cases.

    Parameters
    ----------
    config : ExperimentConfig
        The config, with its network planned for the spacing.
    facts : DataFacts
        Facts of its data set.
    steps : int
        Profiled steps, which determine the length of the epoch.
    """
    device = choose_device(config)
    length = (WARM_UP + 2 * steps) * config.training.accumulate
    config = config.with_values(training={"epochs": 1, "iterations": length})
    config, mesh = resolve_mesh(config, device)
    seed_everything(config.seed)
    model = build_model(config, facts.task, device, mesh=mesh)
    reading = CaseReading(config, mesh, facts.spacing)
    prepared = PreparedCases(training=_make_cases(config, facts.task) if mesh.reads else ())
    batches = reading.make_batches(prepared, facts.task, model, device)
    return BuiltTraining(config=config, task=facts.task, model=model, batches=batches, device=device)


def _make_cases(config: ExperimentConfig, task: Task) -> list[Case]:
    """Return cases of random voxels, as large as a patch."""
    generator = torch.Generator().manual_seed(config.seed)
    sides = config.patch.size
    return [
        {
            "case": f"random {number}",
            "image": torch.randn(task.num_inputs, *sides, generator=generator),
            "label": torch.randint(num_indices(task), (1, *sides), generator=generator).to(torch.uint8),
        }
        for number in range(NUM_CASES)
    ]


def watch_steps(
    built: BuiltTraining, steps: int, *, watch: PlaceWatch | None = None, record: bool = True
) -> WatchedSteps:
    """Train for some steps; return their measurements.

    Parameters
    ----------
    built : BuiltTraining
        The training.
    steps : int
        Steps to time without the profiler, and then with it.
    watch : PlaceWatch, optional
        Marks the layers in the trace. It prevents a capture: see ``record``.
    record : bool
        Whether the step may be captured.
    """
    settings = built.config.training
    devices = {parameter.device for parameter in built.model.parameters()}
    hook = _Watching(devices, steps, settings.accumulate, watch)
    training = build_training(
        built.config.with_values(training={"record": settings.record and record}),
        built.model,
        _Batches(built.batches),
        validation=None,
        hooks=[hook],
        task=built.task,
    )
    training.run()
    return hook.seen


class _Batches:
    """The batches of a training, each prepared within a range of the trace."""

    def __init__(self, batches: EpochBatches) -> None:
        self._batches = batches
        self.batch_size = getattr(batches, "batch_size", None)

    def __len__(self) -> int:
        return len(self._batches)

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch."""
        made = self._batches.epoch(number, start=start)
        while True:
            with record_function(f"{MARK}{AUGMENTATION}"):
                batch = next(made, None)
            if batch is None:
                return
            yield batch


class _Watching(Hook):
    """Time steps, then profile as many steps."""

    def __init__(self, devices: set[torch.device], steps: int, accumulate: int, watch: PlaceWatch | None) -> None:
        self._devices, self._steps, self._accumulate, self._watch = devices, steps, accumulate, watch
        self._marks = ExitStack()
        self._around = ExitStack()
        self._profiler: profile | None = None
        self._begin = self._waited = 0.0
        self.seen = WatchedSteps()

    def on_batch_begin(self, training: Training, batch: Mapping[str, Any]) -> None:
        """Mark the step that a batch begins."""
        if training.position % self._accumulate == 0 and self._profiler is not None:
            number = training.position // self._accumulate - WARM_UP - self._steps
            self._marks.enter_context(record_function(f"{MARK}{OUTSIDE} {number}"))
        if self._watch is not None:
            self._watch.begin_step()
        self.seen.shape = tuple(batch["image"].shape)

    def on_batch_end(self, training: Training, fields: Mapping[str, Any]) -> None:  # noqa: ARG002 (a hook's signature)
        """Switch to the next phase after the last batch of a step."""
        if training.position % self._accumulate:
            return
        self._marks.close()
        done = training.position // self._accumulate
        if done == WARM_UP:
            self._wait()
            self._begin, self._waited = time.perf_counter(), training.seconds_of_epoch[1]
        elif done == WARM_UP + self._steps:
            self._wait()
            self.seen.seconds = (time.perf_counter() - self._begin) / self._steps
            self.seen.batch_seconds = (training.seconds_of_epoch[1] - self._waited) / self._steps
            self._start(training)
            self._begin = time.perf_counter()
        elif done == WARM_UP + 2 * self._steps:
            self._wait()
            self.seen.watched_seconds = (time.perf_counter() - self._begin) / self._steps
            self._stop()

    def on_training_end(self, training: Training) -> None:  # noqa: ARG002 (a hook's signature)
        """Close all contexts, also after an error."""
        self._marks.close()
        self._around.close()

    def _start(self, training: Training) -> None:
        recorded = training.step.recorded
        self.seen.is_recorded = recorded is not None and recorded.num_recorded > 0
        self.seen.not_recorded = None if recorded is None else recorded.refused
        self.seen.precision = str(training.precision.dtype).removeprefix("torch.")
        on_gpu = any(device.type == "cuda" for device in self._devices)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        if self._watch is not None:
            self._around.enter_context(self._watch.watching())
        with warnings.catch_warnings():
            # There is one cycle; torch 2.11 warns that it discards others. Keeping them (acc_events) does not help:
            # torch then sorts all events into a tree, which takes a minute for ten steps of a V-Net.
            warnings.filterwarnings("ignore", message=".*Profiler clears events")
            self._profiler = self._around.enter_context(profile(activities=activities))

    def _stop(self) -> None:
        assert self._profiler is not None
        self._around.close()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "trace.json"
            self._profiler.export_chrome_trace(str(file))
            text = file.read_bytes()
        self._profiler = None
        self.seen.events = json.loads(text)["traceEvents"]
        self.seen.file = gzip.compress(text)

    def _wait(self) -> None:
        for device in self._devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
