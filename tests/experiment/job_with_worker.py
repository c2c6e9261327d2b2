"""A process of a training on the CPU that takes it for GPUs: ``job_with_worker.py MODE FOLDER train CONFIG ...``.

The first process of the job has a worker, which compiles nothing and takes a second for it. Every process writes into
the folder whether all was compiled when it built its network.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from volseg.cli import main
from volseg.config.schema import ExperimentConfig
from volseg.estimate.candidate import Candidate
from volseg.experiment import training
from volseg.experiment.placement import compiled_kernels
from volseg.experiment.placement.compiled_kernels import (
    CompiledKernels,
    KernelWorker,
    OwnGpu,
    make_order,
    serve_kernels,
)
from volseg.experiment.placement.mesh_resolution import CaseReading
from volseg.lifetime import end_with_launcher
from volseg.parallel.devices import count_processes, get_process_rank, read_local_rank

GPU = OwnGpu(name="NVIDIA H200", processors=132, memory=140 * 2**30, capability=(9, 0))

build_model, prepare = training.build_model, CaseReading.prepare
mode, folder = "", Path()


def compile_kernels(*given: Any, ready: Any, **more: Any) -> CompiledKernels:
    """Be the worker."""
    del given, more
    (folder / "partial").write_text(str(os.getpid()), encoding="utf-8")
    (folder / "partial").replace(folder / "worker")
    if mode == "worker is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600 if mode in ("worker hangs", "leader is killed") else 1)
    (folder / "compiled").touch()
    ready()
    return CompiledKernels(kernels=1)


def compile_for_training(config: ExperimentConfig, candidate: Candidate, device: Any) -> KernelWorker:
    """Begin the worker, as for a GPU."""
    del device
    if read_local_rank() != 0:
        return KernelWorker()
    order = make_order(config, candidate, GPU, count_processes())
    return KernelWorker(order, [sys.executable, __file__, mode, str(folder)])


def build_and_tell(*given: Any, **more: Any) -> Any:
    """Build the network, and say what was there."""
    (folder / f"built_{get_process_rank()}").write_text(str((folder / "compiled").exists()), encoding="utf-8")
    return build_model(*given, **more)


def prepare_or_end(*given: Any, **more: Any) -> Any:
    """Read the cases, if this process lives."""
    prepared = prepare(*given, **more)
    if get_process_rank() == 0 and mode in ("leader is killed", "worker hangs"):
        while not (folder / "worker").exists():
            time.sleep(0.01)
        if mode == "leader is killed":
            os.kill(os.getpid(), signal.SIGKILL)
    return prepared


def take_for_gpus() -> None:
    """Put in place of what needs GPUs what does not."""
    compiled_kernels.note_path = lambda *given: folder / "note.json"
    training.compile_for_training = compile_for_training
    training.build_model = build_and_tell
    CaseReading.prepare = prepare_or_end  # type: ignore[method-assign]
    KernelWorker.wait.__defaults__ = (1.0 if mode == "worker hangs" else 120.0,)


if __name__ == "__main__":
    mode, folder = sys.argv[1], Path(sys.argv[2])
    if len(sys.argv) == 3:
        end_with_launcher()
        serve_kernels(compile_kernels)
    else:
        sys.argv = ["volseg", *sys.argv[3:]]
        take_for_gpus()
        main()
