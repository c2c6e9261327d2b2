"""Worker processes: each runs one volseg command, sees one GPU, and ends with the process that started it.

A launcher's processes form one job and end when one of them fails; a failing worker leaves the other workers running.
The processes exchange JSON, one message per line, over the standard streams of the worker. The worker's other output
goes to its log::

    pool.start("process 0", command, log, talks=True).send(order)
    for worker, message in pool.hear(): ...              # a message of None: the worker has ended

    channel = open_channel()                             # in the worker
    order = channel.receive()
    channel.send(answer)
"""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import IO, Any, Self, TypeVar

from volseg.launched import OF_JOB, OWN_LAUNCHER
from volseg.lifetime import describe_exit

logger = logging.getLogger(__name__)

NUM_LAST_LINES = 15
"""Lines of a log that an error quotes."""

SECONDS_BETWEEN_LOOKS = 0.1

Message = Any
Item = TypeVar("Item")


@dataclass(frozen=True)
class Channel:
    """Messages as lines of JSON over two files."""

    source: IO[str]
    target: IO[str]

    def send(self, message: Message) -> None:
        """Write a message; a message to a process that has ended is lost."""
        line = json.dumps(message) + "\n"
        with suppress(BrokenPipeError, ValueError):  # the file is closed
            self.target.write(line)
            self.target.flush()

    def receive(self) -> Message:
        """Return the next message; None after the last one, or if the sender died in the middle of one."""
        try:
            return json.loads(self.source.readline() or "null")
        except json.JSONDecodeError:
            return None

    def close(self) -> None:
        """Close both files."""
        for file in (self.source, self.target):
            with suppress(OSError):  # unsent bytes for a process that has ended
                file.close()


