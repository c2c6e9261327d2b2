"""Compile the kernels of a training in a worker process while the training reads its cases.

Each machine of a job has one worker. The process with local rank 0 starts it once the job knows how it shares a step.
The training waits for the kernels of its first steps; those of its other sizes and of its validation follow in
parallel, at a lower priority. A training whose kernels are noted starts no worker. The worker is optional: the step
compiles missing kernels.

Why not a fork of the training: CUDA and the threads of a process group do not survive a fork, so that it would precede
the choice of the mesh. A worker imports everything anew, which takes some seconds of another core.
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
from volseg.experiment.own_components import components_arguments
from volseg.experiment.placement.compiled_kernels import CompiledKernels, compile_kernels, note_path, write_note
from volseg.parallel.devices import count_processes, read_local_rank
from volseg.parallel.processes.progress import report_progress
from volseg.parallel.processes.workers import WorkerPool, open_channel

logger = logging.getLogger(__name__)

LONGEST_SECONDS = 30.0
"""Longest wait of a training for its kernels; then it compiles them itself, in some 7 s for Task04 on an H200."""

BESIDE_TRAINING = 10
"""Niceness of compiling processes during the training."""

NAME = "the process that compiles kernels"

ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@dataclass(frozen=True, kw_only=True)
class OwnGpu:
    """The GPU to compile kernels for."""

    name: str
    processors: int
    memory: int
    capability: tuple[int, int]

    @classmethod
    def find(cls, device: torch.device) -> "OwnGpu":
        """Return the properties of a GPU of this process."""
        found = torch.cuda.get_device_properties(device)
        return cls(
            name=found.name,
            processors=found.multi_processor_count,
            memory=found.total_memory,
            capability=(found.major, found.minor),
        )


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
        self.is_compiling = False
        """Whether there are kernels to wait for."""
        self._held, self._pool = ExitStack(), WorkerPool()
        if order is None:
            return
        try:
            folder = Path(self._held.enter_context(tempfile.TemporaryDirectory(prefix="volseg_kernels_")))
            self._held.callback(self._pool.stop_workers, at_once=True)  # the worker holds no data
            config = dump_config(order["config"].located(), folder / "config.yaml")
            command = command or run_module("volseg", "compile-kernels", *components_arguments())
            # The worker sees no GPU: autograd would start a thread for each.
            worker = self._pool.start(NAME, command, folder / "log", gpu="", talks=True, variables=ONE_THREAD)
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
        return KernelWorker(make_order(config, candidate, OwnGpu.find(device), count_processes()))
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
        "gpu": asdict(gpu),
        "candidate": vars(candidate),
        "one_process": is_alone and candidate.spatial > 1,
        "note": str(note),
    }


def serve_kernels(compile_each: Callable[..., CompiledKernels] = compile_kernels) -> None:
    """Run as the worker: compile the order of the training that started this process, write the note, and report."""
    channel = open_channel()
    order = channel.receive()
    if order is None:  # the training has ended
        return

    def say_ready() -> None:
        """Let the training continue, and compile the rest at a lower priority."""
        own = os.getpriority(os.PRIO_PROCESS, 0)
        os.setpriority(os.PRIO_PGRP, 0, max(own, BESIDE_TRAINING))  # this worker, and its compiling processes
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
    except Exception as fault:  # errors of the user's own network; the training will report them
        kind = "" if isinstance(fault, VolsegError) else f"{type(fault).__name__}: "
        compiled = CompiledKernels(problem=kind + str(fault).strip().partition("\n")[0])
    channel.send(asdict(compiled))
