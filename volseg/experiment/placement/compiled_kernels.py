"""Compile the kernels of a training before it needs them, on a machine with or without a GPU.

The training step is traced (`tracing`) for a kind of GPU, with the strategy that will run it. Every kernel that it
launches is compiled (`volseg.device.compiling`) into Triton's cache, where the step finds it. A note beside the kernels
lists them. A training starts a worker for this, unless it finds a note. A container image, for
example, is filled before there is a GPU (`compile_beforehand`). This step is optional: Triton compiles missing kernels
at their first launch.
"""

import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import volseg
from volseg.commands import run_module
from volseg.config.loading import dump_config, load_config
from volseg.config.schema import ExperimentConfig
from volseg.device.compiling import Compiling, can_compile, starts_by_compiler
from volseg.device.fake_gpu import GpuLike
from volseg.device.gpus import host_values, uses_gpus
from volseg.device.triton_kernels import hearing_calls
from volseg.errors import ParallelError, VolsegError
from volseg.estimate.candidate import Candidate, Work
from volseg.estimate.candidate_trace import trace_candidate
from volseg.estimate.fake_step.tracing import tracing
from volseg.experiment.network_plan import DataFacts, load_facts
from volseg.experiment.own_components import components_arguments
from volseg.experiment.placement.training_work import at_size, describe_training, list_kernels
from volseg.files import replacing
from volseg.lifetime import bind_copy
from volseg.parallel.devices import count_gpus, count_processes, read_local_rank
from volseg.parallel.fast_kernels import CAPABILITY, FastKernels
from volseg.parallel.processes.launcher import setting_variables
from volseg.parallel.processes.progress import report_progress
from volseg.parallel.processes.workers import WorkerPool, open_channel
from volseg.version import __version__
from volseg.workflow.precision import Precision, choose_dtype

logger = logging.getLogger(__name__)

OTHER = {"name", "output", "seed", "device", "data", "split", "logging", "evaluation", "hooks", "metrics"}
"""Sections of a config that do not affect the kernels of the step."""


@dataclass(frozen=True, kw_only=True)
class CompiledKernels:
    """Result of compiling for a training."""

    kernels: int = 0
    """Kernels, each for one kind of arguments."""
    seconds: float = 0.0
    problem: str = ""
    """Why some, or all, were not compiled."""


def compile_kernels(
    config: ExperimentConfig,
    gpu: GpuLike,
    *,
    candidate: Candidate | None = None,
    one_process: bool = False,
    runs_here: bool = False,
    facts: DataFacts | None = None,
    ready: Callable[[], object] | None = None,
) -> CompiledKernels:
    """Compile the kernels of a config's training step into Triton's cache; needs no GPU.

    Parameters
    ----------
    config : ExperimentConfig
        Config of the training.
    gpu : GpuLike
        The GPU to compile for.
    candidate : Candidate, optional
        Number of GPUs, and how they share the step; one GPU by default. The config determines the kernels.
    one_process, runs_here : bool
        See `trace_candidate` and `Compiling`.
    facts : DataFacts, optional
        Facts of its data set, if they are known.
    ready : callable, optional
        Called when the kernels of the first size's steps exist; those of other sizes and of validations may be missing.

    Raises
    ------
    ConfigError, DataError
        If the config cannot be run.
    ParallelError
        If the training cannot be traced, or Triton is not installed.
    """
    begin = time.perf_counter()
    dtype = choose_dtype(config.training.precision, gpu.capability)
    (kernels, *_) = list_kernels(config, dtype, gpu.capability >= CAPABILITY)
    is_fast = kernels == "fast" or config.training.kernels == "measured"
    described = describe_training(config, dtype, load_facts(config) if facts is None else facts)
    cores = len(os.sched_getaffinity(0))
    # Not captured, since tracing a capture takes longer. A capture runs the kernels of the steps before it, except for
    # one that exchanges planes of slabs.
    candidate = replace(candidate or Candidate(), kernels="fast" if is_fast else "torch", recorded=False)
    # Bound: a killed process would block further requests forever.
    compiling = Compiling(gpu.capability, cores, runs_here=runs_here, begin=partial(bind_copy, os.getpid()))
    first: list[int] = []
    with compiling, hearing_calls(compiling.ask):
        if is_fast and candidate.spatial == candidate.pipeline == 1 and candidate.checkpoint is None:
            _follow_rehearsal(described.work, candidate, gpu)
        for size in config.patch.sizes:
            work = at_size(described, size).work
            counting = _counting(work, lambda: first.append(compiling.num_asked))
            trace_candidate(counting, candidate, gpu, one_process=one_process)
            first.append(compiling.num_asked)
        if ready is not None:
            compiling.wait(first[0])
            ready()
        compiled = compiling.compiled
    problems = [f"{each.name}: {each.problem}" for each in compiled if each.problem]
    return CompiledKernels(
        kernels=len(compiled) - len(problems), seconds=time.perf_counter() - begin, problem="; ".join(problems[:1])
    )


