"""Measure in worker processes, which read messages and answer them (``volseg.parallel.processes.workers``).

A compiler or a library may hang or end its process, and measurements must not share caches.
A script that is started with ``--worker`` calls `serve`. Workers end with the program that started them.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import Any, NoReturn

from torch.distributed.elastic.utils.distributed import get_free_port

from volseg.lifetime import end_with_parent
from volseg.parallel.processes.workers import WorkerPool, open_channel

Row = dict[str, Any]

LATE = "no answer within"

FAILURES = {"error", "out_of_memory"}
"""Keys of answers after which a worker must end."""

IMPORT_S = 40
"""Additional seconds of new workers for their first row."""


class Worker:
    """A process that runs a script; start it from a thread that lives as long as the process."""

    def __init__(self, script: str | Path, environment: Mapping[str, str] | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._pool = WorkerPool()
        command, log = [sys.executable, str(script), "--worker"], Path(self._folder.name) / "log"
        self._worker = self._pool.start("worker", command, log, talks=True, variables=environment)

    def tell(self, message: Row) -> None:
        """Send a message; if the process has ended, `hear` returns an error."""
        self._worker.send(message)

    def hear(self, seconds: float) -> Row | None:
        """Return the next answer; None if there is none within so many seconds."""
        heard = self._pool.hear(max(0.0, seconds))
        if heard is None:
            return None
        _, message = heard
        return {"error": f"its process ended by {self._worker.process.returncode}"} if message is None else message

    def read_log(self) -> str:
        """Return the end of the process's other output."""
        return self._worker.log.read_text(encoding="utf-8", errors="replace")[-3000:]

    def end(self) -> None:
        """End the process and its children; a second call does nothing."""
        self._pool.stop_workers(at_once=True)
        self._folder.cleanup()


def ask(workers: Sequence[Worker], messages: Iterable[Row], seconds: float) -> list[Row]:
    """Send each worker its message; return the answers.

    If a worker answers with ``error`` or ``out_of_memory``, or is late, all workers end, because the others may wait
    for it forever. Only that answer is returned.
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


def number_jobs(row: Row, count: int) -> list[Row]:
    """Return a row for each of several workers that make one group: see `take_place`."""
    port = get_free_port()
    return [{**row, "number": number, "processes": count, "port": port} for number in range(count)]


def take_place(job: Row) -> None:
    """Set the environment variables of a launcher if this process is one of several."""
    if job["processes"] > 1:
        number = str(job["number"])
        os.environ |= {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": str(job["processes"])}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(job["port"])}


def serve(answer: Callable[[Iterator[Row]], Iterable[Row]]) -> NoReturn:
    """Send what ``answer`` makes of the messages; the last message is the exception, if there is one."""
    end_with_parent(os.getppid())
    warnings.simplefilter("ignore")
    channel = open_channel()
    status = 0
    try:
        for made in answer(iter(channel.receive, None)):
            channel.send(made)
    except BaseException as fault:  # the script's result is the error
        channel.send({"error": f"{type(fault).__name__}: {fault}"[:2000], "trace": traceback.format_exc()[-3000:]})
        status = 1
    # Not the interpreter's own end: NCCL waits there for recordings that are still alive.
    os._exit(status)


def share_gpus(
    jobs: Mapping[Any, Callable[[int], Any]], gpus: int, finish: Callable[[Any, Any], object] = lambda *_: None
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


def count_gpus() -> int:
    """Return the number of usable GPUs, 1 without a driver; torch is not asked, because it would take memory of one."""
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return len(visible.split(","))
    if (driver := shutil.which("nvidia-smi")) is None:
        return 1
    listed = subprocess.run([driver, "--list-gpus"], capture_output=True, encoding="utf-8", check=True).stdout
    return len(listed.splitlines())