def open_channel() -> Channel:
    """Return the channel of a worker to its parent; other output, such as a library's, goes to the log."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return Channel(sys.stdin, answers)


@dataclass(frozen=True, kw_only=True, eq=False)
class Worker:
    """A worker process."""

    name: str
    """Used in messages."""
    gpu: str | None
    """Value of CUDA_VISIBLE_DEVICES; None for a worker on the CPU."""
    process: "subprocess.Popen[str]"
    log: Path
    log_begin: int
    """Size of the log in bytes before this worker started."""
    started: float
    channel: Channel | None

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.started

    def send(self, message: Message) -> None:
        """Send a message to a worker that has a channel."""
        assert self.channel is not None, f"{self.name} was started without a channel"
        self.channel.send(message)

    def describe_end(self, where: str = "its log") -> str:
        """Describe how the worker ended, with the last lines of its log; ``where`` names the log."""
        status = self.process.poll()
        how = "still runs" if status is None else describe_exit(status)
        written = self.log.read_bytes()[self.log_begin :].decode("utf-8", errors="replace")
        # A progress bar rewrites its line: keep the text after the last carriage return.
        lines = [line.rstrip("\r").rpartition("\r")[2] for line in written.split("\n")]
        last = [f"\n  | {line}" for line in lines if line.strip()][-NUM_LAST_LINES:]
        return f"{self.name} {how}" + (f"; the last lines of {where}:{''.join(last)}" if last else "")


class WorkerPool:
    """The workers of this process; the end of the block stops those that still run.

    Use the pool from a thread that lives as long as the workers: Linux ends a worker with the thread that started it.

    Parameters
    ----------
    count : int
        Number of concurrent workers, which share the cores.
    """

    def __init__(self, count: int = 1) -> None:
        self._count = count
        self._heard: SimpleQueue[tuple[Worker, Message]] = SimpleQueue()
        self._readers: list[Thread] = []
        self.running: list[Worker] = []
        """Running workers, in the order of their starts."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *fault: object) -> None:
        self.stop_workers()

    def start(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        *,
        gpu: str | None = None,
        talks: bool = False,
        variables: Mapping[str, str] | None = None,
    ) -> Worker:
        """Start a worker.

        Parameters
        ----------
        name : str
            Used in messages.
        command : sequence of str
            From `volseg.commands.run_module`.
        log : Path
            File to which the worker's output is appended.
        gpu : str, optional
            Value of CUDA_VISIBLE_DEVICES; empty for none, by default that of this process.
        talks : bool
            Whether the worker opens a channel.
        variables : mapping, optional
            Additional environment variables.

        Raises
        ------
        OSError
            If the system cannot start another process.
        """
        # The worker ends with the process of this number, even after SIGKILL: see volseg.lifetime. A worker of a
        # launched process is not a rank of the job.
        environment = {name: value for name, value in os.environ.items() if name not in OF_JOB}
        environment |= {"PYTHONUNBUFFERED": "1", OWN_LAUNCHER: str(os.getpid()), **(variables or {})}
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // self._count)))
        if gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpu
        with log.open("ab") as file:
            begin = file.tell()
            process = subprocess.Popen(  # noqa: S603 (our own interpreter and arguments; no shell)
                command,
                stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
                stdout=subprocess.PIPE if talks else file,
                stderr=file,
                env=environment,
                encoding="utf-8",
                # Otherwise the terminal's Ctrl-C reaches the worker as well as the forwarded one, and counts as a
                # second.
                start_new_session=True,
            )
        source, target = process.stdout, process.stdin
        worker = Worker(
            name=name,
            gpu=gpu,
            process=process,
            log=log,
            log_begin=begin,
            started=time.perf_counter(),
            channel=None if source is None or target is None else Channel(source, target),
        )
        self.running.append(worker)
        if talks:
            reader = Thread(target=self._read, args=(worker,), name=f"volseg {name}", daemon=True)
            reader.start()
            self._readers.append(reader)
        return worker

    def _read(self, worker: Worker) -> None:
        """Forward the messages of a worker, and its end."""
        assert worker.channel is not None
        while (message := worker.channel.receive()) is not None:
            self._heard.put((worker, message))
        worker.process.wait()
        self._heard.put((worker, None))

    def hear(self, seconds: float | None = None) -> tuple[Worker, Message] | None:
        """Return the next message of a worker with a channel; the message None means that the worker has ended.

        Parameters
        ----------
        seconds : float, optional
            Maximum wait; afterwards the result is None.
        """
        try:
            worker, message = self._heard.get(timeout=seconds)
        except Empty:
            return None
        if message is None:
            self.running.remove(worker)
            assert worker.channel is not None, "workers without a channel send no messages"
            worker.channel.close()
        return worker, message

    def take_ended(self) -> list[Worker]:
        """Return the workers that ended since the last call; for workers without a channel."""
        ended = [worker for worker in self.running if worker.process.poll() is not None]
        self.running = [worker for worker in self.running if worker not in ended]
        return ended

    def send_signal(self, number: int) -> None:
        """Forward a signal to all workers."""
        for worker in self.running:
            worker.process.send_signal(number)

    def stop_workers(self, *, at_once: bool = False) -> None:
        """End all workers and wait for them; with ``at_once`` kill them and all processes that they started."""
        for worker in self.running:
            if not at_once:
                worker.process.terminate()
            elif worker.process.returncode is None:  # otherwise its number may belong to another process now
                with suppress(ProcessLookupError, PermissionError):  # all have ended
                    os.killpg(worker.process.pid, signal.SIGKILL)
        for worker in self.running:
            worker.process.wait()
        for reader in self._readers:
            reader.join()
        for worker in self.running:
            if worker.channel is not None:
                worker.channel.close()
        self.running.clear()


def run_queue(
    items: Iterable[Item],
    gpus: Sequence[str | None],
    start: Callable[[WorkerPool, Item, str | None], Worker],
    find_signal: Callable[[], int | None],
    watch: Callable[[Item, Worker], None] | None = None,
) -> Generator[tuple[Item, Worker], None, None]:
    """Run each item in its own worker, one per GPU at a time; yield the items as they end.

    Parameters
    ----------
    items
        Items in starting order; each is requested when a GPU is free.
    gpus
        Values of CUDA_VISIBLE_DEVICES.
    start
        Starts the worker of an item on one of the GPUs.
    find_signal
        Returns the signal that this process received; it is forwarded once, and no item starts afterwards.
    watch
        Called repeatedly with each item whose worker runs.
    """
    waiting, free = iter(items), list(gpus)
    begun: dict[Worker, tuple[Item, str | None]] = {}
    is_passed_on = False
    with WorkerPool(len(gpus)) as pool:
        while True:
            while free and not find_signal() and (upcoming := list(islice(waiting, 1))):
                item, gpu = upcoming[0], free.pop(0)
                begun[start(pool, item, gpu)] = item, gpu
            if not pool.running:
                return
            number = find_signal()
            if number and not is_passed_on:
                is_passed_on = True
                logger.info("forwarding %s to %d process(es)", signal.Signals(number).name, len(pool.running))
                pool.send_signal(number)
            for worker in pool.take_ended():
                item, gpu = begun.pop(worker)
                free.append(gpu)
                yield item, worker
            if watch is not None:
                for worker, (item, _) in begun.items():
                    watch(item, worker)
            time.sleep(SECONDS_BETWEEN_LOOKS)
