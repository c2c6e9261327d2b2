"""The kernels of a training, compiled before it needs them, where no GPU needs to be.

The training step is followed on a GPU of a kind (`tracing`), by the strategy that will run it, and every kernel that
it asks for is compiled (`volseg.device.compiling`) into Triton's cache, where the step finds it. What was compiled is
noted beside the kernels. A training starts a worker for it (`kernel_worker`), unless it finds a note; an
image, say, is filled before there is a GPU (`compile_beforehand`). Nothing depends on it: what was not compiled, Triton
compiles when it is run.
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
from typing import Any

import torch
from torch import nn

import volseg
from volseg.commands import run_module
from volseg.config.loading import dump_config, load_config
from volseg.config.schema import ExperimentConfig
from volseg.device.compiling import Compiling, can_compile, starts_by_compiler
from volseg.device.fake_gpu import GpuLike
from volseg.device.gpus import host_values, uses_gpus
from volseg.device.triton_kernels import hearing_calls
from volseg.errors import ParallelError, VolsegError
from volseg.estimate.candidate import Candidate
from volseg.estimate.candidate_trace import trace_candidate
from volseg.estimate.tracing import tracing
from volseg.estimate.work import Work
from volseg.experiment.data_facts import DataFacts, find_facts
from volseg.experiment.own_components import components_arguments
from volseg.experiment.rehearsing import explain_slowness
from volseg.experiment.training_work import at_size, describe_training
from volseg.files import replacing
from volseg.lifetime import bind_copy
from volseg.parallel.devices import count_gpus, count_processes, find_local_rank
from volseg.parallel.fast_kernels import CAPABILITY, FastKernels
from volseg.parallel.processes.progress import report_progress
from volseg.parallel.processes.workers import WorkerPool, open_channel
from volseg.version import __version__
from volseg.workflow.precision import Precision, choose_dtype

__all__ = [
    "CompiledKernels",
    "KernelWorker",
    "OwnGpu",
    "compile_beforehand",
    "compile_for_training",
    "compile_kernels",
    "make_order",
    "note_path",
    "serve_kernels",
    "write_note",
]

logger = logging.getLogger(__name__)


OTHER = {"name", "output", "seed", "device", "data", "split", "logging", "evaluation", "hooks", "metrics"}
"""Sections of a config on which no kernel of the step depends."""


@dataclass(frozen=True, kw_only=True)
class CompiledKernels:
    """What was compiled for a training."""

    kernels: int = 0
    """Kernels, each for one kind of arguments."""
    seconds: float = 0.0
    """From beginning to end."""
    problem: str = ""
    """Why some, or all, were not compiled."""


def compile_kernels(
    config: ExperimentConfig,
    gpu: GpuLike,
    *,
    candidate: Candidate | None = None,
    one_process: bool = False,
    processes: int | None = None,
    runs_here: bool = False,
    facts: DataFacts | None = None,
    ready: Callable[[], object] | None = None,
) -> CompiledKernels:
    """Compile what the training step of a config runs, into Triton's cache; needs no GPU.

    Parameters
    ----------
    config : ExperimentConfig
        Of the training.
    gpu : GpuLike
        What it is to run on.
    candidate : Candidate, optional
        On how many of them, and how these share the step; one GPU by default. Which kernels it takes there the config
        says.
    one_process : bool
        See `trace_candidate`.
    processes : int, optional
        That compile; one per core by default.
    runs_here : bool
        See `Compiling`.
    facts : DataFacts, optional
        Of its data set, where they are known already.
    ready : callable, optional
        Called when the kernels of the first size's steps are there; those of other sizes, and of validations, are not.

    Raises
    ------
    ConfigError, DataError
        If the config cannot be run.
    ParallelError
        If the training cannot be followed, or Triton is not installed.
    """
    begin = time.perf_counter()
    dtype = choose_dtype(config.training.precision, gpu.capability)
    is_fast = config.training.kernels in ("fast", "measured") or (
        config.training.kernels == "auto" and explain_slowness(config, dtype) is None and gpu.capability >= CAPABILITY
    )
    described = describe_training(config, dtype, find_facts(config) if facts is None else facts)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # Not recorded, which is followed for longer: a recording runs the kernels of the steps before it, but for one that
    # exchanges planes of slabs.
    candidate = replace(candidate or Candidate(), kernels="fast" if is_fast else "torch", recorded=False)
    # One that is killed would be waited for, for ever, to ask for more.
    bind = partial(bind_copy, os.getpid())
    compiling = Compiling(gpu.capability, processes or cores, runs_here=runs_here, begin=bind)
    first: list[int] = []
    is_rehearsed = is_fast and candidate.spatial == candidate.pipeline == 1 and candidate.checkpoint is None
    with compiling, hearing_calls(compiling.ask):
        if is_rehearsed:
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
    """Follow what `with_fast_kernels` runs of a network first, by itself, where replicas exchange nothing yet."""
    with tracing(gpu) as followed:
        (device,) = followed.devices
        with host_values():
            network = work.build()
        model = FastKernels(followed.copy(network), device)
        rows = -(-work.batch_size // candidate.data)
        with Precision(device.type, work.precision).autocast():
            model.rehearse(torch.zeros(rows, *work.shape[1:], device=device))


def _counting(work: Work, count: Callable[[], object]) -> Work:
    """Return what is followed, which counts before it validates."""
    validate = work.validate
    if validate is None:
        return work

    def count_and_validate(model: nn.Module) -> None:
        count()
        validate(model)

    return replace(work, validate=count_and_validate)


def compile_beforehand(
    config: ExperimentConfig, gpu: GpuLike, *, channels: int | None = None, classes: int | None = None
) -> CompiledKernels:
    """Compile what a training runs on one GPU of a kind, and note it, so that on such a GPU it compiles nothing.

    Needs no GPU. Triton's cache (``TRITON_CACHE_DIR``) holds it; the training must run with the same versions of this
    package, of torch and of Triton, and with the same config but for its data and its name.

    Parameters
    ----------
    config : ExperimentConfig
        Of the training.
    gpu : GpuLike
        The kind; its name is the one that the driver gives such a GPU.
    channels, classes : int, optional
        Of images and label maps, where the data set is not there and not known.

    Raises
    ------
    ConfigError, DataError
        If the config cannot be run.
    ParallelError
        If kernels cannot be compiled, or this process has begun to use CUDA.
    """
    if uses_gpus():
        raise ParallelError(
            "kernels are compiled by copies of this process, and it has begun to use CUDA, which they would not "
            "survive; compile them in a process of its own (volseg compile)"
        )
    facts = find_facts(config, channels, classes)
    has_driver, visible = count_gpus() > 0, os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # autograd would begin to use each that is visible
    try:
        compiled = compile_kernels(config, gpu, runs_here=has_driver, facts=facts)
    finally:
        os.environ.pop("CUDA_VISIBLE_DEVICES")
        if visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible
    if compiled.problem:
        raise ParallelError(f"kernels for {gpu.name} were not compiled: {compiled.problem}")
    if has_driver or not starts_by_compiler():  # else a training's worker has those functions made, and notes it
        write_note(note_path(config, [gpu.name]), config, gpu, compiled)
    return compiled


def note_path(config: ExperimentConfig, gpus: Sequence[str], processes: int = 1) -> Path:
    """Return the file that says that the kernels of such a training, on GPUs of these names, are in the cache.

    Parameters
    ----------
    config : ExperimentConfig
        Of the training.
    gpus : sequence of str
        As the driver tells them; one twice counts once.
    processes : int
        Of its job.
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
    """Note what was compiled, where `note_path` says."""
    note.parent.mkdir(parents=True, exist_ok=True)
    with replacing(note) as file:
        file.write_text(json.dumps({"name": config.name, "gpu": gpu.name, **asdict(compiled)}), encoding="utf-8")


