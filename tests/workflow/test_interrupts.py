"""Signals that are real, sent to processes that are real."""

import signal
import subprocess
import sys
import time

import pytest

from volseg.workflow.interrupts import LookInterval

WAITING = """
import signal, sys, time
from volseg.workflow import interrupts
interrupts.ONE_EVENT_SECONDS = 0.3
{before}
with interrupts.catch_signals() as interruption:
    print("ready", flush=True)
    while not interruption:
        time.sleep(0.005)
    print("caught", interruption.signal.name, flush=True)
    end = time.monotonic() + {seconds}
    while time.monotonic() < end:
        time.sleep(0.005)
interruption.raise_as_signal()
"""


def started(seconds, before=""):
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING.format(seconds=seconds, before=before)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        encoding="utf-8",
    )
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize(("number", "status"), [("SIGTERM", 143), ("SIGHUP", 129), ("SIGINT", -signal.SIGINT)])
def test_a_signal_is_recorded_and_ends_with_its_status(number, status):
    """An interpreter that a KeyboardInterrupt ends kills itself by SIGINT, which a shell shows as 130."""
    with started(0) as process:
        process.send_signal(getattr(signal, number))
        assert process.stdout.readline() == f"caught {number}\n"
        assert process.wait(20) == status


def test_a_signal_that_comes_twice_at_once_is_one():
    with started(0.1) as process:
        for _ in range(2):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.02)
        assert process.wait(20) == 143


def test_a_second_signal_acts_at_once():
    with started(100) as process:
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "caught SIGTERM\n"
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == -signal.SIGTERM


def test_under_nohup_a_closed_terminal_is_no_matter():
    with started(0, before="signal.signal(signal.SIGHUP, signal.SIG_IGN)") as process:
        process.send_signal(signal.SIGHUP)
        time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "caught SIGTERM\n"
        assert process.wait(20) == 143


def test_a_request_of_this_process_is_a_sigterm_and_the_first_real_one_is_not_the_second():
    request = "import threading; threading.Timer(0.2, interrupts.request_stop).start()"
    with started(1, before=request) as process:
        assert process.stdout.readline() == "caught SIGTERM\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 143


def test_a_request_while_nobody_listens_ends_the_process():
    code = "import time; from volseg.workflow.interrupts import request_stop; request_stop(); time.sleep(60)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=50).returncode == -signal.SIGTERM


@pytest.mark.parametrize(
    ("seconds_per_batch", "batches"), [(0.001, 32), (0.0625, 32), (0.1, 20), (0.9, 2), (5.0, 1), (0.0, 32)]
)
def test_slow_batches_are_looked_at_more_often(seconds_per_batch, batches):
    interval = LookInterval(32)
    assert interval.batches == 1
    interval.adapt(seconds_per_batch)
    assert interval.batches == batches
    for _ in range(batches):
        assert not interval.is_due
        interval.count()
    assert interval.is_due


def test_on_a_cpu_every_batch_is_looked_at():
    interval = LookInterval(1)
    interval.adapt(1e-6)
    assert interval.batches == 1
