"""Progress of this process, which its supervision reads, and long work of a group whose ranks exchange theirs."""

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from volseg import errors
from volseg.errors import ParallelError, VolsegError


@dataclass(frozen=True, slots=True)
class Milestone:
    """Last reported step of a process."""

    count: int
    """Number of reports. Concurrent reports of threads may be counted once: only a change of the number matters."""
    phase: str
    epoch: int | None
    """Epoch, counted from 1."""
    item: int | str | None
    """Batch, counted from 1, or case."""

    def __str__(self) -> str:
        epoch = "" if self.epoch is None else f", epoch {self.epoch}"
        item = f"batch {self.item}" if isinstance(self.item, int) else self.item
        return f"{self.phase}{epoch}" + ("" if item is None else f", {item}")


_last = Milestone(0, "start", None, None)


def report_progress(phase: str, epoch: int | None = None, item: int | str | None = None) -> None:
    """Report progress: the current phase, and the position in it.

    Call it in every loop of a job: for a batch, a case that was read or predicted, a recording. It costs less than a
    microsecond. A process that reports nothing for ``parallel.timeout`` counts as hanging if no other process reports
    either.

    Parameters
    ----------
    phase
        A word or two, such as ``"train"`` or ``"read"``.
    epoch, item
        Position in the phase: an epoch and a batch, both counted from 1, or the name of a case.
    """
    global _last
    _last = Milestone(_last.count + 1, phase, epoch, item)


def get_milestone() -> Milestone:
    """Return the last report."""
    return _last


# Run long work in every process of a group while exchanging progress with the other ranks.
#
# A collective in which a process waits for hours would run into the group's timeout, and would report a failure
# elsewhere only at the end. Here a thread beside the work exchanges short rounds of messages: which processes still
# work, and their progress. So no process waits longer than a round; all processes learn of the first failure or stop
# within about a second; and a process that dies breaks the round. Messages are JSON and integers.


Heard = Callable[[list[list[int]]], object]

_WORKING, _DONE, _STOPPED, _FAILED = range(4)
_LONGEST_SECONDS = 1.0
"""Longest interval between two rounds; during the first seconds the interval is a tenth of the elapsed time."""


