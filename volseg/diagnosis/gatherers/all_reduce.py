"""A sum over processes, one for each GPU by NCCL, or two by gloo where there is none, as a training makes it.

``python -m volseg.diagnosis.gatherers.all_reduce RANK COUNT FILE`` is one of the processes, which meet by the file.
"""

import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from volseg.commands import run_module
from volseg.diagnosis.facts import AllReduceFacts

__all__ = ["gather"]

SIZES_BYTES = {"nccl": 64 * 2**20, "gloo": 2**20}
REPEATS = 5
ANSWER = "volseg-all-reduce"
"""Begins the line on which the first process answers."""

LIMIT = timedelta(seconds=90)
"""For the processes to find each other; whoever started this ends it later than that."""


def gather() -> AllReduceFacts:
    """Start the processes, and return what the first of them measured.

    Raises
    ------
    RuntimeError
        With the last words of the process that failed first.
    """
    count = torch.cuda.device_count() or 2
    backend = "nccl" if torch.cuda.device_count() else "gloo"
    # What a launcher told this process is of another job; and NCCL tells why it fails only where it is asked to.
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment.setdefault("NCCL_DEBUG", "WARN")
    environment.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="volseg_doctor_") as folder:
        processes = [
            subprocess.Popen(  # noqa: S603 - our own command
                run_module(__spec__.name, str(rank), str(count), str(Path(folder) / "meeting")),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",
                env=environment,
            )
            for rank in range(count)
        ]
        said = [process.communicate()[0] for process in processes]
    failed = [text for process, text in zip(processes, said, strict=True) if process.returncode]
    if failed:
        raise RuntimeError(_find_reason(failed))
    # NCCL and torch write to the same stream, before it and after it.
    seconds, is_right = next(line for line in said[0].splitlines() if line.startswith(ANSWER)).split()[1:]
    return AllReduceFacts(
        backend=backend,
        processes=count,
        size_bytes=SIZES_BYTES[backend],
        seconds=float(seconds),
        is_right=is_right == "True",
    )


def _find_reason(failed: list[str]) -> str:
    """Return what tells most: NCCL's own warning, else the last line of the first that failed."""
    warned = [line.partition("NCCL WARN ")[2] for text in failed for line in text.splitlines() if "NCCL WARN " in line]
    lines = [line.strip() for line in failed[0].splitlines() if line.strip()]
    return " | ".join([*warned[:1], *lines[-1:]]) or "a process ended without a word"


def _sum_with_others(rank: int, count: int, meeting: str) -> None:
    """Add up with the other processes, and print seconds and whether the sums were right on all of them."""
    has_gpus = torch.cuda.device_count() > 0
    backend = "nccl" if has_gpus else "gloo"
    device = torch.device("cuda", rank) if has_gpus else torch.device("cpu")
    if has_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=count, timeout=LIMIT)
    values = torch.empty(SIZES_BYTES[backend] // 4, device=device)
    wrong = torch.zeros(1, device=device)
    begun = 0.0
    for repeat in range(REPEATS + 1):
        if repeat == 1:  # the first one sets the ways up
            begun = _wait(has_gpus)
        values.fill_(rank + 1.0)
        dist.all_reduce(values)
        wrong += (values != count * (count + 1) / 2).any()
    seconds = (_wait(has_gpus) - begun) / REPEATS
    dist.all_reduce(wrong)
    is_right = not wrong.item()
    dist.destroy_process_group()
    sys.stdout.write(f"\n{ANSWER} {seconds} {is_right}\n")


def _wait(has_gpus: bool) -> float:
    if has_gpus:
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    _sum_with_others(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