def _digest_sources() -> str:
    """Return what changes with this package's sources, which an editable installation does without a new version.

    By what they hold: files that came with an image have the times of its layers, in whole seconds.
    """
    folder, digest = Path(volseg.__file__).parent, hashlib.sha256()
    for source in sorted(folder.rglob("*.py")):
        digest.update(f"{source.relative_to(folder)} {source.stat().st_size}\n".encode())
        digest.update(source.read_bytes())
    return digest.hexdigest()


# A worker process that compiles the kernels of a training while the training reads its cases.
#
# Each machine of a job has one, started by the process with local rank 0 once the job knows how it shares a step. The
# training waits for the kernels of its first steps; those of its other sizes and of its validation follow beside it, at
# a lower priority. A training like one whose kernels are noted starts no worker. Nothing depends on the worker: the
# step compiles what the worker does not bring.
#
# Why not a fork of the training: CUDA and the threads of a process group do not survive one, so that it would have to
# be made before a training knows its mesh. A worker imports everything anew, which takes some seconds of another core.


LONGEST_SECONDS = 30.0
"""That a training waits for its kernels; then it compiles what it needs itself, in some 7 s for Task04 on an H200."""

BESIDE_TRAINING = 10
"""Niceness of what compiles while the training runs."""

NAME = "the process that compiles kernels"

ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@dataclass(frozen=True, kw_only=True)
class OwnGpu:
    """What kernels are compiled for."""

    name: str
    processors: int
    memory: int
    capability: tuple[int, int]

    @classmethod
    def find(cls, device: torch.device) -> "OwnGpu":
        """Return what a GPU of this process is."""
        found = torch.cuda.get_device_properties(device)
        return cls(
            name=found.name,
            processors=found.multi_processor_count,
            memory=found.total_memory,
            capability=(found.major, found.minor),
        )


