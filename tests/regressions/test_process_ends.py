"""A process of a job ended with its work done, and by SIGABRT.

gloo's run loop drops the tensors of a message after the main thread has got it, and asks for Python's lock to do so.
When the interpreter was torn down meanwhile, that ended its thread in the middle of a destructor of C++, and so the
process: "terminate called without an active exception", exit status -6, a finished job that was told to have failed. It
took gloo threads that were late, on busy machines: 7 of 171 runs. Where no other thread gets Python unless the main
thread waits, which an interval of 1000 s means, they are always late.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

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
    """Components of one's own print; what stood in the buffer was lost with exit status 0."""
    code = (
        "from volseg.lifetime import end_at_exit; ending = end_at_exit(); ending.status = 0; print('the only result')"
    )
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w", encoding="utf-8") as full:
        assert subprocess.run([sys.executable, "-c", code], stdout=full, env=buffered, check=False).returncode == 120
