"""Where a training step's time goes: the verb ``volseg profile`` as functions.

On this machine the step runs, and torch's profiler says what ran when. A recorded step has no Python that could say for
which layer: it is run eagerly first, and the replay's kernels are those of the eager one. What each layer has to
compute and to move is known from a followed step on a GPU, and from the operators that run on a CPU. For a GPU that is
not here the step is only followed, and timed by the table of measured kernels.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from volseg.config.schema import UNSETTLED_KERNELS, ExperimentConfig
from volseg.errors import ConfigError, VolsegError
from volseg.estimate.candidate import Candidate, name_candidate
from volseg.estimate.candidate_trace import trace_candidate
from volseg.estimate.estimator import Machine
from volseg.estimate.gpu_kinds import GpuKind
from volseg.estimate.step_time import find_times
from volseg.estimate.trace import KernelRun, StepTrace
from volseg.experiment.alternatives import find_candidate
from volseg.experiment.building import check_components
from volseg.experiment.kernels import explain_eager
from volseg.experiment.mesh_resolution import join_processes
from volseg.experiment.network_plan import DataFacts, find_facts, plan_for_spacing
from volseg.experiment.out_of_memory import explaining_memory
from volseg.experiment.plan_command import find_machine
from volseg.experiment.profiled_step import (
    BuiltTraining,
    WatchedSteps,
    build_profiled,
    find_network,
    watch_steps,
)
from volseg.experiment.training_work import describe_training, find_freedom
from volseg.files import replacing
from volseg.parallel.devices import count_gpus, count_launched
from volseg.parallel.fast_kernels import CAPABILITY
from volseg.profiling.kernels import PlacedWork, TimedKernel
from volseg.profiling.places import PlaceWatch
from volseg.profiling.report import DevicePeaks, ProfileReport
from volseg.profiling.summing import as_kernels, find_device_times, sum_kinds, sum_layers
from volseg.profiling.table import advise, describe_limit
from volseg.profiling.trace_file import read_trace, replace_replayed
from volseg.profiling.work import PlacedRuns, list_work, place_work
from volseg.reporting.profile import write_profile
from volseg.workflow.precision import Precision, choose_dtype
from volseg.workflow.randomness import deterministic

__all__ = ["Profiled", "compute_peaks", "profile_training", "watch_replays"]

TRACE, TABLE = "trace.json.gz", "profile.json"

CPU_HAS_NO_BOUNDS = "the bounds of a CPU are not known; volseg profile --gpu h200 tells those of a GPU without one"

BY_STRATEGY = "its strategy records in parts, or not at all"


@dataclass(frozen=True, kw_only=True)
class Profiled:
    """A profile, and the trace that it was read from."""

    report: ProfileReport
    trace: bytes | None = None
    """Of a step that ran: Chrome's format, gzip."""

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
    """What a step would be asked of a kind of GPU."""

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
    """Say where the time of a config's training step goes.

    Parameters
    ----------
    config : ExperimentConfig
        Of the training.
    steps : int
        That are watched, after as many that are timed.
    gpu : str, optional
        A kind of GPU that is not here, for which the step is forecast; by default it runs here.
    num_gpus : int, optional
        Of that kind; by default as many as the config asks for.
    channels, classes : int, optional
        See `find_facts`.

    Raises
    ------
    ConfigError, DataError
        If the config cannot be run, or channels and classes are not known.
    ParallelError
        If the training cannot be followed for another GPU.
    """
    if steps < 1:
        raise ConfigError(f"a profile needs at least one step, got {steps}")
    if config.training.kernels in UNSETTLED_KERNELS:
        raise ConfigError(
            f"training.kernels is {config.training.kernels}, and a compiled kernel belongs to no layer of the network; "
            "profile with --set training.kernels=fast or torch"
        )
    check_components(config)
    facts = find_facts(config, channels, classes)
    if gpu is not None:
        return _forecast(config, facts, find_machine(num_gpus=num_gpus or config.parallel.num_gpus, kind=gpu))
    if num_gpus is not None:
        raise ConfigError(
            "--gpus says how many GPUs are forecast, which --gpu KIND names; leave one out or add the other"
        )
    planned = plan_for_spacing(config, facts.spacing).complete(config)
    with deterministic(config.training.deterministic), explaining_memory(planned):
        return _profile_here(planned, facts, steps, on_gpu=config.device != "cpu" and count_gpus() > 0)