class KernelWorker:
    """A worker that compiles what a training will run; none where there is no order.

    Parameters
    ----------
    order : mapping, optional
        What `serve_kernels` gets.
    command : sequence of str, optional
        What the worker runs, by default the verb that calls `serve_kernels`.
    """

    def __init__(self, order: Mapping[str, Any] | None = None, command: Sequence[str] | None = None) -> None:
        self.is_compiling = False
        """Whether there is something to wait for."""
        self._held, self._pool = ExitStack(), WorkerPool()
        if order is None:
            return
        try:
            folder = Path(self._held.enter_context(tempfile.TemporaryDirectory(prefix="volseg_kernels_")))
            self._held.callback(self._pool.stop_workers, at_once=True)  # it holds nothing
            config = dump_config(order["config"].located(), folder / "config.yaml")
            command = command or run_module("volseg", "compile-kernels", *components_arguments())
            # It sees no GPU: autograd would begin a thread for each.
            worker = self._pool.start(NAME, command, folder / "log", gpu="", talks=True, variables=ONE_THREAD)
            worker.send({**order, "config": str(config)})
            self.is_compiling = True
        except (OSError, VolsegError) as fault:  # no more processes, or components that only this process knows
            logger.info("kernels are not compiled beforehand: %s", fault)
        except BaseException:  # Ctrl-C in between: nobody has this object to close it
            self.close()
            raise

    def wait(self, seconds: float = LONGEST_SECONDS) -> CompiledKernels | None:
        """Wait until the kernels of the first steps are there, or none come; return what was compiled, if that is all.

        The worker goes on meanwhile, until it is done or closed.
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
        """End the worker and all that compile for it, if they still run."""
        self.is_compiling = False
        self._held.close()


def compile_for_training(config: ExperimentConfig, candidate: Candidate, device: torch.device) -> KernelWorker:
    """Return the worker that compiles for a training on this machine, which the first of its processes starts.

    Layers in stages run torch's kernels: those of the loss, which are ours, are compiled in the time that such a step
    takes to be followed. What the strategy ``auto`` chooses at the first batch is not known yet.

    Parameters
    ----------
    config : ExperimentConfig
        Of the training, as it was given.
    candidate : Candidate
        How its processes and devices share a step.
    device : torch.device
        Of this process.
    """
    if device.type != "cuda" or not can_compile() or find_local_rank() != 0:
        return KernelWorker()
    try:
        return KernelWorker(make_order(config, candidate, OwnGpu.find(device), count_processes()))
    except OSError as fault:  # a cache that may not be looked into
        logger.info("kernels are not compiled beforehand: %s", fault)
        return KernelWorker()


def make_order(config: ExperimentConfig, candidate: Candidate, gpu: OwnGpu, processes: int) -> dict[str, Any] | None:
    """Return what the worker of a job is to do; None where there is nothing, or nobody could follow the step."""
    is_alone = processes == 1
    in_turns = candidate.data * (1 if is_alone else candidate.spatial) != processes  # one computes several replicas
    if candidate.pipeline > 1 or in_turns or (is_alone and config.parallel.model_strategy == "auto"):
        return None
    note = note_path(config, [gpu.name], processes)
    if note.exists():
        return None
    return {
        "config": config,
        "gpu": asdict(gpu),
        "candidate": vars(candidate),
        "one_process": is_alone and candidate.spatial > 1,
        "note": str(note),
    }


def serve_kernels(compile_each: Callable[..., CompiledKernels] = compile_kernels) -> None:
    """Be the worker: compile what the training that started this process orders, note it, and say so."""
    channel = open_channel()
    order = channel.receive()
    if order is None:  # the training has ended
        return

    def say_ready() -> None:
        """Let the training go on, and have the rest compiled where that leaves it a core."""
        own = os.getpriority(os.PRIO_PROCESS, 0)
        os.setpriority(os.PRIO_PGRP, 0, max(own, BESIDE_TRAINING))  # this worker, and those that compile for it
        channel.send({"ready": True})

    gpu = OwnGpu(**{**order["gpu"], "capability": tuple(order["gpu"]["capability"])})
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
    except Exception as fault:  # whatever a network of the user's own runs into; its training will tell
        kind = "" if isinstance(fault, VolsegError) else f"{type(fault).__name__}: "
        compiled = CompiledKernels(problem=kind + str(fault).strip().partition("\n")[0])
    channel.send(asdict(compiled))
