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
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

import volseg
from volseg.config.schema import ExperimentConfig
from volseg.device.compiling import Compiling, starts_by_compiler
from volseg.device.fake_gpu import GpuLike
from volseg.device.gpus import host_values, uses_gpus
from volseg.device.triton_kernels import hearing_calls
from volseg.errors import ParallelError
from volseg.estimate.candidate import Candidate
from volseg.estimate.candidate_trace import trace_candidate
from volseg.estimate.tracing import tracing
from volseg.estimate.work import Work
from volseg.experiment.kernels import explain_slowness
from volseg.experiment.network_plan import DataFacts, find_facts
from volseg.experiment.training_work import at_size, describe_training
from volseg.files import replacing
from volseg.lifetime import bind_copy
from volseg.parallel.devices import count_gpus
from volseg.parallel.fast_kernels import CAPABILITY, FastKernels
from volseg.version import __version__
from volseg.workflow.precision import Precision, choose_dtype

__all__ = [
    "CompiledKernels",
    "compile_beforehand",
    "compile_kernels",
    "note_path",
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
