"""Fork the processes of tests from an interpreter that has imported everything.

A new interpreter takes four seconds of a core to import torch, MONAI and volseg. Here one interpreter per worker of
pytest imports them, and is forked for each process in hundredths of a second. A forked process has its own pid,
session, folder, environment, streams, arguments and default signal handlers, and runs ``-m``, ``-c`` or a script as
``__main__``. It differs from a new one in three ways: modules are imported already, all forks have one hash seed, and
trainings draw small pictures (`small_pictures`). A test of one of these needs ``subprocess`` itself.

The fixture ``ready_python`` replaces ``subprocess.Popen`` by `Popen`, also in the code under test and in the processes
that it starts. Other programs, and options that an interpreter reads at its start, still use ``subprocess.Popen``.
"""

import atexit
import ctypes
import gc
import inspect
import io
import os
import pickle
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

NAME = "ready_python"
"""What a process that waits to be forked is called in ``/proc/PID/comm``."""

MODULES = (
    "torch._dynamo",  # by the first step of an optimizer
    "torch.utils.tensorboard",
    "torch.distributed.launcher.api",
    "volseg.cli",
    "volseg.experiment",
    "volseg.experiment.cross_validation",
    "volseg.experiment.launching",
    "volseg.experiment.prediction.predicting",
    "volseg.experiment.training",
    "volseg.parallel",
    "volseg.workflow",
)
"""What is imported; what a process needs besides it imports by itself."""

PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 15, 36
"""Of Linux's ``prctl``."""

LENGTH = struct.Struct("!I")

_plain = subprocess.Popen
_signature = inspect.signature(_plain._execute_child) if os.name == "posix" else None
_asking = threading.Lock()
_waiting: socket.socket | None = None
"""To the process that is forked for those that this one starts."""


def wait_until(holds: Callable[[], bool], seconds: float) -> None:
    """Wait until something holds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.02)


@contextmanager
def acting_when(holds: Callable[[], bool], act: Callable[[], object]) -> Iterator[None]:
    """Do something in a thread when something holds, while the block runs."""
    thread = threading.Thread(target=lambda: (wait_until(holds, 120), act()))
    thread.start()
    yield
    thread.join()


class Popen(_plain):
    """``subprocess.Popen`` whose processes of this interpreter are forked from one that has imported everything."""

    def _execute_child(self, *given: Any) -> None:  # as the standard library calls it
        asked = _signature.bind(self, *given).arguments if _signature is not None else {}
        request = _describe(asked)
        if request is None:
            super()._execute_child(*given)
            return
        streams = [asked[name] if asked[name] != -1 else number for number, name in enumerate(STREAMS)]
        with _asking:
            self.pid = _fork(request, [*streams, *request["pass_fds"]])
        self._child_created = True
        self._close_pipe_fds(*(asked[name] for name in PIPES))


STREAMS = ("p2cread", "c2pwrite", "errwrite")
PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


def _describe(asked: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what a process is to be; None for one that needs an interpreter of its own."""
    if not sys.platform.startswith("linux") or isinstance(asked["args"], (str, bytes, os.PathLike)):
        return None
    command = [os.fsdecode(part) for part in asked["args"]]
    is_path_safe = command[1:2] == ["-P"]
    arguments = command[1 + is_path_safe :]
    if command[0] != sys.executable or not arguments:
        return None
    if arguments[0].startswith("-") and (arguments[0] not in ("-m", "-c") or len(arguments) < 2):
        return None
    plain = {"executable": None, "preexec_fn": None, "shell": False, "close_fds": True, "umask": -1}
    plain |= {"process_group": -1} if "process_group" in asked else {}
    if any(asked[name] != value for name, value in plain.items()) or asked["gid"] or asked["gids"] or asked["uid"]:
        return None
    folder = os.path.abspath(asked["cwd"] or ".")
    environment = {os.fsdecode(k): os.fsdecode(v) for k, v in (asked["env"] or os.environ).items()}
    if not os.path.isdir(folder) or _settled_at_start(environment) != _settled_at_start(os.environ):
        return None
    return {
        "arguments": arguments,
        "path_safe": is_path_safe,
        "folder": folder,
        "environment": environment,
        "pass_fds": sorted(asked["pass_fds"]),
        "new_session": asked["start_new_session"],
        "parent": os.getpid(),
    }