def exchange(message: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Return every process's message, by its rank in the group.

    Parameters
    ----------
    message : Any
        A JSON value; tuples come back as lists, and keys as text. Numbers keep every bit, including NaN.
    group : ProcessGroup or None
        A gloo group whose processes all call this; None for this process only.
    """
    text = json.dumps(message)
    if group is None:
        return [json.loads(text)]
    content = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    lengths = [length for (length,) in _gather([len(content)], group)]
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")
    padded[: len(content)] = content
    received = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(received, padded, group=group)
    return [json.loads(bytes(one[:length].numpy())) for one, length in zip(received, lengths, strict=True)]


@dataclass(eq=False)
class Rounds:
    """Progress of this process's work, and of the others', during the work; see `run_together`."""

    group: dist.ProcessGroup | None
    num_counts: int
    heard: Heard | None
    stops: type[Exception] | None
    poll: Callable[[], object] | None
    messages: list[Any] = field(init=False, default_factory=list)
    """Every process's result, once all are done."""
    failure: Exception | None = field(init=False, default=None)
    """Error or stop of another process, or error of the listener."""

    def __post_init__(self) -> None:
        self._counts = [0] * self.num_counts
        self._state, self._message = _WORKING, None
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        if self.group is not None:
            self._thread = threading.Thread(target=self._take_part, name="rounds", daemon=True)
            self._thread.start()

    def count(self, which: int = 0) -> None:
        """Count one more item of a kind as done; any thread may call this."""
        with self._lock:
            self._counts[which] += 1
            counts = [list(self._counts)]
        if self.group is None:
            self._tell(counts)

    def check(self) -> None:
        """Raise, between two parts of the work, if a process failed or stopped.

        Raises
        ------
        Exception
            That process's error if it is volseg's or a stop, otherwise a ParallelError that names the process.
        """
        if self.poll is not None:
            self.poll()
        if self.failure is not None:
            raise self.failure

    def end(self, state: int, message: Any) -> None:
        """Report the end of the work to the others; return when they no longer need this process."""
        with self._lock:
            self._state, self._message = state, message
        self._ended.set()
        if self._thread is None:
            self.messages = exchange(message, None) if state == _DONE else []
            return
        while self._thread.is_alive():
            self._thread.join(0.05)
            if state == _DONE and self._is_stopped():
                with self._lock:  # the others still work; if they have just ended too, this is late but harmless
                    self._state, self._message = _STOPPED, None

    def _is_stopped(self) -> bool:
        """Return whether this process was asked to stop while it waits for the others."""
        if self.poll is None or self.stops is None:
            return False
        try:
            self.poll()
        except self.stops:
            return True
        return False

    def _take_part(self) -> None:
        try:
            self._run_rounds()
        except VolsegError as fault:
            self.failure = fault
        except Exception as fault:  # any error of a broken connection or a listener must end the work
            self.failure = ParallelError(
                "a process of the group disconnected, so this process stops too; another process may have been "
                f"killed: {fault}"
            )
            self.failure.__cause__ = fault  # `is_peer_gone` recognises it by this type

    def _run_rounds(self) -> None:
        begun = time.monotonic()
        while True:
            with self._lock:
                state, message, counts = self._state, self._message, list(self._counts)
            gathered = _gather([state, *counts], self.group)
            self._tell([told[1:] for told in gathered])
            states = [told[0] for told in gathered]
            if max(states) >= _STOPPED or _WORKING not in states:
                break
            self._ended.wait(min(_LONGEST_SECONDS, max(0.002, (time.monotonic() - begun) / 10)))
        messages = exchange(message if state != _WORKING else None, self.group)
        if max(states) < _STOPPED:
            self.messages = messages
        else:
            first = states.index(max(states))
            self.failure = self._explain(states[first], messages[first], first)

    def _tell(self, counts: list[list[int]]) -> None:
        """Pass the counts to the listener; an error in the listener must not keep the others from their round."""
        if self.heard is None or self.failure is not None:
            return
        try:
            self.heard(counts)
        except Exception as fault:  # raised by the work's next check
            self.failure = fault

    def _explain(self, state: int, message: Any, number: int) -> Exception:
        """Return another process's error in the form in which this process raises it."""
        assert self.group is not None
        where = f"process {dist.get_global_rank(self.group, number)}"
        if state == _STOPPED:
            assert self.stops is not None
            return self.stops(f"{where} stopped")
        return told_error(message, where)


def run_together(
    group: dist.ProcessGroup | None,
    work: Callable[[Rounds], Any],
    *,
    num_counts: int = 1,
    heard: Heard | None = None,
    stops: type[Exception] | None = None,
    poll: Callable[[], object] | None = None,
) -> list[Any]:
    """Run this process's part of some work, and return the results of all processes.

    Parameters
    ----------
    group : ProcessGroup or None
        A gloo group without other use during the work; all its processes call this. None for this process only.
    work : callable
        Takes the `Rounds`, calls their ``check`` between two parts of the work, and returns a JSON value.
    num_counts : int
        Number of kinds of items that the work counts.
    heard : callable, optional
        Called by a thread with the counts of every process, by its rank, once per round: a heartbeat.
    stops : type of exception, optional
        Raised by work that ends early without a failure; it is raised in every process.
    poll : callable, optional
        Raises ``stops`` if this process is asked to stop; called by ``check``, and while the process waits for others.

    Raises
    ------
    Exception
        The work's error, in the process that raised it. The others raise the same error if it is volseg's, otherwise a
        ParallelError that names the process and its error.
    """
    rounds = Rounds(group, num_counts, heard, stops, poll)
    try:
        result = work(rounds)
        rounds.check()
        json.dumps(result)  # a result that is not JSON fails here, as an error of the work
    except BaseException as fault:
        has_stopped = stops is not None and isinstance(fault, stops)
        rounds.end(_STOPPED if has_stopped else _FAILED, describe_error(fault))
        raise
    rounds.end(_DONE, result)
    if not rounds.messages:  # after all results a listener's error would end this process only
        assert rounds.failure is not None, "rounds that neither failed nor brought messages"
        raise rounds.failure
    return rounds.messages


def describe_error(fault: BaseException) -> list[str]:
    """Format an error as a message: its type and its text."""
    return [type(fault).__name__, str(fault)]


def told_error(message: Sequence[str], where: str) -> Exception:
    """Rebuild the error that ``describe_error`` described in another process."""
    name, text = message
    if name in errors.__all__:
        error: Exception = getattr(errors, name)(text)
        error.add_note(f"(first in {where})")
        return error
    return ParallelError(f"{where} failed, so this process stops too: {name}: {text}")


def _gather(numbers: Sequence[int], group: dist.ProcessGroup | None) -> list[list[int]]:
    """Return every process's integers."""
    own = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    received = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(received, own, group=group)
    return [one.tolist() for one in received]
