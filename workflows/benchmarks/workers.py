"""Measure in processes of their own: each is told a line of JSON, and answers a line.

A compiler or a library may hang, or take its process with it, and the caches of one measurement must not be another's.
A script that is started with ``--worker`` calls `serve`. Workers end with the program that started them.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import Empty, Queue, SimpleQueue
from threading import Lock, Thread
from typing import Any, NoReturn

from volseg.lifetime import end_with_parent

Row = dict[str, Any]

LATE = "no answer within"

FAILURES = {"error", "out_of_memory"}
"""Keys of answers after which a worker is of no further use."""

IMPORT_S = 40
"""Seconds more that new workers have for their first row."""


class Worker:
    """A process of a script; start it from a thread that lives as long as it does."""

    def __init__(self, script: str | Path, environment: Mapping[str, str] | None = None) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `end`)
        self._process = subprocess.Popen(
            [sys.executable, str(script), "--worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            encoding="utf-8",
            env={**os.environ, **(environment or {})},
        )
        self._answers: Queue[Row] = Queue()
        self._listener = Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(json.loads(line))
        self._answers.put({"error": f"its process ended by {self._process.wait()}"})

    def tell(self, message: Row) -> None:
        """Send a message; `hear` says why it is not answered."""
        with suppress(BrokenPipeError):
            print(json.dumps(message), file=self._process.stdin, flush=True)

    def hear(self, seconds: float) -> Row | None:
        """Return the next answer; None if there is none within so many seconds."""
        try:
            return self._answers.get(timeout=max(0.0, seconds))
        except Empty:
            return None

    def read_log(self) -> str:
        """Return the end of what the process printed beside its answers."""
        self._log.seek(0)
        return self._log.read()[-3000:].decode("utf-8", "replace")

    def end(self) -> None:
        """End the process; a second call does nothing."""
        self._process.kill()
        self._process.wait()
        self._listener.join()
        for pipe in (self._process.stdin, self._process.stdout, self._log):
            with suppress(BrokenPipeError):  # a line that its reader did not live to read
                pipe.close()  # type: ignore[union-attr]


def ask(workers: Sequence[Worker], messages: Iterable[Row], seconds: float) -> list[Row]:
    """Tell each worker its message; return the answers.

    Where a worker has an ``error``, is ``out_of_memory`` or late, the others may wait for it forever: all end, and that
    answer is returned alone.
    """
    for worker, message in zip(workers, messages, strict=True):
        worker.tell(message)
    until = time.monotonic() + seconds
    answers: dict[Worker, Row] = {}
    while len(answers) < len(workers):
        for worker in [one for one in workers if one not in answers]:
            answer = worker.hear(0.02)
            if answer is None and time.monotonic() > until:
                answer = {"error": f"{LATE} {seconds:.0f} s"}
            if answer is not None and answer.keys() & FAILURES:
                log = {"log": worker.read_log()} if "error" in answer else {}
                for one in workers:
                    one.end()
                return [answer | log]
            if answer is not None:
                answers[worker] = answer
    return [answers[worker] for worker in workers]


class Group:
    """Workers of a script that measure row after row together; begun anew after a failure, and for another number."""

    def __init__(self, script: str | Path) -> None:
        self.script = script
        self.workers: list[Worker] = []

    def ask(self, row: Row, count: int, seconds: float) -> list[Row]:
        """Return the answer of each of ``count`` workers to a row; see `ask`."""
        if len(self.workers) != count:
            self.end()
            self.workers = [Worker(self.script) for _ in range(count)]
            seconds += IMPORT_S
        answers = ask(self.workers, number_jobs(row, count), seconds)
        if answers[0].keys() & FAILURES:
            self.workers = []
        return answers

    def end(self) -> None:
        """End the workers."""
        for worker in self.workers:
            worker.end()


def number_jobs(row: Row, count: int) -> list[Row]:
    """Return a row for each of several workers that make one group: see `take_place`."""
    port = find_port()
    return [{**row, "number": number, "processes": count, "port": port} for number in range(count)]


def take_place(job: Row) -> None:
    """Give this process the place that a launcher would, where it is one of several."""
    if job["processes"] > 1:
        number = str(job["number"])
        os.environ |= {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": str(job["processes"])}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(job["port"])}


def serve(answer: Callable[[Iterator[Row]], Iterable[Row]]) -> NoReturn:
    """Be a worker: write what ``answer`` makes of the messages; an exception is an answer too, and the last."""
    end_with_parent(os.getppid())
    warnings.simplefilter("ignore")
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever libraries print is no answer
    status = 0
    try:
        for told in answer(map(json.loads, sys.stdin)):
            print(json.dumps(told), file=output, flush=True)
    except BaseException as fault:  # whatever it is, it is the result
        told = {"error": f"{type(fault).__name__}: {fault}"[:2000], "trace": traceback.format_exc()[-3000:]}
        print(json.dumps(told), file=output, flush=True)
        status = 1
    # Not the interpreter's own end: NCCL waits there for recordings that are still alive.
    os._exit(status)


def share_gpus(
    jobs: Mapping[Any, Callable[[int], Any]],
    gpus: int,
    finish: Callable[[Any, Any], object] = lambda *_: None,
) -> dict[Any, Any]:
    """Run jobs, as many at a time as there are GPUs, each with the number of its own; return their results by name.

    ``finish`` takes each name and result when it is there, one after another. If a job fails, the others are run to
    their end, and the program ends with the names of those that failed.
    """
    free: SimpleQueue[int] = SimpleQueue()
    for gpu in range(gpus):
        free.put(gpu)
    lock, results, failed = Lock(), dict[Any, Any](), dict[Any, str]()

    def run(name: Any) -> None:
        gpu = free.get()
        try:
            result = jobs[name](gpu)
        except Exception as fault:  # one job must not lose the others
            failed[name] = f"{type(fault).__name__}: {fault}"
        else:
            with lock:
                results[name] = result
                finish(name, result)
        finally:
            free.put(gpu)

    with ThreadPoolExecutor(gpus) as threads:
        list(threads.map(run, jobs))
    if failed:
        sys.exit(f"failed: {failed}")
    return results


def find_port() -> int:
    """Return a port that is free."""
    with socket.create_server(("127.0.0.1", 0)) as asked:
        port: int = asked.getsockname()[1]
    return port


def count_gpus() -> int:
    """Return how many GPUs this program may use, one without a driver; who asks torch takes memory of the first."""
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return len(visible.split(","))
    if (driver := shutil.which("nvidia-smi")) is None:
        return 1
    listed = subprocess.run([driver, "--list-gpus"], capture_output=True, encoding="utf-8", check=True).stdout
    return len(listed.splitlines())
