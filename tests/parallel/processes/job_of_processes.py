"""The processes of a job whose start and end is tested: ``job_of_processes.py MODE FOLDER``."""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from volseg.launched import read_launch
from volseg.parallel.devices import count_restarts, get_process_rank
from volseg.parallel.processes.first_error import begin_all_anew
from volseg.parallel.processes.group import get_supervision, leave_processes, start_group
from volseg.parallel.processes.progress import report_progress


def put_down(folder: str, name: str, value: Any) -> None:
    """Leave a line for the test in a file of this process."""
    with Path(folder, f"{name}.{get_process_rank()}").open("a", encoding="utf-8") as file:
        file.write(json.dumps(value) + "\n")


def add() -> float:
    """Return the number of processes, after all have come here."""
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


def fail(mode: str, folder: str) -> None:
    """Do what the last process does in a mode."""
    if mode == "raise":
        raise KeyError("something of ours")
    if mode == "kill" or (mode == "again" and count_restarts() < 2):
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "anew":
        begin_anew_once(folder)
    if mode == "hang":
        report_progress("train", 3, 17)
        time.sleep(600)
    if mode == "read":
        for case in range(8):
            report_progress("read", item=case)
            time.sleep(1)


def begin_anew_once(folder: str) -> None:
    """Begin anew with all others, as after a failure that the job survives."""
    supervision = get_supervision()
    if count_restarts() == 0 and supervision is not None:
        os.set_inheritable(os.open(folder, os.O_RDONLY), True)  # as a driver's file may be
        begin_all_anew("no memory", supervision, {"TOLD": str(get_process_rank())})


def is_open(folder: str) -> bool:
    """Tell whether this process has the folder open, which only the one before it has opened."""
    return any(Path("/proc/self/fd", name).resolve() == Path(folder).resolve() for name in os.listdir("/proc/self/fd"))


def name_threads() -> list[str]:
    """Return the names of the threads of this process, without those that end while they are listed."""
    names = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            names.append(Path(f"/proc/self/task/{task}/comm").read_text(encoding="utf-8").strip())
    return names


SHORT = ("hang", "read", "stay")
"""Modes in which the timeout matters."""


def wait_for_imports(folder: str) -> None:
    """Wait until every process has imported torch: on a busy machine they differ by more than a short timeout."""
    launch = read_launch()
    assert launch is not None
    Path(folder, f"imported.{launch.rank}").touch()
    while len(list(Path(folder).glob("imported.*"))) < launch.world_size:
        time.sleep(0.05)


def main(mode: str, folder: str) -> None:
    """Meet the others, do what is asked for, and leave."""
    wait_for_imports(folder)
    start_group(timeout=float(os.environ.get("TIMEOUT", "4" if mode in SHORT else "120")))
    put_down(folder, "start", [os.getpid(), os.getppid(), count_restarts(), add()])
    put_down(folder, "told", [os.environ.get("TOLD"), is_open(folder)])
    if mode == "all anew":
        begin_anew_once(folder)
    if get_process_rank() == dist.get_world_size() - 1:
        fail(mode, folder)
    while mode == "stay":
        report_progress("train")
        add()
        time.sleep(0.1)
    add()
    leave_processes()
    put_down(folder, "threads", name_threads())


if __name__ == "__main__":
    main(*sys.argv[1:])
