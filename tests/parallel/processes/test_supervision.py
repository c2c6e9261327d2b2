"""Supervision of ranks, and the end of a job; simulated in one process with a shared store."""

import os
import sys
import time
from contextlib import contextmanager

import torch.distributed as dist

from volseg.lifetime import is_running
from volseg.parallel.processes import supervision as module
from volseg.parallel.processes.progress import Milestone
from volseg.parallel.processes.supervision import Supervision, name_machine

TIMEOUT = 1.0


class Job:
    """Processes that watch each other, and the error that ends each of them."""

    def __init__(self, size, timeout=TIMEOUT, **about):
        self.store = dist.HashStore()
        self.reached = [Milestone(0, "start", None, None)] * size
        self.ended = [None] * size
        self.stacks = [""] * size
        about = {"machine": name_machine(), "pid": os.getpid(), **about}
        members = [{"where": f"process {rank} of {size} (host{rank}, cpu)", **about} for rank in range(size)]

        def watch(rank):
            def end(cause, stack):
                self.ended[rank], self.stacks[rank] = cause, stack
                self.watching[rank]._ending.set()

            return Supervision(self.store, rank, members, timeout, end, lambda: self.reached[rank])

        self.watching = [watch(rank) for rank in range(size)]

    def go_on(self, *ranks):
        for rank in ranks:
            self.reached[rank] = Milestone(self.reached[rank].count + 1, "train", 3, 17 + rank)

    def wait(self, seconds, *going):
        """Wait until all have been ended, at most so long; meanwhile some make progress."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and None in self.ended:
            self.go_on(*going)
            time.sleep(0.05)
        return [cause and cause.message for cause in self.ended]


@contextmanager
def job(size, **options):
    made = Job(size, **options)
    try:
        yield made
    finally:
        for one in made.watching:
            one.stop()


def test_the_first_to_fail_is_told_by_all():
    with job(3, timeout=30) as running:
        own, other = running.watching[1].fail("disk full"), running.watching[2].fail("a peer is gone")
        assert (own.message, own.is_own) == ("disk full", True)
        assert (other.message, other.is_own) == ("disk full", False)
        time.sleep(2.5)
        assert running.ended[0].message == "disk full"
        assert running.ended[1:] == [None, None]  # those end by themselves


def test_all_hear_that_they_begin_anew_before_the_store_goes():
    with job(3, timeout=30) as running:
        running.watching[1].keeps_store = True
        assert running.watching[1].fail("no memory", again=True).again
        running.watching[1].part()  # waits for the other two
        assert all(running.store.check([f"heard/{rank}"]) for rank in range(3))
        wait = time.monotonic() + 10
        while None in (running.ended[0], running.ended[2]) and time.monotonic() < wait:
            time.sleep(0.02)
        assert [running.ended[rank].again for rank in (0, 2)] == [True, True]


def test_who_waits_for_one_that_goes_on_is_left_alone():
    with job(2) as running:
        assert running.wait(3 * TIMEOUT, 1) == [None, None]


def test_when_nobody_goes_on_everybody_is_told_where_each_is():
    with job(2) as running:
        running.reached[0] = Milestone(1, "read", None, "hippocampus_042")
        running.go_on(1)
        told, again = running.wait(10 * TIMEOUT)
        assert told == again
        assert "no process has made progress for" in told
        assert "(parallel.timeout is 1):" in told
        assert "process 0 of 2 (host0, cpu): read, hippocampus_042\n" in told
        assert "process 1 of 2 (host1, cpu): train, epoch 3, batch 18\n" in told
        assert "raise parallel.timeout" in told
        assert all("running.wait(10 * TIMEOUT)" in stack for stack in running.stacks)


def test_one_without_a_sign_of_life_is_named_soon(monkeypatch):
    monkeypatch.setattr(module, "LEAST_SECONDS", 1.0)
    with job(3, timeout=5) as running:  # a fifth of it
        running.watching[2].stop()
        running.ended[2] = running.ended[2] or module.Cause(message="lost", is_own=True)
        told, again, _ = running.wait(10, 0, 1)
        assert told == again
        assert "process 2 of 3 (host2, cpu) sends no heartbeat for" in told
        assert "its machine or network is down" in told


def test_a_dead_process_of_this_machine_is_named_at_once(start):
    dead = start([sys.executable, "-c", ""])
    assert is_running(os.getpid())
    while is_running(dead.pid):  # nobody has asked for its status yet
        time.sleep(0.05)
    with job(2, timeout=30, pid=dead.pid) as running:
        told = running.wait(5)
        assert "died silently" in told[0]
        assert "a lack of memory" in told[0]
    dead.wait()
    assert not is_running(dead.pid)


def test_those_that_have_left_are_not_missed_and_the_others_are_watched():
    with job(2) as running:
        running.watching[1].leave()
        running.watching[1].stop()
        running.ended[1] = module.Cause(message="left", is_own=True)
        assert running.wait(3 * TIMEOUT, 0)[0] is None
        assert "no process has made progress" in running.wait(10 * TIMEOUT)[0]


def test_time_in_which_everybody_was_held_does_not_count(monkeypatch):
    with job(2, timeout=20) as running:
        clock = time.monotonic
        time.sleep(1.5)
        # As after SIGSTOP and, hours later, SIGCONT.
        monkeypatch.setattr(module.time, "monotonic", lambda: clock() + 10_000)
        time.sleep(3)
        assert running.ended == [None, None]


def test_without_its_store_a_job_ends_after_a_while(monkeypatch):
    monkeypatch.setattr(module, "SECONDS_TO_LEAVE", 1.0)

    class Gone:
        def __getattr__(self, name):
            raise dist.DistNetworkError("Broken pipe")

    with job(1, timeout=30) as running:
        running.watching[0].store = Gone()
        (told,) = running.wait(10, 0)
        assert "the store of this job is gone" in told
        assert "Broken pipe" in told
