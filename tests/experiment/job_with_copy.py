"""A process of a training on the CPU that takes it for GPUs: ``job_with_copy.py MODE FOLDER train CONFIG ...``.

The first process of the job has a copy, which compiles nothing and takes a second for it. Every process writes into the
folder whether all was compiled when it built its network.
"""

import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from volseg.cli import main
from volseg.estimate.allocator import MemoryUse
from volseg.estimate.candidate import Candidate, Forecast
from volseg.experiment import compiling_beside, mesh_choice, training
from volseg.experiment.compiled_kernels import CompiledKernels
from volseg.experiment.plan_process import Answer, Gpus
from volseg.experiment.reading import Follower
from volseg.parallel.devices import find_local_rank, find_rank, has_process_group

GPU = compiling_beside._Gpu("NVIDIA H200", 132, 140 * 2**30, (9, 0))
GPUS = Gpus(name=GPU.name, memory=139 * 2**30, count=2)

build_model, prepare = training.build_model, Follower.prepare
mode, folder = "", Path()


def compile_kernels(*given: Any, candidate: Candidate, ready: Any, **more: Any) -> CompiledKernels:
    """Be the copy."""
    del given, more
    (folder / "copy").write_text(str(os.getpid()), encoding="utf-8")
    if mode == "copy is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600 if mode in ("copy hangs", "leader is killed", "leader fails") else 1)
    (folder / "compiled").write_text(f"{candidate.data} {candidate.spatial}", encoding="utf-8")
    ready()
    return CompiledKernels(kernels=1)


def build_and_tell(*given: Any, **more: Any) -> Any:
    """Build the network, and say what was there."""
    (folder / f"built_{find_rank()}").write_text(str((folder / "compiled").exists()), encoding="utf-8")
    return build_model(*given, **more)


def prepare_or_end(*given: Any, **more: Any) -> Any:
    """Read the cases, if this process lives."""
    prepared = prepare(*given, **more)
    if find_rank() == 0 and mode in ("leader is killed", "leader fails"):
        while not (folder / "copy").exists():
            time.sleep(0.01)
        if mode == "leader fails":
            raise KeyError("something of ours")
        os.kill(os.getpid(), signal.SIGKILL)
    return prepared


def forecast(*asked: Any) -> Answer:
    """Say what slabs and replicas take."""
    del asked
    ways = ((Candidate(data=2), 0.2), (Candidate(spatial=2), 0.1))
    use = MemoryUse(used=1, reserved=1, outside=0, peak_in="", reserved_by_steps=1)
    return Answer(forecasts=tuple(Forecast(candidate=way, memory=use, seconds=seconds) for way, seconds in ways))


def plan_beside(*given: Any, **more: Any) -> None:
    """Refuse to forecast what the copy forecasts."""
    raise AssertionError(f"another forecast was begun: {given} {more}")


def take_for_gpus() -> None:
    """Put in place of what needs GPUs what does not."""
    compiling_beside._can_begin = lambda config: find_local_rank() == 0 and not has_process_group()
    compiling_beside.ask_copy = lambda function, device: GPU
    compiling_beside.find_note = lambda *given: folder / "note.json"
    compiling_beside.compile_kernels = compile_kernels
    compiling_beside.ask_here = forecast
    mesh_choice.run_plan = plan_beside
    mesh_choice.Gpus = SimpleNamespace(find=lambda device, count: GPUS)  # type: ignore[assignment,misc]
    training.build_model = build_and_tell
    Follower.prepare = prepare_or_end  # type: ignore[method-assign]
    if mode == "copy hangs":
        compiling_beside.CompilingBeside.wait.__defaults__ = (1.0,)


if __name__ == "__main__":
    mode, folder = sys.argv[1], Path(sys.argv[2])
    sys.argv = ["volseg", *sys.argv[3:]]
    take_for_gpus()
    main()