def _settled_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that Python, the C library or torch read while they start."""
    starts = ("PYTHON", "LC_", "LANG", "LD_", "MALLOC_", "TRITON_INTERPRET", "TORCH_LOGS", "MKL_", "KMP_")
    later = ("PYTHONPATH", "PYTHONUNBUFFERED")  # as `_take_place` heeds them
    return {name: value for name, value in environment.items() if name.startswith(starts) and name not in later}


def _fork(request: dict[str, Any], descriptors: Sequence[int]) -> int:
    """Have the waiting process forked into what is asked for; return its pid."""
    global _waiting
    if _waiting is None:
        _waiting = _start_waiting()
    message = pickle.dumps(request)
    _control(PR_SET_CHILD_SUBREAPER, 1)  # the process becomes an orphan, and so a child of this one
    try:
        socket.send_fds(_waiting, [LENGTH.pack(len(message))], descriptors)
        _waiting.sendall(message)
        told = _read(_waiting, LENGTH.size)
    finally:
        _control(PR_SET_CHILD_SUBREAPER, 0)
    if told is None:
        raise RuntimeError(f"{NAME} has ended: what it said is on standard error")
    return LENGTH.unpack(told)[0]


def _start_waiting() -> socket.socket:
    own, other = socket.socketpair()
    with other:
        command = [sys.executable, __file__, str(other.fileno())]
        process = _plain(command, stdin=subprocess.DEVNULL, pass_fds=[other.fileno()])

    def end() -> None:
        own.close()
        process.wait()

    atexit.register(end)
    return own


def _control(option: int, value: Any) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def _read(stream: socket.socket, size: int) -> bytes | None:
    """Return so many bytes; None where the other side has ended."""
    content = b""
    while len(content) < size:
        part = stream.recv(size - len(content))
        if not part:
            return None
        content += part
    return content


_installed: list[str] = []
"""Where an interpreter finds modules besides ``PYTHONPATH``."""


def _list_own_paths() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def _main() -> None:
    """Import everything, wait, and be the process that is asked for."""
    from ready_python import Popen, begin  # what is forked knows this module by its name, not as __main__

    subprocess.Popen = Popen  # type: ignore[misc]
    for name in MODULES:
        import_module(name)
    import_module("small_pictures").shrink_pictures()  # as in the process of the tests
    gc.collect()
    gc.freeze()  # collections do not touch, and so copy, the pages that all share
    begin(socket.socket(fileno=int(sys.argv[1])))


def begin(requests: socket.socket) -> None:
    """Wait for requests, and do the work that one asks for in a process of its own, which ends with it."""
    global _waiting, _asking, _installed
    _installed = [path for path in sys.path[1:] if path not in _list_own_paths()]
    request = _await(requests)
    while True:
        _take_place(request)
        own, other = socket.socketpair()
        if os.fork():
            break
        # For the processes that this one starts: forked now, while there is nothing of its work yet.
        own.close()
        _let_go(request)
        request = _await(other)
    other.close()
    _waiting, _asking = own, threading.Lock()
    try:
        _run(request["arguments"], request["path_safe"])
        status: object = 0
    except SystemExit as end:
        status = 0 if end.code is None else end.code
        if not isinstance(status, int):
            raise
    except Exception:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        status = 1
    _end(status)


def _end(status: int) -> None:
    """End as an interpreter does, but for its last act, in which it takes apart all that was imported.

    That is half a second of a core, as it touches, and so copies, every page that all share; and what ends as `volseg`
    does spares itself the same. Where the last words cannot be written Python itself says so.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as Python does first
    atexit._run_exitfuncs()
    with suppress(OSError, ValueError, AttributeError):
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status & 0xFF)
    sys.exit(status)


