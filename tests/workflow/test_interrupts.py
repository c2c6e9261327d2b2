"""Real signals, sent to real processes."""

import signal
import subprocess
import sys

import pytest

from volseg.workflow.checks import LookInterval

pytestmark = pytest.mark.usefixtures("ready_python")

# The end of its work comes by its input, at which it looks again and again: a signal that comes just before a read
# begins to wait is not seen by Python until that has ended (5 of 16,000 processes waited on for good).
WAITING = """
import select, signal, sys, time
from volseg.workflow import checks
checks.ONE_EVENT_SECONDS = {one_event_seconds}
{before}
with checks.catch_signals() as interruption:
    print("ready", flush=True)
    {inside}
    while not interruption:
        time.sleep(0.005)
    print("caught", interruption.signal.name, flush=True)
    while not select.select([sys.stdin], [], [], 0.1)[0]:
        pass
interruption.raise_as_signal()
"""


@pytest.fixture
def listen(start):
    """Return a function that starts a process that listens for signals, and works on after one until told to end."""

    def started(before="", inside="", one_event_seconds=0.0):
        code = WAITING.format(before=before, inside=inside, one_event_seconds=one_event_seconds)
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        process = start([sys.executable, "-c", code], **streams, encoding="utf-8")
        assert process.stdout.readline() == "ready\n"
        return process

    return started


def end(process):
    """Let a process end its work; return its exit status."""
    process.communicate("\n", timeout=60)
    return process.returncode


def test_a_signal_that_comes_twice_at_once_is_one(listen):
    process = listen(one_event_seconds=1000)
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "caught SIGTERM\n"
    process.send_signal(signal.SIGTERM)
    assert end(process) == 143


def test_a_second_signal_acts_at_once(listen):
    process = listen()
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "caught SIGTERM\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == -signal.SIGTERM


def test_under_nohup_a_closed_terminal_is_no_matter(listen):
    process = listen(before="signal.signal(signal.SIGHUP, signal.SIG_IGN)")
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "caught SIGTERM\n"
    assert end(process) == 143


def test_a_request_of_this_process_is_a_sigterm_and_the_first_real_one_is_not_the_second(listen):
    process = listen(inside="checks.request_stop()")
    assert process.stdout.readline() == "caught SIGTERM\n"
    process.send_signal(signal.SIGTERM)
    assert end(process) == 143


def test_a_request_while_nobody_listens_ends_the_process():
    code = "import time; from volseg.workflow.checks import request_stop; request_stop(); time.sleep(60)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=50).returncode == -signal.SIGTERM


@pytest.mark.parametrize(
    ("most", "seconds_per_batch", "batches"),
    [(32, 0.001, 32), (32, 0.0625, 32), (32, 0.1, 20), (32, 0.9, 2), (32, 5.0, 1), (32, 0.0, 32), (1, 1e-6, 1)],
)
def test_slow_batches_are_looked_at_more_often(most, seconds_per_batch, batches):
    """On a CPU, where ``most`` is 1, every batch."""
    interval = LookInterval(most)
    assert interval.batches == 1
    interval.adapt(seconds_per_batch)
    for _ in range(batches):
        assert not interval.is_due
        interval.count()
    assert interval.is_due
