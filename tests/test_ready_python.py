"""A process forked from an interpreter with all imports behaves like a new interpreter."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import ready_python

TOLD = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.PIPE, "encoding": "utf-8"}

DESCRIBE = """
import json, os, signal, sys
print(json.dumps({
    "arguments": sys.argv,
    "command": [part for part in sys.orig_argv if part != "-u"],
    "paths": [path for path in sys.path if "zip" not in path],
    "name": __name__,
    "main": sys.modules["__main__"].__dict__ is globals(),
    "read": sys.stdin.read(),
    "folder": os.getcwd(),
    "variables": {**os.environ, "PYTHONPATH": ""},
    "signals": [str(signal.getsignal(getattr(signal, name))) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGPIPE")],
    "leads": os.getsid(0) == os.getpid(),
    "parent": os.getppid(),
    "open": [os.path.exists(f"/proc/self/fd/{number}") for number in map(int, sys.argv[1:])],
    "streams": [[s.encoding, s.errors, s.line_buffering, s.write_through] for s in (sys.stdin, sys.stdout, sys.stderr)],
    "threads": len(os.listdir("/proc/self/task")),
    "imported": "torch" in sys.modules,
}))
"""
FORKED = sys.platform.startswith("linux")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "describe.py"
    file.write_text(DESCRIBE, encoding="utf-8")
    return file


def describe(kind: type[subprocess.Popen], command: list[str], **options) -> dict:
    with kind([sys.executable, *command], **TOLD, **options) as process:
        out, errors = process.communicate("what it is given")
    assert process.returncode == 0, errors
    assert errors == ""
    return json.loads(out)


@pytest.mark.parametrize(
    ("how", "option"), [("script", ""), ("-c", ""), ("-m", ""), ("-c", "1"), ("-c", "-P")], ids=str
)
def test_it_is_what_a_new_one_is(script, how: str, option: str, tmp_path: Path) -> None:
    """In everything that a process can see of itself, except for imports."""
    read, write = os.pipe()
    command = {"script": [str(script)], "-c": ["-c", DESCRIBE], "-m": ["-m", "describe"]}[how]
    command = [option, *command] if option.startswith("-") else command
    options = {
        "cwd": tmp_path,
        "env": {**os.environ, "A_VARIABLE": "a value", "PYTHONUNBUFFERED": option if option == "1" else ""},
        "pass_fds": [read],
        "start_new_session": True,
    }
    new, forked = (
        describe(kind, [*command, str(read), str(write)], **options) for kind in (subprocess.Popen, ready_python.Popen)
    )
    for descriptor in (read, write):
        os.close(descriptor)
    assert [new.pop("imported"), forked.pop("imported")] == [False, FORKED]
    assert forked == new
    assert forked["parent"] == os.getpid()
    assert forked["open"] == [True, False]


ENDS = {
    "done": ("pass", 0),
    "a status": ("import sys; sys.exit(7)", 7),
    "a large status": ("import sys; sys.exit(256 + 7)", 7),
    "a message": ("import sys; sys.exit('my words')", 1),
    "an error": ("raise KeyError('mine')", 1),
    "Ctrl-C": ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT),
    "SIGTERM": ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    "left for the exit": ("import atexit, os; atexit.register(os._exit, 9)", 9),
}


@pytest.mark.parametrize("way", ENDS)
def test_it_ends_as_a_new_one_does(way: str) -> None:
    code, status = ENDS[way]
    with ready_python.Popen([sys.executable, "-c", code], **TOLD) as process:
        errors = process.communicate()[1]
    assert process.returncode == status
    assert ("KeyError: 'mine'" in errors) == (way == "an error")
    assert ("my words" in errors) == (way == "a message")


LEFT = """
import atexit, sys, threading, time
atexit.register(print, "at the exit")
threading.Thread(target=lambda: (time.sleep(0.2), print("in a thread"))).start()
print("at once")
print("to the other stream", end="", file=sys.stderr)
{}
"""


@pytest.mark.parametrize("last", ["", "sys.exit(3)", "raise KeyError('mine')"])
def test_what_is_left_to_do_is_done_before_the_end(last: str) -> None:
    ends = []
    for kind in (subprocess.Popen, ready_python.Popen):
        with kind([sys.executable, "-c", LEFT.format(last)], **TOLD) as process:
            out, errors = process.communicate()
        ends.append((out, errors.splitlines()[-1], process.returncode))
    assert ends[0] == ends[1]
    assert ends[0][0] == "at once\nin a thread\nat the exit\n"


def test_what_it_starts_is_forked_too_and_its_child() -> None:
    inner = "import os, sys; print(os.getppid(), 'torch' in sys.modules)"
    code = (
        f"import os, subprocess, sys; print(os.getpid(), flush=True); subprocess.run([sys.executable, '-c', {inner!r}])"
    )
    with ready_python.Popen([sys.executable, "-c", code], **TOLD) as process:
        pid, told = process.communicate()[0].splitlines()
    assert told == f"{pid} {FORKED}"
    assert int(pid) == process.pid


@pytest.mark.parametrize("name", ["PYTHONHASHSEED", "LC_ALL", "TRITON_INTERPRET"])
def test_what_is_settled_while_python_starts_takes_a_new_one(name: str) -> None:
    code = "import sys; print('torch' in sys.modules)"
    other = {**os.environ, name: {"PYTHONHASHSEED": "7", "LC_ALL": "C", "TRITON_INTERPRET": "2"}[name]}
    with ready_python.Popen([sys.executable, "-c", code], **TOLD, env=other) as process:
        assert process.communicate()[0] == "False\n"
