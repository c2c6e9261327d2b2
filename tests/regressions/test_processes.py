"""Processes of a job that were missed, aborted, or reported as failed after finishing their work."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from in_group import in_group
from ready_python import wait_until

from volseg.launched import OWN_LAUNCHER
from volseg.parallel.processes import supervision as module
from volseg.parallel.processes.progress import run_together
from volseg.parallel.processes.supervision import Supervision

# A job whose work was done was told to have failed, "process 0 of 2 died silently", by who watches: a process said that
# it was leaving, and ended, between two looks. A store that went between them ended the thread that watches.


MEMBERS = [{"where": f"process {rank} of 2 (here, cpu)", "machine": "this one", "pid": rank} for rank in range(2)]


def put_down(store, leaving):
    store.set("life/1", json.dumps({"beat": 1, "count": 1, "at": "validate", "leaving": leaving}))


def watch(store, seconds, members=MEMBERS):
    """Return a supervision, the error that ends its process, and an event for it."""
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


@pytest.mark.usefixtures("ready_python")
@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="holds a process as POSIX systems do")
def test_a_store_that_gives_no_answer_ends_the_process(monkeypatch, start):
    """The thread that watches waited for an answer without limit, and did not end the process.

    A cut network closes no connection, and neither does a stopped process, as the store's is here.
    """
    monkeypatch.setattr(module, "LEAST_SECONDS", 2.0)
    server = start([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, encoding="utf-8")
    store = dist.TCPStore("localhost", int(server.stdout.readline()), is_master=False, wait_for_workers=False)
    put_down(store, leaving=True)
    watching, ended, told = watch(store, 4.0, [{**member, "pid": os.getpid()} for member in MEMBERS])
    os.kill(server.pid, signal.SIGSTOP)
    assert told.wait(60)
    assert ended[0].message.startswith("process 0 of 2 (here, cpu) is cut off: the store of this job has not answered")
    assert watching.fail("disk full").message == "disk full"  # returns too
    watching.leave()
    os.kill(server.pid, signal.SIGCONT)
    watching.stop(60)


# A process of a job ended with its work done, and by SIGABRT: a thread of gloo asked for Python's lock when the
# interpreter was torn down. By an interval of 1000 s, in which no other thread gets Python, it is always late.


SCRIPT = """
import sys
import torch, torch.distributed as dist
from volseg.lifetime import end_at_exit
from volseg.parallel.processes.group import leave_processes, start_group

ending = end_at_exit()
start_group()
dist.broadcast(torch.zeros(10), 0)
sys.setswitchinterval(1000)
for _ in range(20):
    dist.broadcast(torch.zeros(10), 0)
if sys.argv[1] == "left":
    leave_processes()
elif sys.argv[1] == "error":
    raise KeyError("something of ours")
else:
    ending.status = int(sys.argv[1])
    sys.exit(ending.status)
"""


@pytest.mark.parametrize(("way", "status"), [("left", 0), ("143", 143), ("error", 1)])
def test_no_process_aborts_at_its_end(start, way: str, status: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    tasks = [
        start(
            [sys.executable, str(script), way],
            env={**os.environ, **variables, "RANK": rank, "LOCAL_RANK": rank},
            stderr=subprocess.PIPE,
            encoding="utf-8",
        )
        for rank in "01"
    ]
    shown = [task.communicate(timeout=180)[1] for task in tasks]
    assert [task.returncode for task in tasks] == [status, status], shown
    assert not any("terminate called" in one for one in shown)


EARLY = """
import atexit, sys
atexit.register(lambda: print("measured"))
sys.argv = ["volseg", "--version"]
from volseg.cli import run_to_end
run_to_end()
"""


def test_what_others_registered_for_the_exit_before_is_run() -> None:
    """A command ended before it: coverage and profilers that begin with Python itself wrote nothing."""
    run = subprocess.run([sys.executable, "-c", EARLY], capture_output=True, encoding="utf-8", check=True)
    assert run.stdout.splitlines()[1:] == ["measured"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="asks Linux for a full disk")
def test_what_could_not_be_written_at_the_end_is_no_success() -> None:
    """Output that own components printed was lost from the buffer, with exit status 0."""
    code = (
        "from volseg.lifetime import end_at_exit; ending = end_at_exit(); ending.status = 0; print('the only result')"
    )
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w", encoding="utf-8") as full:
        assert subprocess.run([sys.executable, "-c", code], stdout=full, env=buffered, check=False).returncode == 120


# Processes of a job ended by SIGTERM as soon as the thread that had started them was done: Linux's
# ``prctl(PR_SET_PDEATHSIG)`` tells of the end of a thread, not of its process.


CHILD = """
import os, time
from volseg.lifetime import end_with_launcher

end_with_launcher()
print(os.getpid(), flush=True)
time.sleep(600)
"""

PARENT = """
import subprocess, sys, threading, time

def start():
    global child  # which is let go with the process, not with the thread
    child = subprocess.Popen([sys.executable, sys.argv[1]], stdout=subprocess.PIPE, encoding="utf-8")
    print(child.stdout.readline(), end="", flush=True)

thread = threading.Thread(target=start)
thread.start()
thread.join()
print("the thread has ended", flush=True)
time.sleep(600)
"""


def is_gone(pid: int) -> bool:
    """Return whether a process has ended, even before its status was read."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


@pytest.fixture
def family(start, tmp_path):
    """A process without its own launcher, and a child started by another thread."""
    (tmp_path / "child.py").write_text(CHILD, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name != OWN_LAUNCHER}
    parent = start(
        [sys.executable, "-c", PARENT, str(tmp_path / "child.py")],
        env=environment,
        stdout=subprocess.PIPE,
        encoding="utf-8",
    )
    child = int(parent.stdout.readline())
    assert parent.stdout.readline() == "the thread has ended\n"
    yield parent, child
    if not is_gone(child):
        os.kill(child, signal.SIGKILL)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_a_process_outlives_the_thread_that_started_it_and_not_its_parent(family):
    parent, child = family
    time.sleep(1.5)
    assert not is_gone(child)
    parent.kill()
    parent.wait()
    wait_until(lambda: is_gone(child), 30)


def listener_that_fails_late():
    """Process 0 has a listener that fails once its work is done."""
    begun = []

    def hear(counts):
        if dist.get_rank() == 0 and begun and begun[0]._ended.is_set():
            raise OSError("the bar's file is full")

    def work(rounds):
        begun.append(rounds)
        time.sleep(dist.get_rank())
        return dist.get_rank()

    return run_together(dist.group.WORLD, work, heard=hear)


@pytest.mark.usefixtures("ready_python")
def test_a_listener_that_fails_after_the_work_ends_no_process_alone():
    """One process raised the listener's error, but the others continued with all results."""
    assert in_group(2, listener_that_fails_late) == [[0, 1], [0, 1]]
