"""The kernels of a training, compiled before it needs them: by a copy of its process, while that reads the cases.

The copy follows the training step on a GPU like the one that is there (`following`) and has every kernel that the step
asks for compiled (`volseg.device.compiling`) into Triton's cache, where the step finds it. The training goes on when
the kernels of its first steps are there; those of its other sizes and of its validation follow beside it. What was
compiled is noted beside the kernels: a training like this one starts no copy again. Nothing depends on it: what was not
compiled, Triton compiles when it is run.

An image, say, is filled where no GPU is (`compile_beforehand`): the note is the one that a training looks for.
"""

import hashlib
import json
import logging
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import nn

import volseg
from volseg.config.schema import ExperimentConfig
from volseg.device.compiling import Compiling, can_compile, starts_by_compiler
from volseg.device.gpus import uses_gpus
from volseg.device.pretended import GpuLike
from volseg.device.triton_kernels import hearing_calls
from volseg.errors import ParallelError, VolsegError
from volseg.experiment.data_facts import DataFacts, find_facts
from volseg.experiment.forecasting import at_size, describe_training
from volseg.experiment.kernels import explain_slowness
from volseg.files import replacing
from volseg.forecast.candidate import Candidate
from volseg.lifetime import end_with_parent
from volseg.parallel.candidates.beside import ask_copy, holding_signals_back
from volseg.parallel.candidates.running import follow_candidate
from volseg.parallel.candidates.work import Work
from volseg.parallel.devices import count_gpus, has_process_group, is_launched
from volseg.parallel.fast_kernels import CAPABILITY
from volseg.parallel.progress import report_progress
from volseg.version import __version__
from volseg.workflow.precision import choose_dtype

__all__ = ["CompiledKernels", "CompilingBeside", "compile_beforehand", "compile_kernels"]

logger = logging.getLogger(__name__)

LONGEST_SECONDS = 30.0
"""That a training waits for its kernels; then it compiles what it needs itself, in some 7 s for Task04 on an H200."""

BESIDE_TRAINING = 10
"""Niceness of what compiles while the training runs."""

READY = "ready"
"""What a copy says when the kernels of the first steps are there."""