def _follow_rehearsal(work: Work, candidate: Candidate, gpu: GpuLike) -> None:
    """Trace the rehearsal of `with_fast_kernels` by itself, before replicas exchange anything."""
    with tracing(gpu) as followed:
        (device,) = followed.devices
        with host_values():
            network = work.build()
        model = FastKernels(followed.copy(network), device)
        rows = -(-work.batch_size // candidate.data)
        with Precision(device.type, work.precision).autocast():
            model.rehearse(torch.zeros(rows, *work.shape[1:], device=device))


def _counting(work: Work, count: Callable[[], object]) -> Work:
    """Return the traced work, which counts before it validates."""
    validate = work.validate
    if validate is None:
        return work

    def count_and_validate(model: torch.nn.Module) -> None:
        count()
        validate(model)

    return replace(work, validate=count_and_validate)


def compile_beforehand(
    config: ExperimentConfig, gpu: GpuLike, *, channels: int | None = None, classes: int | None = None
) -> CompiledKernels:
    """Compile the kernels of a training for one GPU of a kind, and write a note, so that such a GPU compiles nothing.

    Needs no GPU. The kernels are in Triton's cache (``TRITON_CACHE_DIR``). The training must use the same versions of
    volseg, torch and Triton, and the same config except for its data and its name.

    Parameters
    ----------
    config : ExperimentConfig
        Config of the training.
    gpu : GpuLike
        The kind, with the name that the driver gives such a GPU.
    channels, classes : int, optional
        Channels of images and classes of label maps, for an unknown data set that is absent.

    Raises
    ------
    ConfigError, DataError
        If the config cannot be run.
    ParallelError
        If kernels cannot be compiled, or this process has initialised CUDA.
    """
    if uses_gpus():
        raise ParallelError(
            "kernels are compiled by copies of this process, and it has begun to use CUDA, which they would not "
            "survive; compile them in a process of its own (volseg compile)"
        )
    has_driver = count_gpus() > 0
    with setting_variables({"CUDA_VISIBLE_DEVICES": ""}):  # autograd would initialise each visible GPU
        compiled = compile_kernels(config, gpu, runs_here=has_driver, facts=load_facts(config, channels, classes))
    if compiled.problem:
        raise ParallelError(f"kernels for {gpu.name} were not compiled: {compiled.problem}")
    if has_driver or not starts_by_compiler():  # else a training's worker makes those functions, and writes the note
        write_note(note_path(config, [gpu.name]), config, gpu, compiled)
    return compiled


def note_path(config: ExperimentConfig, gpus: Sequence[str], processes: int = 1) -> Path:
    """Return the file that notes that the cache has the kernels of such a training, on GPUs of these names.

    Parameters
    ----------
    config : ExperimentConfig
        Config of the training.
    gpus : sequence of str
        Names from the driver; duplicates count once.
    processes : int
        Processes of its job.
    """
    from triton import __version__ as triton_version  # Triton may not be installed
    from triton import knobs

    told = {
        "config": config.model_dump(mode="json", exclude=OTHER),
        "versions": [__version__, torch.__version__, triton_version, _digest_sources()],
        "gpus": sorted(set(gpus)),
        "processes": processes,
    }
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
    return Path(knobs.cache.dir) / f"volseg_{digest[:32]}.json"


def write_note(note: Path, config: ExperimentConfig, gpu: GpuLike, compiled: CompiledKernels) -> None:
    """Write the note about compiled kernels, at a path from `note_path`."""
    with replacing(note) as file:
        file.write_text(json.dumps({"name": config.name, "gpu": gpu.name, **asdict(compiled)}), encoding="utf-8")


def _digest_sources() -> str:
    """Return a digest of this package's sources, which change without a new version in an editable installation.

    It covers contents: files from a container image have the times of its layers, in whole seconds.
    """
    folder, digest = Path(volseg.__file__).parent, hashlib.sha256()
    for source in sorted(folder.rglob("*.py")):
        digest.update(f"{source.relative_to(folder)} {source.stat().st_size}\n".encode())
        digest.update(source.read_bytes())
    return digest.hexdigest()


# Compile the kernels of a training in a worker process while the training reads its cases.
#
# Each machine of a job has one worker. The process with local rank 0 starts it once the job knows how it shares a step.
# The training waits for the kernels of its first steps; those of its other sizes and of its validation follow in
# parallel, at a lower priority.
#
# Why not a fork of the training: CUDA and the threads of a process group do not survive a fork, so that it would
# precede the choice of the mesh. A worker imports everything anew, which takes some seconds of another core.


LONGEST_SECONDS = 30.0
"""Longest wait of a training for its kernels; then it compiles them itself, in some 7 s for Task04 on an H200."""

BESIDE_TRAINING = 10
"""Niceness of compiling processes during the training."""


class OwnGpu(NamedTuple):
    """The GPU to compile kernels for."""

    name: str
    processors: int
    memory: int
    capability: tuple[int, int]


class KernelWorker:
    """A worker that compiles a training's kernels; without an order there is none.

    Parameters
    ----------
    order : mapping, optional
        Input of `serve_kernels`.
    command : sequence of str, optional
        Command of the worker, by default the verb that calls `serve_kernels`.
    """

    def __init__(self, order: Mapping[str, Any] | None = None, command: Sequence[str] | None = None) -> None:
        self.is_compiling = False  # whether there are kernels to wait for
        self._held, self._pool = ExitStack(), WorkerPool()
        if order is None:
            return
        try:
            folder = Path(self._held.enter_context(tempfile.TemporaryDirectory(prefix="volseg_kernels_")))
            self._held.callback(self._pool.stop_workers, at_once=True)  # the worker holds no data
            config = dump_config(order["config"].located(), folder / "config.yaml")
            command = command or run_module("volseg", "compile-kernels", *components_arguments())
            # The worker sees no GPU: autograd would start a thread for each.
            options: dict[str, Any] = {"gpu": "", "talks": True, "variables": {"OMP_NUM_THREADS": "1"}}
            worker = self._pool.start("the process that compiles kernels", command, folder / "log", **options)
            worker.send({**order, "config": str(config)})
            self.is_compiling = True
        except (OSError, VolsegError) as fault:  # no more processes, or components known only to this process
            logger.info("kernels are not compiled beforehand: %s", fault)
        except BaseException:  # Ctrl-C in between: no caller has this object to close it
            self.close()
            raise

    def wait(self, seconds: float = LONGEST_SECONDS) -> CompiledKernels | None:
        """Wait until the kernels of the first steps exist or the worker ends; return its result, None while it runs.

        The worker continues until it ends or is closed.
        """
        end, compiled = time.monotonic() + seconds, None
        while self.is_compiling:
            report_progress("compiling kernels")
            heard = self._pool.hear(0.2)
            if heard is not None:
                self.is_compiling, (worker, said) = False, heard
                if said is None:
                    compiled = CompiledKernels(problem=worker.describe_end())
                elif "ready" not in said:
                    compiled = CompiledKernels(**said)
            elif time.monotonic() > end:
                self.is_compiling, compiled = False, CompiledKernels(problem=f"they took longer than {seconds:.0f} s")
        if compiled is not None:
            self.close()
            if compiled.problem:
                logger.info("kernels were not compiled beforehand: %s", compiled.problem)
        return compiled

    def close(self) -> None:
        """End the worker and its compiling processes, if they still run."""
        self.is_compiling = False
        self._held.close()


def compile_for_training(config: ExperimentConfig, candidate: Candidate, device: torch.device) -> KernelWorker:
    """Return the worker that compiles for a training on this machine; only its first process starts a worker.

    Layers in stages run torch's kernels. Only the loss has kernels of this package, which compile in the time that
    tracing such a step takes. The choice of the strategy ``auto`` at the first batch is not known yet.

    Parameters
    ----------
    config : ExperimentConfig
        Config of the training, as given.
    candidate : Candidate
        How the processes and devices share a step.
    device : torch.device
        Device of this process.
    """
    if device.type != "cuda" or not can_compile() or read_local_rank() != 0:
        return KernelWorker()
    try:
        found = torch.cuda.get_device_properties(device)
        capability = (found.major, found.minor)
        gpu = OwnGpu(found.name, found.multi_processor_count, found.total_memory, capability)
        return KernelWorker(make_order(config, candidate, gpu, count_processes()))
    except OSError as fault:  # a cache that cannot be read
        logger.info("kernels are not compiled beforehand: %s", fault)
        return KernelWorker()


def make_order(config: ExperimentConfig, candidate: Candidate, gpu: OwnGpu, processes: int) -> dict[str, Any] | None:
    """Return the order for the worker of a job, or None if nothing is to compile or the step cannot be traced."""
    is_alone = processes == 1
    in_turns = candidate.data * (1 if is_alone else candidate.spatial) != processes  # one computes several replicas
    if candidate.pipeline > 1 or in_turns or (is_alone and config.parallel.model_strategy == "auto"):
        return None
    note = note_path(config, [gpu.name], processes)
    if note.exists():
        return None
    return {
        "config": config,
        "gpu": gpu,
        "candidate": vars(candidate),
        "one_process": is_alone and candidate.spatial > 1,
        "note": str(note),
    }


def serve_kernels(compile_each: Callable[..., CompiledKernels] = compile_kernels) -> None:
    """Run as the worker: compile the order of the training that started this process, write the note, and report."""
    channel = open_channel()
    if (order := channel.receive()) is None:  # the training has ended
        return

    def say_ready() -> None:
        """Let the training continue, and compile the rest at a lower priority."""
        # This worker, and its compiling processes.
        os.setpriority(os.PRIO_PGRP, 0, max(os.getpriority(os.PRIO_PROCESS, 0), BESIDE_TRAINING))
        channel.send({"ready": True})

    name, processors, memory, capability = order["gpu"]
    gpu = OwnGpu(name, processors, memory, tuple(capability))
    try:
        config = load_config(order["config"])
        compiled = compile_each(
            config,
            gpu,
            candidate=Candidate(**order["candidate"]),
            one_process=order["one_process"],
            runs_here=True,
            ready=say_ready,
        )
        if not compiled.problem:
            write_note(Path(order["note"]), config, gpu, compiled)
    except Exception as fault:  # errors of the user's own network; the training will report them
        kind = "" if isinstance(fault, VolsegError) else f"{type(fault).__name__}: "
        compiled = CompiledKernels(problem=kind + str(fault).strip().partition("\n")[0])
    channel.send(asdict(compiled))