def _await(requests: socket.socket) -> dict[str, Any]:
    """Return a request in the process that is to fulfil it; the waiting one goes on until nobody can ask any more."""
    _control(PR_SET_NAME, NAME.encode())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # they are for the others of its group
        signal.signal(number, signal.SIG_IGN)
    while True:
        try:
            size, descriptors, _, _ = socket.recv_fds(requests, LENGTH.size, 64)
        except ConnectionError:
            os._exit(0)
        message = _read(requests, LENGTH.unpack(size)[0]) if len(size) == LENGTH.size else None
        if message is None:
            os._exit(0)
        between = os.fork()
        if between:
            os.waitpid(between, 0)
            for descriptor in descriptors:
                os.close(descriptor)
            continue
        if os.fork():
            os._exit(0)
        request = pickle.loads(message)
        while os.getppid() != request["parent"]:
            time.sleep(0.001)
        # Before the process that asked knows its number, and may end it: a signal that is ignored is lost.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        with requests, suppress(ConnectionError):
            requests.sendall(LENGTH.pack(os.getpid()))
        return {**request, "descriptors": descriptors}


def _take_place(request: dict[str, Any]) -> None:
    """Give this process the streams, the folder and the variables of a new one."""
    _control(PR_SET_NAME, b"python")
    if request["new_session"]:
        os.setsid()
    targets = [0, 1, 2, *request["pass_fds"]]
    high = [_move_up(descriptor, max(targets)) for descriptor in request["descriptors"]]
    for descriptor, target in zip(high, targets, strict=True):
        os.dup2(descriptor, target, inheritable=True)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[:] = [*_list_own_paths(), *_installed]
    os.chdir(request["folder"])
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        raw, before = io.FileIO(number, "w" if number else "r", closefd=False), getattr(sys, f"__{name}__")
        kind = io.BufferedWriter if number else io.BufferedReader
        stream = io.TextIOWrapper(
            raw if unbuffered and number > 0 else kind(raw),
            encoding=before.encoding,
            errors=before.errors,
            line_buffering=not unbuffered and (number == 2 or raw.isatty()),
            write_through=unbuffered,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    import torch  # imported already

    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def _move_up(descriptor: int, limit: int) -> int:
    """Return the same open file under a number above ``limit``."""
    import fcntl  # not on every system

    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, limit + 1)
    os.close(descriptor)
    return moved


def _let_go(request: dict[str, Any]) -> None:
    """Close what a process that waits must not hold open: somebody may wait for its end."""
    with open(os.devnull, "r+b", buffering=0) as nothing:
        for number in (0, 1, 2):
            os.dup2(nothing.fileno(), number)
    for descriptor in request["pass_fds"]:
        os.close(descriptor)


def _run(arguments: Sequence[str], is_path_safe: bool) -> None:
    """Do what ``python`` does with these arguments, by ``-P`` with nothing in front of the path."""
    # By which a process that begins anew starts a new interpreter.
    sys.orig_argv[1:] = [*(["-P"] if is_path_safe else []), *arguments]
    import numpy  # imported already

    # Python's own generator is seeded in every fork, and torch's begins alike in all processes.
    numpy.random.seed()  # noqa: NPY002 - the one that libraries draw from
    kind, named = arguments[0], arguments[0] in ("-m", "-c")
    sys.argv = ["-c", *arguments[2:]] if kind == "-c" else list(arguments[named:])
    if not is_path_safe:
        sys.path.insert(0, {"-m": os.getcwd(), "-c": ""}.get(kind, str(Path(kind).resolve().parent)))
    if kind == "-m":
        sys.modules.pop(arguments[1], None)  # or runpy warns that it was imported before
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    if kind != "-c":
        module.__file__ = kind
    text, name = (arguments[1], "<string>") if kind == "-c" else (Path(kind).read_bytes(), kind)
    exec(compile(text, name, "exec"), vars(module))


if __name__ == "__main__":
    _main()
