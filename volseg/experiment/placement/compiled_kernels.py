"""Compile the kernels of a training before it needs them, on a machine with or without a GPU.

The training step is traced (`tracing`) for a kind of GPU, with the strategy that will run it. Every kernel that it
launches is compiled (`volseg.device.compiling`) into Triton's cache, where the step finds it. A note beside the kernels
lists them. A training starts a worker for this (`kernel_worker`), unless it finds a note. A container image, for
example, is filled before there is a GPU (`compile_beforehand`). This step is optional: Triton compiles missing kernels
at their first launch.
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
from volseg.estimate.candidate import Candidate, Work
from volseg.estimate.candidate_trace import trace_candidate
from volseg.estimate.fake_step.tracing import tracing
from volseg.experiment.network_plan import DataFacts, load_facts
from volseg.experiment.placement.placed_network import explain_slowness
from volseg.experiment.placement.training_work import at_size, describe_training
from volseg.files import replacing
from volseg.lifetime import bind_copy
from volseg.parallel.devices import count_gpus
from volseg.parallel.fast_kernels import CAPABILITY, FastKernels
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
    """Duration."""
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
    one_process : bool
        See `trace_candidate`.
    runs_here : bool
        See `Compiling`.
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
    is_fast = config.training.kernels in ("fast", "measured") or (
        config.training.kernels == "auto" and explain_slowness(config, dtype) is None and gpu.capability >= CAPABILITY
    )
    described = describe_training(config, dtype, load_facts(config) if facts is None else facts)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # Not captured, since tracing a capture takes longer. A capture runs the kernels of the steps before it, except for
    # one that exchanges planes of slabs.
    candidate = replace(candidate or Candidate(), kernels="fast" if is_fast else "torch", recorded=False)
    # A killed process would block further requests forever.
    bind = partial(bind_copy, os.getpid())
    compiling = Compiling(gpu.capability, cores, runs_here=runs_here, begin=bind)
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

    def count_and_validate(model: nn.Module) -> None:
        count()
        validate(model)

    return replace(work, validate=count_and_validate)


def compile_beforehand(
    config: ExperimentConfig, gpu: GpuLike, *, channels: int | None = None, classes: int | None = None
) -> CompiledKernels:
    """Compile the kernels of a training for one GPU of a kind, and write a note, so that such a GPU compiles nothing.

    Needs no GPU. The kernels are in Triton's cache (``TRITON_CACHE_DIR``). The training must use the same versions of
    this package, of torch and of Triton, and the same config except for its data and its name.

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
    facts = load_facts(config, channels, classes)
    has_driver, visible = count_gpus() > 0, os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # autograd would initialise each visible GPU
    try:
        compiled = compile_kernels(config, gpu, runs_here=has_driver, facts=facts)
    finally:
        os.environ.pop("CUDA_VISIBLE_DEVICES")
        if visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible
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
    note.parent.mkdir(parents=True, exist_ok=True)
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