KILLED = "the process that compiled them was killed"

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
    processes: int | None = None,
    runs_here: bool = False,
    facts: DataFacts | None = None,
    ready: Callable[[], object] | None = None,
) -> CompiledKernels:
    """Compile what the training step of a config runs on one GPU, into Triton's cache; needs no GPU.

    Parameters
    ----------
    config : ExperimentConfig
        Of the training.
    gpu : GpuLike
        What it is to run on.
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
    candidate = Candidate(kernels="fast" if is_fast else "torch")
    # One that is killed would be waited for, for ever, to ask for more.
    bind = partial(end_with_parent, os.getpid())
    compiling = Compiling(gpu.capability, processes or cores, runs_here=runs_here, begin=bind)
    first: list[int] = []
    with compiling, hearing_calls(compiling.ask):
        for size in config.patch.sizes:
            work = at_size(described, size).work
            follow_candidate(_counting(work, lambda: first.append(compiling.num_asked)), candidate, gpu)
            first.append(compiling.num_asked)
        if ready is not None:
            compiling.wait(first[0])
            ready()
        compiled = compiling.compiled
    problems = [f"{each.name}: {each.problem}" for each in compiled if each.problem]
    return CompiledKernels(
        kernels=len(compiled) - len(problems), seconds=time.perf_counter() - begin, problem="; ".join(problems[:1])
    )


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
    if has_driver or not starts_by_compiler():  # else a training's copy has those functions made, and notes it
        _write_note(_find_note(config, [gpu.name]), config, gpu, compiled)
    return compiled


@dataclass(frozen=True, slots=True)
class _Gpu:
    """What a kind of GPU is asked for, as the driver says it."""

    name: str
    processors: int
    memory: int
    capability: tuple[int, int]


def _ask_gpu() -> _Gpu:
    found = torch.cuda.get_device_properties(0)
    return _Gpu(found.name, found.multi_processor_count, found.total_memory, (found.major, found.minor))


class CompilingBeside:
    """A copy of this process that compiles what a training will run.

    Parameters
    ----------
    config : ExperimentConfig
        Of the training.
    """

    def __init__(self, config: ExperimentConfig) -> None:
        self._process: multiprocessing.process.BaseProcess | None = None
        self._answer: CompiledKernels | None = None
        self._is_ready = False
        if not _can_begin(config):
            return
        try:
            if not (note := _find_note(config, _read_gpus())).exists():
                self._begin(config, note)
        except OSError as fault:  # a cache that may not be looked into, or no more processes are allowed
            logger.info("kernels are not compiled beforehand: %s", fault)
        except BaseException:  # Ctrl-C in between: nobody has this object to close it
            self.close()
            raise

    def _begin(self, config: ExperimentConfig, note: Path) -> None:
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_compile_in_copy, args=(config, note, sender, os.getpid()), name="kernels")
        with sender, holding_signals_back(), warnings.catch_warnings():
            # Python warns of threads, which a copy lacks; those are of libraries, and a copy that uses one thread needs
            # none of them.
            warnings.filterwarnings("ignore", ".*fork.*", DeprecationWarning)
            process.start()
            self._receiver, self._process = receiver, process

    @property
    def is_compiling(self) -> bool:
        """Whether there is something to wait for."""
        return self._process is not None and self._answer is None and not self._is_ready

    def wait(self, seconds: float = LONGEST_SECONDS) -> CompiledKernels | None:
        """Wait until the kernels of the first steps are there, or none come; return what was compiled, if that is all.

        The copy goes on meanwhile, until it is done or closed.
        """
        end = time.monotonic() + seconds
        while self.is_compiling:
            report_progress("compiling kernels")
            if self._receiver.poll(0.2):
                self._hear()
            # Those that compile for it have its end of the pipe too, which then does not end.
            elif self._process is not None and not self._process.is_alive() and not self._receiver.poll():
                self._answer = CompiledKernels(problem=KILLED)
            elif time.monotonic() > end:
                self._answer = CompiledKernels(problem=f"they took longer than {seconds:.0f} s")
        if self._answer is not None:
            self.close()
        if self._answer is not None and self._answer.problem:
            logger.info("kernels were not compiled beforehand: %s", self._answer.problem)
        return self._answer

    def _hear(self) -> None:
        """Take what the copy says: that a training can begin, or what came of all."""
        try:
            said = self._receiver.recv()
        except EOFError:
            said = asdict(CompiledKernels(problem=KILLED))
        if said == READY:
            self._is_ready = True
        else:
            self._answer = CompiledKernels(**said)

    def close(self) -> None:
        """End the copy and all that compile for it, if they still run."""
        if self._process is None:
            return
        assert self._process.pid is not None, "it was started"
        with suppress(ProcessLookupError, PermissionError):  # all have ended, or it has no group of its own yet
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self._receiver.close()
        self._process = None


def _can_begin(config: ExperimentConfig) -> bool:
    """Tell whether a copy of this process can compile for this training: CUDA does not survive a fork."""
    return (
        config.device != "cpu"
        and can_compile()
        and config.parallel.model_strategy == "none"
        and (config.parallel.data or 1) == 1
        and "fork" in multiprocessing.get_all_start_methods()
        and not (uses_gpus() or has_process_group() or is_launched())
        and count_gpus() > 0
    )


def _find_note(config: ExperimentConfig, gpus: list[str]) -> Path:
    """Return the file that says that the kernels of such a training, on GPUs of these names, are in the cache."""
    from triton import __version__ as triton_version  # Triton may not be installed
    from triton import knobs

    told = {
        "config": config.model_dump(mode="json", exclude=OTHER),
        "versions": [__version__, torch.__version__, triton_version, _digest_sources()],
        "gpus": sorted(set(gpus)),
    }
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
    return Path(knobs.cache.dir) / f"volseg_{digest[:32]}.json"


def _write_note(note: Path, config: ExperimentConfig, gpu: GpuLike, compiled: CompiledKernels) -> None:
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


def _read_gpus() -> list[str]:
    """Return the names of this machine's GPUs as its driver tells them in files, without CUDA; none where it does not.

    Homes, and caches in them, may be shared by machines with other GPUs.
    """
    files = Path("/proc/driver/nvidia/gpus").glob("*/information")
    lines = (line for file in files for line in file.read_text(encoding="utf-8", errors="replace").splitlines())
    return [line.partition(":")[2].strip() for line in lines if line.startswith("Model")]


def _compile_in_copy(config: ExperimentConfig, note: Path, sender: Connection, training: int) -> None:
    """Be the copy: compile, note it, and say so."""
    os.setsid()  # those that compile end with it, and a terminal's Ctrl-C is for the training
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    end_with_parent(training)  # however that ends: one that is killed ends nobody
    torch.set_num_threads(1)
    logging.getLogger("volseg").setLevel(logging.ERROR)
    try:
        gpu = ask_copy(_ask_gpu)
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # autograd would begin a thread for each that is visible
        compiled = compile_kernels(config, gpu, runs_here=True, ready=partial(_say_ready, sender))
        if not compiled.problem:
            _write_note(note, config, gpu, compiled)
    except VolsegError as fault:
        compiled = CompiledKernels(problem=str(fault).partition("\n")[0])
    except Exception as fault:  # whatever a network of the user's own runs into; its training will tell
        compiled = CompiledKernels(problem=f"{type(fault).__name__}: {str(fault).strip().partition(chr(10))[0]}")
    with suppress(BrokenPipeError):  # a training that has what it needs does not listen to the end
        sender.send(asdict(compiled))


def _say_ready(sender: Connection) -> None:
    """Let the training go on, and have the rest compiled where that leaves it a core."""
    own = os.getpriority(os.PRIO_PROCESS, 0)
    os.setpriority(os.PRIO_PGRP, 0, max(own, BESIDE_TRAINING))  # the copy, and those that compile for it
    sender.send(READY)
