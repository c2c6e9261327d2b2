"""A job whose work was done was told to have failed: "process 0 of 2 died silently".

Who watches the others reads what they have put down, and then looks whether they are there. A process that said it was
leaving and ended between the two was taken for one that was killed, and the job was ended by it, with status 1. On a
busy machine the thread that watches is held there long enough: one of 37 tests of jobs that succeed.

A store that went between the two ended the thread itself, and nobody watched any more.
"""

import json
import os
import signal
import subprocess
import sys
import threading

import pytest
import torch.distributed as dist

from volseg.parallel.processes import supervision as module
from volseg.parallel.processes.supervision import Supervision

MEMBERS = [{"where": f"process {rank} of 2 (here, cpu)", "machine": "this one", "pid": rank} for rank in range(2)]


def put_down(store, leaving):
    store.set("life/1", json.dumps({"beat": 1, "count": 1, "at": "validate", "leaving": leaving}))


def watch(store, seconds, members=MEMBERS):
    """Return a supervision, what ends its process, and an event for that."""
    ended, told = [], threading.Event()
    watching = Supervision(store, 0, members, seconds, lambda cause, stack: (ended.append(cause), told.set()))
    return watching, ended, told


def test_one_that_leaves_and_ends_between_two_looks_is_not_missed(monkeypatch):
    store, looked = dist.HashStore(), threading.Event()
    put_down(store, leaving=False)

    def is_running(pid):
        if pid == 1:
            put_down(store, leaving=True)
            looked.set()
        return pid == 0

    monkeypatch.setattr(module, "is_running", is_running)
    watching, ended, _ = watch(store, 10.0)
    assert looked.wait(60)
    watching.stop(60)  # the look that has begun is done
    assert ended == []
    assert not store.check(["cause"])


def test_one_that_ends_without_a_word_is_missed(monkeypatch):
    store = dist.HashStore()
    put_down(store, leaving=False)
    monkeypatch.setattr(module, "is_running", lambda pid: pid == 0)
    watching, ended, told = watch(store, 10.0)
    assert told.wait(60)
    watching.stop(60)
    assert "process 1 of 2 (here, cpu) died silently, last seen at validate" in ended[0].message


def test_a_store_that_goes_between_two_looks_is_missed(monkeypatch):
    monkeypatch.setattr(module, "SECONDS_TO_LEAVE", 0.5)
    store = dist.HashStore()
    put_down(store, leaving=False)

    class Going:
        """A store that fails where a cause is looked for."""

        def __getattr__(self, name):
            return getattr(store, name)

        def check(self, keys):
            if keys == ["cause"]:
                raise dist.DistNetworkError("Broken pipe")
            return store.check(keys)

    monkeypatch.setattr(module, "is_running", lambda pid: True)
    watching, ended, told = watch(Going(), 2.0)
    assert told.wait(60)
    watching.stop(60)
    assert "the store of this job is gone" in ended[0].message


SERVER = """
import sys, time
from torch.distributed import TCPStore

store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="holds a process as POSIX systems do")
def test_a_store_that_gives_no_answer_ends_the_process(monkeypatch, start):
    """The thread that watches waited for an answer without limit, and did not end the process.

    A cut network closes no connection, and neither does a stopped process, as the store's is here.
    """
    monkeypatch.setattr(module, "LEAST_SECONDS", 2.0)
    server = start([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, encoding="utf-8")
    store = dist.TCPStore("localhost", int(server.stdout.readline()), is_master=False, wait_for_workers=False)
    put_down(store, leaving=True)
    watching, ended, told = watch(store, 10.0, [{**member, "pid": os.getpid()} for member in MEMBERS])
    os.kill(server.pid, signal.SIGSTOP)
    assert told.wait(60)
    assert ended[0].message.startswith("process 0 of 2 (here, cpu) is cut off: the store of this job has not answered")
    assert watching.fail("disk full").message == "disk full"  # returns too
    watching.leave()
    os.kill(server.pid, signal.SIGCONT)
    watching.stop(60)
