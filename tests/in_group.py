"""Run functions in every process of a group that serves test after test.

``in_group(2, function, *arguments)`` calls the function in two processes joined by gloo, and returns their results. A
group of each size starts once per file of tests (`conftest.py`), since importing a test's module may take seconds. If a
function raises or takes too long, its test fails with that process's traceback, and the next call starts a new group.

The function must be at the top level of its module. It finds the default process group, ``RANK`` and ``WORLD_SIZE`` as
under torchrun, and no GPU; it must leave the group as it was.
"""

import atexit
import contextlib
import importlib.util
import os
import pickle
import random
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from ready_python import Popen

SECONDS = 240
"""For one call, unless it says otherwise."""

START_SECONDS = 180
"""For a group to start."""

MOST_THREADS = 60
"""Of a process, before its group gives way to a fresh one. Each gloo group that a function makes leaves a thread, which
wakes a hundred times a second: hundreds of them took as much of the machine as the tests."""

GRACE_SECONDS = 2
"""For the other processes after one has failed: they may fail too, or wait for it for ever."""


class GroupError(AssertionError):
    """A process raised, ended, or did not return in time."""


class Group:
    """Processes that wait for calls."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.folder = tempfile.TemporaryDirectory(prefix="group")
        self.pipes: list[Connection] = []
        self.processes: list[subprocess.Popen] = []
        for rank in range(size):
            own, other = Pipe()
            environment = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(size),
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "",
                "GLOO_SOCKET_IFNAME": "lo",
            }
            command = [sys.executable, __file__, str(other.fileno()), f"{self.folder.name}/meet"]
            with other, self._log(rank).open("wb") as log:
                self.processes.append(
                    Popen(command, env=environment, stdout=log, stderr=log, pass_fds=[other.fileno()])
                )
            self.pipes.append(own)
        try:
            self._collect(START_SECONDS)
        except BaseException:
            self.end(politely=False)
            raise

    def _log(self, rank: int) -> Path:
        return Path(self.folder.name) / f"{rank}.log"

    def call(self, message: bytes, seconds: float) -> list[Any]:
        """Return what each process returned."""
        for pipe in self.pipes:
            with contextlib.suppress(ConnectionError):  # it has ended: told below
                pipe.send_bytes(message)
        return self._collect(seconds)

    def count_threads(self) -> int:
        """Return the threads of the first process; 0 where the system does not tell."""
        with contextlib.suppress(OSError):
            return len(os.listdir(f"/proc/{self.processes[0].pid}/task"))
        return 0

    def _collect(self, seconds: float) -> list[Any]:
        deadline, results, faults = time.monotonic() + seconds, {}, {}
        waiting = {pipe: rank for rank, pipe in enumerate(self.pipes)}
        while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    returned, value = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionError):
                    returned, value = False, f"the process ended\n{self._told(rank)}"
                (results if returned else faults)[rank] = value
                if not returned:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if faults:
            raise GroupError("\n".join(f"rank {rank} of {self.size}: {fault}" for rank, fault in faults.items()))
        if late := sorted(waiting.values()):
            told = "\n".join(self._told(rank) for rank in late)
            raise GroupError(f"ranks {late} of {self.size} did not return within {seconds:g} s\n{told}")
        return [results[rank] for rank in range(self.size)]

    def _told(self, rank: int) -> str:
        """Return the end of what a process wrote."""
        return self._log(rank).read_text(errors="replace", encoding="utf-8")[-4000:]

    def end(self, politely: bool) -> None:
        """End the processes: at once where they may wait for each other."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            if not politely:
                process.kill()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.folder.cleanup()


_groups: dict[int, Group] = {}
"""Those that are running, by size."""


def in_group(processes: int, function: Callable[..., Any], *arguments: Any, seconds: float = SECONDS) -> list[Any]:
    """Call a function in each process of a group; return the results by rank.

    The function is at the top level of a module; arguments and results are pickled. Raises `GroupError` with the
    traceback if the function raises in a process, or does not return within ``seconds``.
    """
    if "<" in function.__qualname__:
        raise ValueError(f"{function.__qualname__} cannot be found by its name; put it at the top level of its module")
    message = pickle.dumps((function.__code__.co_filename, function.__qualname__, arguments, seconds))
    try:
        if processes not in _groups:
            _groups[processes] = Group(processes)
        returned = _groups[processes].call(message, seconds)
        if _groups[processes].count_threads() > MOST_THREADS:
            end_group(processes)
        return returned
    except BaseException:
        end_group(processes, politely=False)
        raise


def end_group(processes: int, politely: bool = True) -> None:
    """End the running group of that size, if there is one."""
    group = _groups.pop(processes, None)
    if group is not None:
        group.end(politely)


def end_groups() -> None:
    """End all running groups."""
    for size in tuple(_groups):
        end_group(size)


atexit.register(end_groups)


def expect_refusal(words: str, action: Callable[[], Any]) -> str | None:
    """Return None if ``action`` is refused with these words, else what happened."""
    from volseg.errors import ParallelError  # not in this file's processes before they are forked

    try:
        action()
    except ParallelError as fault:
        return None if words in str(fault) else f"another error: {fault}"
    return f"nothing was refused; expected {words!r}"


def assert_all_well(found: Sequence[str | None]) -> None:
    """Fail with what the processes say is wrong; None is well."""
    wrong = [f"rank {rank}: {what}" for rank, what in enumerate(found) if what is not None]
    assert not wrong, "\n".join(wrong)


def serve(pipe: Connection, meeting: str) -> None:
    """Be one of the processes: run what comes until the pipe is closed."""
    # Only here: the test process imports this module before it knows whether it needs a group.
    import faulthandler

    import torch
    import torch.distributed as dist

    # A comparison of ours, and what a network of somebody else's warns of, is told to the test by its result.
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # A rank that fails leaves the others waiting: not for long.
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    pipe.send_bytes(pickle.dumps((True, "ready")))
    while True:
        try:
            file, name, arguments, seconds = pickle.loads(pipe.recv_bytes())
        except EOFError:
            break
        torch.manual_seed(0)
        random.seed(0)
        faulthandler.dump_traceback_later(0.8 * seconds)  # into the log, which the test shows
        try:
            answer = True, getattr(_loaded(file), name)(*arguments)
            # Nobody goes on to the next function while another one is in this.
            dist.barrier()
        except BaseException:  # the test shows it
            answer = False, traceback.format_exc()
        faulthandler.cancel_dump_traceback_later()
        pipe.send_bytes(pickle.dumps(answer))
    dist.destroy_process_group()


_modules: dict[str, Any] = {}


def _loaded(file: str) -> Any:
    """Import a file, whatever pytest calls it; it finds the modules beside it."""
    if file not in _modules:
        sys.path.append(str(Path(file).parent))
        spec = importlib.util.spec_from_file_location(f"in_group_{Path(file).stem}_{len(_modules)}", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        _modules[file] = module
    return _modules[file]


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), sys.argv[2])
    # gloo's threads can linger at interpreter exit, and abort it.
    os._exit(0)
