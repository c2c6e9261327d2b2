"""Supervision: every process of a job watches all others, so that none waits forever for one that hangs or died.

Once a second, a thread in each process writes the progress of its main thread to the job's store, and reads the
progress of the others. The hang may therefore be in any call: a collective of NCCL or gloo, a kernel that waits for
another GPU, a file system. The watched quantity is progress, not waiting time: processes may wait hours for a process
that reads cases, as long as that process advances. The thread ends its process, whatever the main thread does, when

- another process has failed (it writes the failure to the store before it ends): at once;
- another process has died silently, or sends no heartbeat for a fifth of the timeout, at least ``LEAST_SECONDS``
  (its machine is gone, or something stops it): the error names the process;
- no process has made progress for the timeout: the error lists the position of every rank;
- the store is gone, and this process still runs ``SECONDS_TO_LEAVE`` later;
- the store does not answer for as long as a process may send no heartbeat. A cut network closes no connection, and
  calls of the store have no timeout: a separate thread makes them.

After a failure that the job survives with other settings (``again``), no process ends for good: each process restarts
once it has read the failure.

Time counts only while this thread runs: a job that is stopped as a whole (SIGSTOP, a suspended machine) continues
afterwards. If only one of several processes is stopped, for example in a debugger, the others report a hang; set a
longer timeout for that.

Why not the backends' own timeouts: they count from the start of each call, so a long timeout never reports a hang and
a short one kills processes that wait for a reason; our own kernels have none; and none reports the position of each
rank.
"""

import json
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from volseg.lifetime import ENDED_SILENTLY, is_running
from volseg.parallel.processes.progress import Milestone, get_milestone
from volseg.parallel.processes.rendezvous import Store

LEAST_SECONDS = 20.0
"""Seconds without a heartbeat after which a process counts as dead; a machine under load may be that slow."""

SECONDS_TO_HEAR = 15.0
"""Seconds in which all processes read that they restart, before the process that keeps the store restarts."""

SECONDS_TO_LEAVE = 30.0
"""Seconds for a checkpoint after a signal; the launcher, and with it the store, may already be gone."""

NUM_FRAMES = 12
"""Stack frames of the main thread that a report of a hang shows."""

PROCESSES_PER_SECOND = 64
"""Above this number of processes, each polls less often: every process reads what every process writes."""


Answer = TypeVar("Answer")


class _NoAnswer(RuntimeError):  # noqa: N818  (caught like an error of the store)
    """The store neither answers nor fails."""


@dataclass(frozen=True, kw_only=True)
class Cause:
    """Cause of a job's end: the message of the first failed process, or the diagnosis of a silent one."""

    message: str
    is_own: bool
    """Whether this process reported the cause first."""
    lasts: bool = False
    """Whether another attempt would fail for the same cause."""
    again: bool = False
    """Whether all processes restart themselves."""
    hung: bool = False
    """Whether every process prints its stack."""


