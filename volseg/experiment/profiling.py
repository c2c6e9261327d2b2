"""Show how the time of a training step is spent: the verb ``volseg profile`` as functions.

On this machine the step runs under torch's profiler. A replayed step has no Python calls that name a layer: it runs
eagerly first, and the replay's kernels are matched with the eager ones. The computation and traffic of each layer
follow from a traced step. For a GPU of another machine the step is only traced, and timed by the table of measured
kernels.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from volseg.config.schema import ExperimentConfig
from volseg.config.sections import UNSETTLED_KERNELS
from volseg.errors import ConfigError, VolsegError
from volseg.estimate.candidate import Candidate, name_candidate
from volseg.estimate.candidate_trace import trace_candidate
from volseg.estimate.estimator import Machine
from volseg.estimate.gpu_kinds import GpuKind
from volseg.estimate.step_time import estimate_times
from volseg.estimate.trace import KernelRun, StepTrace
from volseg.experiment.building import check_components
from volseg.experiment.network_plan import DataFacts, load_facts, plan_for_spacing
from volseg.experiment.placement.alternatives import build_candidate, explaining_memory
from volseg.experiment.placement.mesh_resolution import join_processes
from volseg.experiment.placement.placed_network import explain_eager
from volseg.experiment.placement.plan_command import resolve_machine
from volseg.experiment.placement.training_work import describe_freedom, describe_training
from volseg.experiment.profiled_step import BuiltTraining, WatchedSteps, build_profiled, find_network, watch_steps
from volseg.files import replacing
from volseg.parallel.devices import count_gpus, count_launched
from volseg.parallel.fast_kernels import CAPABILITY
from volseg.profiling.kernels import (
    PlacedWork,
    StepPlace,
    TimedKernel,
    as_kernels,
    sum_device_times,
    sum_kinds,
    sum_layers,
)
from volseg.profiling.places import PlaceWatch, list_work
from volseg.profiling.report import DevicePeaks, ProfileReport
from volseg.profiling.table import advise, describe_limit
from volseg.profiling.trace_file import read_trace, replace_replayed
from volseg.reporting.profile import write_profile
from volseg.workflow.precision import Precision, choose_dtype, deterministic

TRACE, TABLE = "trace.json.gz", "profile.json"

CPU_HAS_NO_BOUNDS = "work and bounds are unknown on a CPU; volseg profile --gpu h200 estimates them for a GPU"

BY_STRATEGY = "its strategy records the step in parts, or not at all"


@dataclass(frozen=True, kw_only=True)
class Profiled:
    """A profile, and its trace."""

    report: ProfileReport
    trace: bytes | None = None
    """Trace of a step that ran: Chrome's format, gzip."""

    def to_json(self) -> str:
        """Return the report as JSON."""
        return self.report.model_dump_json(indent=2)

    def write(self, folder: str | Path) -> Path:
        """Write table, trace and page into a folder; return the page's path."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        files = {TABLE: self.to_json().encode()} | ({} if self.trace is None else {TRACE: self.trace})
        for name, content in files.items():
            with replacing(folder / name) as partial:
                partial.write_bytes(content)
        return write_profile(self.report, folder)


@dataclass(frozen=True, kw_only=True)
class _Followed:
    """Work of a step on a kind of GPU."""

    candidate: Candidate
    work: list[PlacedWork]
    traces: tuple[StepTrace, ...]
    recorded: bool
    classes: dict[str, str]


def profile_training(
    config: ExperimentConfig,
    *,
    steps: int = 5,
    gpu: str | None = None,
    num_gpus: int | None = None,
    channels: int | None = None,
    classes: int | None = None,
) -> Profiled:
    """Profile a config's training step.

    Parameters
    ----------
    config : ExperimentConfig
        Config of the training.
    steps : int
        Profiled steps, after as many timed steps.
    gpu : str, optional
        A kind of GPU to estimate the step for; by default the step runs on this machine.
    num_gpus : int, optional
        Number of those GPUs; the config's number by default.
    channels, classes : int, optional
        See `load_facts`.

    Raises
    ------
    ConfigError, DataError
        If the config cannot be run, or channels and classes are unknown.
    ParallelError
        If the training cannot be traced for another GPU.
    """
    if steps < 1:
        raise ConfigError(f"a profile needs at least one step, got {steps}")
    if config.training.kernels in UNSETTLED_KERNELS:
        raise ConfigError(
            f"training.kernels is {config.training.kernels}, but a compiled kernel does not belong to one layer; "
            "profile with --set training.kernels=fast or torch"
        )
    check_components(config)
    facts = load_facts(config, channels, classes)
    if gpu is not None:
        return _forecast(config, facts, resolve_machine(num_gpus=num_gpus or config.parallel.num_gpus, kind=gpu))
    if num_gpus is not None:
        raise ConfigError(
            "--gpus is the number of GPUs to estimate for, and needs --gpu KIND; add --gpu, or leave out --gpus"
        )
    planned = plan_for_spacing(config, facts.spacing).complete(config)
    with deterministic(config.training.deterministic), explaining_memory(planned):
        return _profile_here(planned, facts, steps, on_gpu=config.device != "cpu" and count_gpus() > 0)


def _follow(config: ExperimentConfig, facts: DataFacts, machine: Machine, num_gpus: int) -> _Followed:
    """Trace the config's step, kernel by kernel."""
    gpu = machine.gpu
    dtype = choose_dtype(config.training.precision, gpu.capability)
    described = describe_training(config, dtype, facts)
    free = describe_freedom(config, dtype, has_fast_kernels=gpu.capability >= CAPABILITY)
    stages = (config.parallel.pipeline or num_gpus) if config.parallel.model_strategy == "pipeline" else 1
    plan = config.mesh(max(1, num_gpus // stages))  # a process drives all stages of a pipeline
    candidate = replace(build_candidate(config, plan, stages), kernels=free.kernels[0])
    watch = PlaceWatch(find_network)
    places: dict[int, StepPlace] = {}

    def time_kernel(run: KernelRun) -> float:
        places[id(run)] = watch.find_place()
        return gpu.seconds(run)

    # Not captured: the hooks that mark layers would be refused there, and the kernels are the same.
    with watch.watching():
        traces = trace_candidate(described.work, replace(candidate, recorded=False), gpu, time_kernel=time_kernel)
    work = [each for trace in traces for each in list_work(trace, places, gpu, machine.links)]
    return _Followed(candidate=candidate, work=work, traces=traces, recorded=free.records, classes=watch.classes)


def _forecast(config: ExperimentConfig, facts: DataFacts, machine: Machine) -> Profiled:
    """Return the profile of a traced step."""
    followed = _follow(config, facts, machine, machine.num_gpus)
    gpu, stages = machine.gpu, followed.candidate.pipeline > 1
    pieces = max(1, config.patch.batch // (followed.candidate.split_size or 1)) if stages else 1
    dtype = choose_dtype(config.training.precision, gpu.capability)
    # The cost of messages is the difference to a step with free messages: streams overlap.
    free = replace(machine.links, latency_s=0.0, bandwidth=math.inf)
    step, without = (
        estimate_times(
            followed.traces, gpu, links, recorded=followed.recorded, stages=stages, micro_batches=pieces
        ).seconds
        for links in (machine.links, free)
    )
    kernels, peaks = as_kernels(followed.work), compute_peaks(gpu, dtype)
    notes = ["no kernel ran: kernel times are from the table of measured kernels, and step times are their sums"]
    if not machine.gpu.is_measured:
        notes.append(f"times follow from published rates of {gpu.name}: volseg has no measurements of it")
    return _put_together(
        config,
        kernels,
        followed.work,
        step=step,
        messages=step - without,
        peaks=peaks,
        classes=followed.classes,
        precision=str(dtype).removeprefix("torch."),
        shape=(-(-config.patch.batch // followed.candidate.data), facts.task.num_inputs, *config.patch.size),
        device=gpu.name,
        source="forecast",
        parallel=name_candidate(followed.candidate),
        recorded=followed.recorded,
        not_recorded=None if followed.recorded else explain_eager(config, dtype) or BY_STRATEGY,
        notes=notes,
    )


def _profile_here(config: ExperimentConfig, facts: DataFacts, steps: int, *, on_gpu: bool) -> Profiled:
    """Run the step on this machine: on GPUs eagerly for the layers, then unchanged; on a CPU by operators."""
    # Traced before CUDA and a process group are initialised.
    followed, machine, notes = _follow_here(config, facts) if on_gpu else (None, None, [CPU_HAS_NO_BOUNDS])
    join_processes(config)
    built = build_profiled(config, facts, steps)
    dtype = Precision.choose(config.training.precision, built.device).dtype
    mesh = build_candidate(built.config, built.config.mesh(count_launched()), 1)
    if on_gpu:
        seen, kernels, matched, layer_classes = watch_replays(built, steps)
        work = [] if followed is None else followed.work
        if followed is not None and followed.candidate.pipeline == 1:  # one device, with any number in the trace
            first = followed.traces[0].device
            work = [replace(each, device=built.device.index or 0) for each in work if each.device == first]
        not_recorded = (
            None if seen.is_recorded else seen.not_recorded or explain_eager(built.config, dtype) or BY_STRATEGY
        )
    else:
        watch = PlaceWatch(find_network, annotates=True)
        seen = watch_steps(built, steps, watch=watch)
        kernels = [kernel.timed for kernel in read_trace(seen.events, watch.name_layer)]
        work, matched, layer_classes, not_recorded = [], None, watch.classes, "no step is recorded on a CPU"
    report = _put_together(
        built.config,
        kernels,
        work,
        # Operators take longer under the profiler, and so does the time between them.
        step=seen.seconds if on_gpu else seen.watched_seconds,
        steps=steps,
        peaks=None if machine is None else compute_peaks(machine.gpu, dtype),
        classes=layer_classes,
        precision=seen.precision,
        shape=seen.shape,
        device=torch.cuda.get_device_name(built.device) if on_gpu else "cpu",
        source="measured",
        parallel=name_candidate(mesh).replace("one GPU", "one device"),
        recorded=on_gpu and seen.is_recorded,
        not_recorded=not_recorded,
        step_seconds=seen.seconds,
        batch_seconds=seen.batch_seconds,
        matched=matched,
        notes=notes,
    )
    return replace(report, trace=seen.file)


def _follow_here(config: ExperimentConfig, facts: DataFacts) -> tuple[_Followed | None, Machine | None, list[str]]:
    """Return the work of a step on this machine's GPUs, or None with the reason."""
    machine = None
    try:
        machine = resolve_machine(here=True)
        return _follow(config, facts, machine, count_launched()), machine, []
    except VolsegError as fault:
        missing = "the peak rates of this GPU" if machine is None else "the work of each layer"
        return None, machine, [f"could not determine {missing}: {fault}"]


def watch_replays(built: BuiltTraining, steps: int) -> tuple[WatchedSteps, list[TimedKernel], float, dict[str, str]]:
    """Return the measurements of steps without marks, their kernels, and the matched share of the kernels.

    Parameters
    ----------
    built : BuiltTraining
        The training.
    steps : int
        Profiled steps.
    """
    watch = PlaceWatch(find_network, annotates=True)
    eager = watch_steps(built, steps, watch=watch, record=False)
    seen = watch_steps(built, steps)
    reference = [kernel for kernel in read_trace(eager.events, watch.name_layer) if kernel.step == 0]
    kernels, matched = replace_replayed(read_trace(seen.events, watch.name_layer), reference)
    return seen, [kernel.timed for kernel in kernels], matched, watch.classes


def compute_peaks(gpu: GpuKind, dtype: torch.dtype) -> DevicePeaks:
    """Return the peak rates of a kind of GPU in a precision."""
    flops = gpu.peaks.full if dtype is torch.float32 else gpu.peaks.half
    return DevicePeaks(bytes_per_second=gpu.peaks.bandwidth, flops_per_second=flops, source=gpu.source)


def _put_together(
    config: ExperimentConfig,
    kernels: list[TimedKernel],
    work: list[PlacedWork],
    *,
    step: float,
    steps: int = 1,
    messages: float | None = None,
    peaks: DevicePeaks | None,
    classes: dict[str, str],
    device: str,
    step_seconds: float | None = None,
    batch_seconds: float | None = None,
    **told: Any,
) -> Profiled:
    """Return the report of kernels and work; shares are relative to ``step``, and ``told`` are further fields.

    ``messages`` are the seconds of an estimated step's messages that nothing hides; communication kernels count
    separately.
    """
    numbers = sorted({kernel.device for kernel in kernels})
    # Communication kernels, without messages.
    sending = [each for each in work if each.place.direction == "communication" and "_kernel" in each.name]
    exchanging = {number: sum(each.forecast for each in sending if each.device == number) for number in numbers}
    devices = tuple(
        sum_device_times(
            kernels,
            device=number,
            step=step,
            steps=steps,
            exposed=None if messages is None else messages + exchanging[number],
        )
        for number in numbers
    )
    # Profiled kernels may take longer than a step without the profiler.
    length = max(each.step for each in devices)
    layers = sum_layers(kernels, work, step=length, steps=steps, peaks=peaks, classes=classes)
    kinds = sum_kinds(kernels, work, step=length, steps=steps, peaks=peaks)
    report = ProfileReport(
        name=config.name,
        network=config.network.name,
        device=device,
        peaks=peaks,
        steps=steps,
        step_seconds=step if step_seconds is None else step_seconds,
        batch_seconds=batch_seconds,
        kernels_per_step=len(kernels) / steps,
        devices=devices,
        kinds=tuple(kinds),
        layers=tuple(layers),
        limit="",
        **told,
    )
    found = {"limit": describe_limit(report), "advice": tuple(advise(report))}
    return Profiled(report=report.model_copy(update=found))
