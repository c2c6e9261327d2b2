"""A copy of a training's process that compiles its kernels, while that meets the others and reads the cases.

It is made once on each machine of a job, by the process that is first there, before that begins to use CUDA or joins
the others. The training goes on when the kernels of its first steps are there; those of its other sizes and of its
validation follow beside it. A training like one whose kernels are noted starts no copy.

What is compiled is what the job's candidate runs, which the config says. Where it leaves open who computes what, the
copy forecasts that first, as `choose_by_forecast` would: the leader takes its copy's answer if that is to the same
question, and tells the others. Copies on other machines forecast for themselves what they compile for, and decide
nothing. Nothing depends on a copy: who hears nothing of it forecasts by `run_plan`, and compiles in the step.
"""

import logging
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from volseg.config.schema import ExperimentConfig
from volseg.device.compiling import can_compile
from volseg.errors import VolsegError
from volseg.estimate.candidate import Candidate
from volseg.experiment import plan_process
from volseg.experiment.alternatives import find_candidate
from volseg.experiment.compiled_kernels import CompiledKernels, compile_kernels, find_note, write_note
from volseg.experiment.data_facts import find_facts
from volseg.experiment.mesh_choice import ask_here, is_mesh_open, leave_out_stages, take_fastest
from volseg.experiment.network_plan import plan_for_spacing
from volseg.experiment.placed_network import count_devices
from volseg.experiment.plan_process import Answer, Gpus
from volseg.launched import OF_JOB
from volseg.lifetime import bind_copy
from volseg.parallel.devices import (
    count_gpus,
    count_launched,
    find_local_rank,
    find_own_device,
    has_process_group,
    is_main_process,
    uses_gpus,
)
from volseg.parallel.forking import ask_copy, holding_signals_back
from volseg.parallel.progress import report_progress

__all__ = ["CompilingBeside"]

logger = logging.getLogger(__name__)

LONGEST_SECONDS = 30.0
"""That a training waits for its kernels; then it compiles what it needs itself, in some 7 s for Task04 on an H200."""

BESIDE_TRAINING = 10
"""Niceness of what compiles while the training runs."""

LEFT = 0.95
"""Of a GPU's memory, that a copy takes CUDA and its libraries to leave to a training."""

READY = "ready"
"""What a copy says when the kernels of the first steps are there."""

KILLED = "the process that compiled them was killed"


@dataclass(frozen=True, kw_only=True)
class _Forecast:
    """What a copy says of who should compute what."""

    asked: str
    """The config that was forecast, as JSON."""
    gpus: Gpus
    """On which."""
    answer: Answer

    def answers(self, asked: ExperimentConfig, gpus: Gpus) -> bool:
        """Tell whether that is asked: what fits less memory than there is fits, and was looked at with care."""
        is_same = self.asked == asked.model_dump_json() and (self.gpus.name, self.gpus.count) == (gpus.name, gpus.count)
        return is_same and self.gpus.memory <= gpus.memory


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """What a copy is made for."""

    config: ExperimentConfig
    processes: int
    """Of the job."""
    candidate: Candidate | None
    """What they do; None where that is forecast."""
    device: torch.device
    """Of the process that is copied."""
    note: Path
    is_compiled: bool
    """Whether the kernels are there already."""


@dataclass(frozen=True, slots=True)
class _Gpu:
    """What a kind of GPU is asked for, as the driver says it."""

    name: str
    processors: int
    memory: int
    capability: tuple[int, int]


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
        self._forecast: _Forecast | None = None
        self._is_ready = False
        if not _can_begin(config):
            return
        try:
            if (wanted := _find_wanted(config)) is not None:
                self._begin(wanted)
        except (OSError, VolsegError) as fault:
            # A cache that may not be looked into, no more processes, or a config that the training refuses.
            logger.info("kernels are not compiled beforehand: %s", fault)
        except BaseException:  # Ctrl-C in between: nobody has this object to close it
            self.close()
            raise

    def _begin(self, wanted: _Wanted) -> None:
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_be_copy, args=(wanted, sender, os.getpid()), name="kernels")
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
        if not self._hear_until(lambda: not self.is_compiling, seconds, "compiling kernels"):
            self._answer = CompiledKernels(problem=f"they took longer than {seconds:.0f} s")
        if self._answer is not None:
            self.close()
        if self._answer is not None and self._answer.problem:
            logger.info("kernels were not compiled beforehand: %s", self._answer.problem)
        return self._answer

    def forecast(self, asked: ExperimentConfig, gpus: Gpus) -> Answer | None:
        """Wait for the forecast of a config on some GPUs; None where no copy makes it, or it was ended."""
        seconds = plan_process.LONGEST_SECONDS
        if not self._hear_until(lambda: self._forecast is not None or not self.is_compiling, seconds, "forecast"):
            self._answer = CompiledKernels(problem="what to compile was not known in time")
            self.close()
            return Answer(problem=f"it was not there after {seconds:.0f} s")
        found = self._forecast
        return found.answer if found is not None and found.answers(asked, gpus) else None

    def _hear_until(self, is_over: Callable[[], bool], seconds: float, doing: str) -> bool:
        """Take what the copy says until that is over; return whether it came to that in so many seconds."""
        end = time.monotonic() + seconds
        while not is_over():
            report_progress(doing)
            if self._receiver.poll(0.2):
                self._hear()
            # Those that compile for it have its end of the pipe too, which then does not end.
            elif self._process is not None and not self._process.is_alive() and not self._receiver.poll():
                self._answer = CompiledKernels(problem=KILLED)
            elif time.monotonic() > end:
                return False
        return True

    def _hear(self) -> None:
        """Take what the copy says: a forecast, that a training can begin, or what came of all."""
        try:
            said = self._receiver.recv()
        except EOFError:
            said = CompiledKernels(problem=KILLED)
        if isinstance(said, _Forecast):
            self._forecast = said
        elif said == READY:
            self._is_ready = True
        else:
            self._answer = said

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
    """Tell whether a copy of this process can compile for this training, as that of no other process here does.

    CUDA does not survive a fork, and neither do the threads of a process group.
    """
    return (
        config.device != "cpu"
        and can_compile()
        and "fork" in multiprocessing.get_all_start_methods()
        and not (uses_gpus() or has_process_group())
        and find_local_rank() == 0
        and count_gpus() > 0
    )


