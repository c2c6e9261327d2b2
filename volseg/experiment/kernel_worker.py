"""Compile the kernels of a training in a worker process while the training reads its cases.

Each machine of a job has one, started by the process with local rank 0 once the job knows how it shares a step. The
training waits for the kernels of its first steps; those of its other sizes and of its validation follow beside it, at
a lower priority. A training like one whose kernels are noted starts no worker. Nothing depends on the worker: the
step compiles what the worker does not bring.

Why not a fork of the training: CUDA and the threads of a process group do not survive one, so that it would have to
be made before a training knows its mesh. A worker imports everything anew, which takes some seconds of another core.
"""

import logging
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from volseg.commands import run_module
from volseg.config.loading import dump_config, load_config
from volseg.config.schema import ExperimentConfig
from volseg.device.compiling import can_compile
from volseg.errors import VolsegError
from volseg.estimate.candidate import Candidate
from volseg.experiment.compiled_kernels import CompiledKernels, compile_kernels, note_path, write_note
from volseg.experiment.own_components import components_arguments
from volseg.parallel.devices import count_processes, find_local_rank
from volseg.parallel.processes.progress import report_progress
from volseg.parallel.processes.workers import WorkerPool, open_channel

__all__ = ["KernelWorker", "OwnGpu", "compile_for_training", "make_order", "serve_kernels"]

logger = logging.getLogger(__name__)

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