@dataclass(eq=False)
class Supervision:
    """Watch the other processes of a job, and report this process to them."""

    store: Store
    """Store of this attempt; nothing else uses this connection."""
    rank: int
    """Rank of this process."""
    members: Sequence[Mapping[str, Any]]
    """Description (``where``), ``machine`` and ``pid`` of each process."""
    timeout: float
    """Seconds without progress of any process."""
    end: Callable[[Cause, str], object]
    """Ends this process; receives the cause, and the stack of the main thread if it matters."""
    look: Callable[[], Milestone] = get_milestone
    """Returns the last step of this process."""
    keeps_store: bool = False
    """Whether the store dies with this process."""
    cause: Cause | None = field(init=False, default=None)
    _watched: float = field(init=False, default=0.0)  # seconds in which the thread ran
    _beat: int = field(init=False, default=0)
    _is_leaving: bool = field(init=False, default=False)
    _lost: float | None = field(init=False, default=None)
    _states: dict[int, dict[str, Any]] = field(init=False, default_factory=dict)
    # Of each process: time of the last heartbeat, and of the last progress.
    _seen: dict[int, tuple[float, float]] = field(init=False, default_factory=dict)
    _ending: threading.Event = field(init=False, default_factory=threading.Event)
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)  # one thread at a time calls the store

    def __post_init__(self) -> None:
        self.period = min(max(1.0, len(self.members) / PROCESSES_PER_SECOND), self.timeout / 10)
        self.longest_silence = min(max(self.timeout / 5, LEAST_SECONDS), self.timeout)
        self._main = threading.main_thread()
        self._publish()
        self._thread = threading.Thread(target=self._run, name="volseg supervision", daemon=True)
        self._thread.start()

    # Called by the main thread.

    def fail(self, message: str, *, lasts: bool = False, again: bool = False) -> Cause:
        """Report that this process ends with an error; return the cause of the job's end, possibly another error."""
        self._ending.set()  # the thread must not end the process while the main thread reports
        return self._decide(message, lasts=lasts, again=again)

    def part(self) -> None:
        """Confirm that this process restarts; the process that keeps the store waits for all confirmations."""
        with suppress(RuntimeError):  # no store: the other processes are gone, or will notice
            self._ask(lambda: self.store.set(f"heard/{self.rank}", ""))
            keys = [f"heard/{rank}" for rank in range(len(self.members))]
            end = time.monotonic() + SECONDS_TO_HEAR
            while self.keeps_store and not self._ask(lambda: self.store.check(keys)) and time.monotonic() < end:
                time.sleep(0.02)

    def list_silent(self, seconds: float) -> list[str]:
        """Return the descriptions of processes without a recent heartbeat."""
        heard = {rank: alive for rank, (alive, _) in self._seen.copy().items() if rank != self.rank}
        return [self.members[rank]["where"] for rank, alive in heard.items() if self._watched - alive > seconds]

    def leave(self) -> None:
        """Report that this process ends without an error."""
        self._is_leaving = True
        with suppress(RuntimeError):  # no store: no process waits for this one
            self._ask(self._publish)

    def stop(self, seconds: float = 10.0) -> None:
        """Stop the thread."""
        self._ending.set()
        self._thread.join(seconds)

    # Called by the thread.

    def _run(self) -> None:
        before = time.monotonic()
        while not self._ending.wait(self.period):
            now = time.monotonic()
            # Of a long gap in which this process was stopped, count only the usual pause.
            self._watched += min(now - before, 2 * self.period)
            before = now
            try:
                self._ask(self._exchange)
                cause = self._judge()
            except RuntimeError as fault:  # of the store
                self._miss_store(fault)
                continue
            self._lost = None
            if cause is not None and not self._ending.is_set():
                if cause.again:
                    self.part()
                self.end(cause, self._format_stack() if cause.hung else "")

    def _ask(self, question: Callable[[], Answer]) -> Answer:
        """Return the store's answer.

        Raises
        ------
        RuntimeError
            If the store cannot be reached, or does not answer within the longest silence (`_NoAnswer`).
        """
        answer: Future[Answer] = Future()

        def ask() -> None:
            try:
                with self._lock:
                    answer.set_result(question())
            except Exception as fault:  # raised by `result`
                answer.set_exception(fault)

        threading.Thread(target=ask, name="volseg store", daemon=True).start()
        # Counted in periods: one in which this process was stopped counts like any other.
        for _ in range(math.ceil(self.longest_silence / self.period)):
            with suppress(TimeoutError):
                return answer.result(self.period)
        raise _NoAnswer("the store does not answer")

    def _publish(self) -> None:
        reached = self.look()
        self._beat += 1
        state = {"beat": self._beat, "count": reached.count, "at": str(reached), "leaving": self._is_leaving}
        self.store.set(f"life/{self.rank}", json.dumps(state))

    def _exchange(self) -> None:
        """Write this process's state, and read the others'."""
        self._publish()
        ranks = range(len(self.members))
        keys = {rank: f"life/{rank}" for rank in ranks if rank in self._states or self.store.check([f"life/{rank}"])}
        values = self.store.multi_get(list(keys.values()))
        for rank, value in zip(keys, values, strict=True):
            state, old = json.loads(value), self._states.get(rank)
            alive, moved = self._seen.get(rank, (self._watched, self._watched))
            if old is None or state["beat"] != old["beat"]:
                alive = self._watched
            if old is None or state["count"] != old["count"]:
                moved = self._watched
            self._states[rank], self._seen[rank] = state, (alive, moved)

    def _judge(self) -> Cause | None:
        """Return the cause for which this process must end, if any."""
        if (told := self._ask(lambda: self._get("cause"))) is not None:
            return self._read_cause(told, is_own=False)
        staying = {rank: m for rank, m in enumerate(self.members) if not self._states.get(rank, {}).get("leaving")}
        if self._is_leaving or not staying:
            return None
        for rank, member in staying.items():
            silent = self._watched - self._seen.get(rank, (0.0, 0.0))[0]
            if self._is_dead(member) and not self._has_left(rank):
                return self._decide(
                    f"{member['where']} died silently, last seen at {self._step_of(rank)}; {ENDED_SILENTLY}"
                )
            if silent > self.longest_silence:
                return self._decide(
                    f"{member['where']} sends no heartbeat for {silent:.0f} s, last seen at "
                    f"{self._step_of(rank)}; its machine or network is down, or something stops the process"
                )
        stuck = self._watched - max(self._seen[rank][1] for rank in staying if rank in self._seen)
        if stuck <= self.timeout:
            return None
        everybody = "\n".join(f"  {member['where']}: {self._step_of(r)}" for r, member in staying.items())
        message = (
            f"no process has made progress for {stuck:.0f} s (parallel.timeout is "
            f"{self.timeout:g}):\n{everybody}\nA process that is behind the others, or at another place, blocks them; "
            "if a step really takes that long, raise parallel.timeout"
        )
        return self._decide(message, hung=True)

    def _decide(self, message: str, **kind: bool) -> Cause:
        """Write the cause if no process has written one; return the written cause."""
        if self.cause is None:
            holds = json.dumps({"message": message, "by": self.rank, **kind}).encode()
            with suppress(RuntimeError):  # no store to agree through
                mine = holds.decode()
                holds = self._ask(lambda: self.store.compare_set("cause", "", mine))
            self.cause = self._read_cause(holds)
        return self.cause

    def _read_cause(self, content: bytes, *, is_own: bool = True) -> Cause:
        said = json.loads(content)
        return Cause(is_own=said.pop("by") == self.rank and is_own, **said)

    def _miss_store(self, fault: RuntimeError) -> None:
        """Give the main thread time to end by itself after the store is lost, then end the process."""
        self._lost = self._watched if self._lost is None else self._lost
        if self._is_leaving or self._ending.is_set():
            return
        if isinstance(fault, _NoAnswer):
            message = (
                f"{self.members[self.rank]['where']} is cut off: the store of this job has not answered for "
                f"{self.longest_silence:.0f} s; the network to its launcher or first machine is down, or that machine "
                "hangs"
            )
        elif self._watched - self._lost > SECONDS_TO_LEAVE:
            first = str(fault).strip().partition("\n")[0]
            message = f"the store of this job is gone, and so is its launcher or first machine ({first})"
        else:
            return
        self.end(Cause(message=message, is_own=True), "")

    def _is_dead(self, member: Mapping[str, Any]) -> bool:
        """Return whether a process of this machine is dead; for other machines the answer is unknown."""
        return member["machine"] == self.members[self.rank]["machine"] and not is_running(member["pid"])

    def _has_left(self, rank: int) -> bool:
        """Return whether a dead process ended normally: it may have reported its end after the last poll."""
        told = self._ask(lambda: self._get(f"life/{rank}"))
        return told is not None and bool(json.loads(told)["leaving"])

    def _get(self, key: str) -> bytes | None:
        return self.store.get(key) if self.store.check([key]) else None

    def _step_of(self, rank: int) -> str:
        return self._states[rank]["at"] if rank in self._states else "its start"

    def _format_stack(self) -> str:
        """Format the stack of this process's main thread."""
        frame = sys._current_frames().get(self._main.ident or 0)
        return "".join(traceback.format_stack(frame, limit=None)[-NUM_FRAMES:]) if frame else ""


def name_machine() -> str:
    """Return a name that is equal for two processes if, and only if, each sees the other's process id."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux: treat every process as a machine of its own
        return f"process {os.getpid()}"