def _find_wanted(config: ExperimentConfig) -> _Wanted | None:
    """Return what a copy is to do; None where there is nothing, or nobody could follow what the training does.

    Layers in stages run torch's kernels: the loss's, which are ours, are compiled in the time that such a step takes to
    be followed.

    Raises
    ------
    ConfigError
        If so many processes cannot run the config.
    """
    count, device = count_launched(), find_own_device()
    plan, is_open = config.mesh(count), is_mesh_open(config, count)
    is_spread = plan.num_processes == plan.data * plan.spatial  # else one computes for several, one after the other
    strategy = config.parallel.model_strategy
    if not (is_open or is_spread) or strategy == "pipeline" or (strategy == "auto" and count == 1):
        return None
    num_devices = count_devices(config, device) if count == 1 else 1
    candidate = None if is_open else find_candidate(config, plan, num_devices)
    note = find_note(config, _read_gpus(), count)
    is_compiled = note.exists()
    if is_compiled and not (is_open and is_main_process()):
        return None
    return _Wanted(
        config=config, processes=count, candidate=candidate, device=device, note=note, is_compiled=is_compiled
    )


def _read_gpus() -> list[str]:
    """Return the names of this machine's GPUs as its driver tells them in files, without CUDA; none where it does not.

    Homes, and caches in them, may be shared by machines with other GPUs.
    """
    files = Path("/proc/driver/nvidia/gpus").glob("*/information")
    lines = (line for file in files for line in file.read_text(encoding="utf-8", errors="replace").splitlines())
    return [line.partition(":")[2].strip() for line in lines if line.startswith("Model")]


def _be_copy(wanted: _Wanted, sender: Connection, training: int) -> None:
    """Be the copy: forecast what is open, compile, note it, and say so."""
    os.setsid()  # those that compile end with it, and a terminal's Ctrl-C is for the training
    bind_copy(training)  # however that ends: one that is killed ends nobody
    for name in OF_JOB:  # it is none of the job's processes
        os.environ.pop(name, None)
    torch.set_num_threads(1)
    logging.getLogger("volseg").setLevel(logging.ERROR)
    try:
        said = _compile(wanted, sender)
    except VolsegError as fault:
        said = CompiledKernels(problem=str(fault).partition("\n")[0])
    except Exception as fault:  # whatever a network of the user's own runs into; its training will tell
        said = CompiledKernels(problem=f"{type(fault).__name__}: {str(fault).strip().partition(chr(10))[0]}")
    with suppress(BrokenPipeError):  # a training that has what it needs does not listen to the end
        sender.send(said)


def _compile(wanted: _Wanted, sender: Connection) -> CompiledKernels:
    """Do what a copy is made for."""
    config, candidate = wanted.config, wanted.candidate
    gpu = ask_copy(_ask_gpu, wanted.device)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # autograd would begin a thread for each that is visible
    facts = find_facts(config)
    if candidate is None:
        gpus = Gpus(name=gpu.name, memory=int(LEFT * gpu.memory), count=wanted.processes)
        asked = leave_out_stages(plan_for_spacing(config, facts.spacing).complete(config))
        answer = ask_here(asked, gpus)
        sender.send(_Forecast(asked=asked.model_dump_json(), gpus=gpus, answer=answer))
        chosen = take_fastest(answer, gpus)
        # Where nothing is chosen, what the config prefers is tried, and mostly taken.
        tried = find_candidate(config, config.mesh(wanted.processes), 1)
        candidate = tried if chosen is None else Candidate(**chosen["candidate"])
    if wanted.is_compiled:
        return CompiledKernels()
    compiled = compile_kernels(
        config,
        gpu,
        candidate=candidate,
        one_process=wanted.processes == 1 and candidate.spatial > 1,
        runs_here=True,
        facts=facts,
        ready=partial(_say_ready, sender),
    )
    if not compiled.problem:
        write_note(wanted.note, config, gpu, compiled)
    return compiled


def _ask_gpu(device: torch.device) -> _Gpu:
    """Return what the GPU is, and not what is free of it: CUDA would make a context, and a GPU may admit one alone."""
    found = torch.cuda.get_device_properties(device)
    return _Gpu(found.name, found.multi_processor_count, found.total_memory, (found.major, found.minor))


def _say_ready(sender: Connection) -> None:
    """Let the training go on, and have the rest compiled where that leaves it a core."""
    own = os.getpriority(os.PRIO_PROCESS, 0)
    os.setpriority(os.PRIO_PGRP, 0, max(own, BESIDE_TRAINING))  # the copy, and those that compile for it
    sender.send(READY)
