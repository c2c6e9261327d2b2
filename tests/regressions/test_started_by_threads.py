"""Processes of a job ended by SIGTERM, without a word, as soon as the thread that had started them was done.

Linux's ``prctl(PR_SET_PDEATHSIG)`` tells a process of the end of the thread that made it, not of its process. A program
that started a job's processes by a thread pool (``workflows/benchmarks/networks.py``, whose rows on several GPUs had
all been ended that way) lost them when the pool was closed. Only our own launchers' threads wait for what they start.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ready_python import wait_until

from volseg.launched import OWN_LAUNCHER

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

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")


def is_gone(pid: int) -> bool:
    """Say whether a process has ended, also where nobody has asked for its status yet."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


@pytest.fixture
def family(start, tmp_path):
    """A process without an own launcher, and its child, which another thread has started."""
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


def test_a_process_outlives_the_thread_that_started_it_and_not_its_parent(family):
    parent, child = family
    time.sleep(1.5)
    assert not is_gone(child)
    parent.kill()
    parent.wait()
    wait_until(lambda: is_gone(child), 30)