def _follow(config: ExperimentConfig, facts: DataFacts, machine: Machine, num_gpus: int) -> _Followed:
    """Follow the step as the config would have it run, kernel by kernel."""
    gpu = machine.gpu
    dtype = choose_dtype(config.training.precision, gpu.capability)
    described = describe_training(config, dtype, facts)
    free = find_freedom(config, dtype, has_fast_kernels=gpu.capability >= CAPABILITY)
    stages = (config.parallel.pipeline or num_gpus) if config.parallel.model_strategy == "pipeline" else 1
    plan = config.mesh(max(1, num_gpus // stages))  # a process drives all stages of a pipeline
    candidate = replace(find_candidate(config, plan, stages), kernels=free.kernels[0])
    watch = PlaceWatch(find_network)
    runs = PlacedRuns(watch)

    def time_kernel(run: KernelRun) -> float:
        runs.note(run)
        return gpu.seconds(run)

    # Not recorded: hooks that say which layer runs would be refused there, and the kernels are the same.
    with watch.watching():
        traces = trace_candidate(described.work, replace(candidate, recorded=False), gpu, time_kernel=time_kernel)
    work = [each for trace in traces for each in list_work(trace, runs, gpu, machine.links)]
    return _Followed(
        candidate=candidate, work=work, traces=traces, recorded=free.records, classes=watch.classes
    )  # fmt: skip


def _forecast(config: ExperimentConfig, facts: DataFacts, machine: Machine) -> Profiled:
    """Return the profile of a step that was followed."""
    followed = _follow(config, facts, machine, machine.num_gpus)
    gpu, stages = machine.gpu, followed.candidate.pipeline > 1
    pieces = max(1, config.patch.batch // (followed.candidate.split_size or 1)) if stages else 1
    dtype = choose_dtype(config.training.precision, gpu.capability)
    # What messages add to a step is what it would lose if they took no time: streams run beside each other.
    free = replace(machine.links, points={}, latency_s=0.0, bandwidth=math.inf)
    step, without = (
        find_times(followed.traces, gpu, links, recorded=followed.recorded, stages=stages, micro_batches=pieces).seconds
        for links in (machine.links, free)
    )
    kernels, peaks = as_kernels(followed.work), compute_peaks(gpu, dtype)
    notes = ["no kernel ran: times are by the table of measured kernels, each by itself, and steps by their sum"]
    if not machine.gpu.is_measured:
        notes.append(f"times follow from published rates of {gpu.name}: nobody has measured ours there")
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
    """Run the step on this machine: on GPUs eagerly for the layers, then as it is; on a CPU operators are kernels."""
    # Followed before CUDA is begun, and a group of processes.
    followed, machine, notes = _follow_here(config, facts) if on_gpu else (None, None, [CPU_HAS_NO_BOUNDS])
    join_processes(config)
    built = build_profiled(config, facts, steps)
    dtype = Precision.choose(config.training.precision, built.device).dtype
    if on_gpu:
        seen, kernels, matched, layer_classes = watch_replays(built, steps)
        work = [] if followed is None else followed.work
        if followed is not None and followed.candidate.pipeline == 1:  # one device, whatever its number in the trace
            first = followed.traces[0].device
            work = [replace(each, device=built.device.index or 0) for each in work if each.device == first]
        not_recorded = (
            None if seen.is_recorded else seen.not_recorded or explain_eager(built.config, dtype) or BY_STRATEGY
        )
    else:
        seen, kernels, work, layer_classes = _watch_operators(built, steps)
        matched, not_recorded = None, "no step is recorded on a CPU"
    report = _put_together(
        built.config,
        kernels,
        work,
        # Operators take longer where they are watched, and so does all that is between.
        step=seen.seconds if on_gpu else seen.watched_seconds,
        steps=steps,
        peaks=None if machine is None else compute_peaks(machine.gpu, dtype),
        classes=layer_classes,
        precision=seen.precision,
        shape=seen.shape,
        device=torch.cuda.get_device_name(built.device) if on_gpu else "cpu",
        source="measured",
        parallel=_name_mesh(built.config),
        recorded=on_gpu and seen.is_recorded,
        not_recorded=not_recorded,
        step_seconds=seen.seconds,
        batch_seconds=seen.batch_seconds,
        matched=matched,
        notes=notes,
    )
    return replace(report, trace=seen.file)


def _watch_operators(
    built: BuiltTraining, steps: int
) -> tuple[WatchedSteps, list[TimedKernel], list[PlacedWork], dict[str, str]]:
    """Return what was seen of steps on a CPU, its operators as kernels, their work, and the classes of the layers."""
    watch = PlaceWatch(find_network, annotates=True)
    runs = PlacedRuns(watch)
    seen = watch_steps(built, steps, watch=watch, runs=runs)
    kernels = [kernel.timed for kernel in read_trace(seen.events, watch.name_layer)]
    return seen, kernels, [place_work(run, place) for run, place in runs.items()], watch.classes


def _follow_here(config: ExperimentConfig, facts: DataFacts) -> tuple[_Followed | None, Machine | None, list[str]]:
    """Return what the step is asked of this machine's GPUs; where nobody knows, None, and why."""
    machine = None
    try:
        machine = find_machine(here=True)
        return _follow(config, facts, machine, count_launched()), machine, []
    except VolsegError as fault:
        missing = "how fast this GPU can be" if machine is None else "what the layers compute and move"
        return None, machine, [f"{missing} is not known: {fault}"]


def watch_replays(built: BuiltTraining, steps: int) -> tuple[WatchedSteps, list[TimedKernel], float, dict[str, str]]:
    """Return what was seen of steps as they really run, their kernels, and which part of these was matched.

    Parameters
    ----------
    built : BuiltTraining
        What trains.
    steps : int
        That are watched.
    """
    watch = PlaceWatch(find_network, annotates=True)
    eager = watch_steps(built, steps, watch=watch, record=False)
    seen = watch_steps(built, steps)
    reference = [kernel for kernel in read_trace(eager.events, watch.name_layer) if kernel.step == 0]
    kernels, matched = replace_replayed(read_trace(seen.events, watch.name_layer), reference)
    return seen, [kernel.timed for kernel in kernels], matched, watch.classes


def compute_peaks(gpu: GpuKind, dtype: torch.dtype) -> DevicePeaks:
    """Return what a kind of GPU can do at best in a precision."""
    flops = gpu.peaks.full if dtype is torch.float32 else gpu.peaks.half
    return DevicePeaks(bytes_per_second=gpu.peaks.bandwidth, flops_per_second=flops, source=gpu.source)


def _name_mesh(config: ExperimentConfig) -> str:
    count = count_launched()
    name = name_candidate(find_candidate(config, config.mesh(count), 1))
    return name.replace("one GPU", "one device")


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
    """Return the report of kernels and work: shares are of ``step``; ``told`` are further fields of it.

    ``messages`` are the seconds of a forecast step in which nothing hides them; kernels that exchange are their own.
    """
    numbers = sorted({kernel.device for kernel in kernels})
    # Kernels that exchange, and no message.
    sending = [each for each in work if each.place.direction == "communication" and "_kernel" in each.name]
    exchanging = {number: sum(each.forecast or 0.0 for each in sending if each.device == number) for number in numbers}
    devices = tuple(
        find_device_times(
            kernels,
            device=number,
            step=step,
            steps=steps,
            exposed=None if messages is None else messages + exchanging[number],
        )
        for number in numbers
    )
    # Kernels that are watched may take longer than a step that nobody watches.
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
