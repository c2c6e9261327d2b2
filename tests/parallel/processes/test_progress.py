"""Long work of several processes: none waits forever, and all end if one does."""

import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from in_group import in_group

from volseg.errors import DataError, ParallelError
from volseg.parallel.processes.progress import exchange, run_together

pytestmark = pytest.mark.usefixtures("ready_python")

NUMBERS = [0.1, 1 / 3, math.inf, math.nan, 5e-324, "ä", [1, None], {"a": True}]


class StopError(Exception):
    pass


def caught(work, **options):
    """Return the error that ended a process's work, and the seconds until then."""
    begun = time.monotonic()
    try:
        told = run_together(dist.group.WORLD, work, **options)
    except Exception as fault:
        return type(fault).__name__, str(fault), time.monotonic() - begun
    return "told", told, time.monotonic() - begun


def messages_of_different_lengths():
    return exchange([dist.get_rank(), "x" * 100 * dist.get_rank(), *NUMBERS], dist.group.WORLD)


def test_messages_reach_all_with_every_bit():
    for told in in_group(4, messages_of_different_lengths):
        assert list(map(repr, told)) == [repr([rank, "x" * 100 * rank, *NUMBERS]) for rank in range(4)]


def uneven_work():
    rank, heard = dist.get_rank(), []

    def work(rounds):
        for _ in range(3 * rank):
            time.sleep(0.1)
            rounds.count(rank)
            rounds.check()
        return rank

    told = caught(work, num_counts=2, heard=heard.append)
    return told, heard[-1], [thread.name for thread in threading.enumerate()]


def test_who_is_done_first_waits_and_hears_how_far_the_others_are():
    for (how, told, _), heard, threads in in_group(2, uneven_work):
        assert (how, told) == ("told", [0, 1])
        assert heard == [[0, 0], [0, 3]]
        assert "rounds" not in threads


def ended(what):
    """Process 1 fails, or process 0 stops while it waits or hears wrongly; the others have a minute's work."""
    rank, asked = dist.get_rank(), threading.Event()

    def work(rounds):
        if rank == 1 and what in ERRORS:
            raise ERRORS[what]
        if rank == 0 and what == "stop":
            threading.Timer(0.3, asked.set).start()
            return
        for _ in range(600):
            rounds.count()
            time.sleep(0.1)
            rounds.check()

    def hear(counts):
        if what == "listener" and rank == 0 and counts[1][0]:
            raise OSError("the bar's file is full")

    def poll():
        if asked.is_set():
            raise StopError("asked to")

    return caught(work, heard=hear, stops=StopError, poll=poll)


ERRORS = {"ours": DataError("case 3: is empty"), "other": OSError("no such disk")}
OURS, FULL, DISK = ("DataError", "case 3: is empty"), "the bar's file is full", "no such disk"
STOPPED = "StopError", "process 0 stopped"


def follow(rank, text):
    return "ParallelError", f"process {rank} failed, so this process stops too: OSError: {text}"


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("ours", [OURS, OURS, OURS]),
        ("other", [follow(1, DISK), ("OSError", DISK), follow(1, DISK)]),
        ("stop", [STOPPED, STOPPED, STOPPED]),
        ("listener", [("OSError", FULL), follow(0, FULL), follow(0, FULL)]),
    ],
)
def test_what_ends_one_ends_all_within_seconds(what, expected):
    found = in_group(3, ended, what)
    assert [(kind, text) for kind, text, _ in found] == expected
    assert all(seconds < 10 for *_, seconds in found)


def test_one_process_needs_no_group():
    heard = []

    def work(rounds):
        rounds.count()
        rounds.check()
        return {1: (2, math.nan)}

    assert repr(run_together(None, work, heard=heard.append)) == "[{'1': [2, nan]}]"
    assert heard == [[[1]]]
    with pytest.raises(TypeError, match="not JSON serializable"):
        run_together(None, lambda rounds: object())


def die_or_wait(meeting):
    """Run one of two processes, the second of which SIGKILL ends during its work."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)

    def work(rounds):
        for done in range(600):
            time.sleep(0.1)
            rounds.check()
            if rank == 1 and done == 3:
                os.kill(os.getpid(), signal.SIGKILL)

    try:
        run_together(dist.group.WORLD, work)
    except ParallelError as error:
        sys.stdout.buffer.write(str(error).encode())  # as UTF-8 wherever this runs: gloo's words end in an emoji
        sys.stdout.buffer.flush()
        os._exit(3)


def test_the_others_hear_of_a_process_that_is_killed(start, tmp_path):
    processes = [
        start(
            [sys.executable, __file__, str(tmp_path / "meet")],
            env={**os.environ, "RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE if rank == 0 else None,
            encoding="utf-8",
        )
        for rank in range(2)
    ]
    told, _ = processes[0].communicate(timeout=180)
    assert processes[1].wait(timeout=180) == -signal.SIGKILL
    assert processes[0].returncode == 3
    assert "a process of the group disconnected" in told


if __name__ == "__main__":
    die_or_wait(Path(sys.argv[1]))
