"""Every process of a job watches all of them, so that none waits for ever for one that hangs or is gone.

A thread in each process writes once a second to the job's store how far its main thread has come, and reads the same of
the others. So what hangs may be anything: a collective of NCCL or gloo, one of our own kernels that waits for another
GPU, a file system. What is watched is progress, and not how long somebody waits: processes wait for hours for one that
reads cases, as long as that one goes on. It ends this process, by itself and whatever the main thread does, when

- another process has failed (it says so in the store before it ends): at once;
- another process has gone without a word, or sends no heartbeat for a fifth of the timeout, at least
  ``LEAST_SECONDS`` (its machine is gone, or something holds it): its name is told;
- nobody has made any progress for the timeout: where everybody is is told;
- the store is gone, and ``SECONDS_TO_LEAVE`` later this process is still there;
- the store does not answer for as long as a process may send no heartbeat. A cut network closes no connection, and
  calls of the store have no timeout: another thread makes them.

A failure after which the job goes on in another way (``again``) ends nobody for good: each process begins anew, once it
has heard of it.

Time counts only while this thread runs: a job that was held as a whole (SIGSTOP, a suspended machine) goes on as if
nothing had been. Holding one of several processes, in a debugger too, is what the others take for a hang; who does so
sets a longer timeout.

Why not the backends' own timeouts: they count from the begin of each call, so that a long one never tells of a hang and
a short one kills processes that wait with reason; kernels of our own have none; and none says who is where.
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
from dataclasses import dataclass
from typing import Any, TypeVar

from volseg.lifetime import ENDED_SILENTLY, is_running
from volseg.parallel.processes.progress import Milestone, find_milestone
from volseg.parallel.processes.rendezvous import Store

__all__ = ["Cause", "Supervision"]

LEAST_SECONDS = 20.0
"""Without a heartbeat after which a process is taken for gone; a machine under load may be that slow."""

SECONDS_TO_HEAR = 15.0
"""For all processes to hear that they begin anew, before the one that keeps the store does."""

SECONDS_TO_LEAVE = 30.0
"""For a checkpoint after a signal, which may come when the launcher, and with it the store, has gone."""

NUM_FRAMES = 12
"""Of the main thread that are shown of a process that hangs."""

PROCESSES_PER_SECOND = 64
"""Above as many, each looks less often: all read what all write."""


Answer = TypeVar("Answer")


class _NoAnswer(RuntimeError):  # noqa: N818  (caught like an error of the store)
    """The store neither answers nor fails."""


@dataclass(frozen=True, kw_only=True)
class Cause:
    """Why a job ends: what its first process that failed said, or what was found about one that says nothing."""

    message: str
    is_own: bool
    """Whether this process was the first to say so."""
    lasts: bool = False
    """Whether another attempt would end by it too."""
    again: bool = False
    """Whether all processes begin anew by themselves."""


class Supervision:
    """What this process knows of the others, and tells them.

    Parameters
    ----------
    store : Store
        Of this attempt; nobody else uses this connection.
    rank : int
        Of this process.
    members : sequence of mapping
        ``where`` each process is, and its ``host`` and ``pid``.
    timeout : float
        Seconds without progress of anybody.
    end : callable
        Ends this process, with the cause and where its main thread is, if that matters.
    look : callable
        Returns what this process did last.
    keeps_store : bool
        Whether the store goes with this process.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        members: Sequence[Mapping[str, Any]],
        timeout: float,
        end: Callable[[Cause, str], object],
        look: Callable[[], Milestone] = find_milestone,
        *,
        keeps_store: bool = False,
    ) -> None:
        self.store = store
        self.rank = rank
        self.members = members
        self.timeout = timeout
        self.end = end
        self.look = look
        self.keeps_store = keeps_store
        self.period = min(max(1.0, len(members) / PROCESSES_PER_SECOND), timeout / 10)
        self.longest_silence = min(max(timeout / 5, LEAST_SECONDS), timeout)
        self.cause: Cause | None = None
        self._beat = 0
        self._is_leaving = False
        self._ending = threading.Event()
        self._main = threading.main_thread()
        self._watched = 0.0  # seconds in which this thread ran
        self._states: dict[int, dict[str, Any]] = {}
        self._seen: dict[int, tuple[float, float]] = {}  # when each was last alive, and last got on
        self._lost: float | None = None
        self._lock = threading.Lock()  # one at a time talks to the store
        self._publish()
        self._thread = threading.Thread(target=self._run, name="volseg supervision", daemon=True)
        self._thread.start()

    # What the main thread calls.

    def fail(self, message: str, *, lasts: bool = False, again: bool = False) -> Cause:
        """Tell the others that this process ends by an error; return what the job ends by, which may be another's."""
        self._ending.set()  # the thread must not end what the main thread is about to say
        return self._decide(message, lasts=lasts, again=again)

    def part(self) -> None:
        """Say that this process has heard that all begin anew; who keeps the store waits until all others have."""
        with suppress(RuntimeError):  # no store: the others have gone, or will miss it
            self._ask(lambda: self.store.set(f"heard/{self.rank}", ""))
            keys = [f"heard/{rank}" for rank in range(len(self.members))]
            end = time.monotonic() + SECONDS_TO_HEAR
            while self.keeps_store and not self._ask(lambda: self.store.check(keys)) and time.monotonic() < end:
                time.sleep(0.02)

    def list_silent(self, seconds: float) -> list[str]:
        """Return where the processes are of which nothing was heard for so long."""
        heard = {rank: alive for rank, (alive, _) in self._seen.copy().items() if rank != self.rank}
        return [self.members[rank]["where"] for rank, alive in heard.items() if self._watched - alive > seconds]

    def leave(self) -> None:
        """Tell the others that this process ends well, and need not be missed."""
        self._is_leaving = True
        with suppress(RuntimeError):  # no store: nobody misses this process
            self._ask(self._publish)

    def stop(self, seconds: float = 10.0) -> None:
        """End the thread."""
        self._ending.set()
        self._thread.join(seconds)

    # What the thread does.

    def _run(self) -> None:
        before = time.monotonic()
        while not self._ending.wait(self.period):
            now = time.monotonic()
            # Of a long gap, in which this process was held, only what a pause takes counts.
            self._watched += min(now - before, 2 * self.period)
            before = now
            try:
                self._ask(self._publish_and_read)
                cause, show_stack = self._judge()
            except RuntimeError as fault:  # of the store
                self._miss_store(fault)
                continue
            self._lost = None
            if cause is not None and not self._ending.is_set():
                if cause.again:
                    self.part()
                self.end(cause, self._format_stack() if show_stack else "")

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
        # In periods: one in which this process was held counts like any other.
        for _ in range(math.ceil(self.longest_silence / self.period)):
            with suppress(TimeoutError):
                return answer.result(self.period)
        raise _NoAnswer("the store does not answer")

    def _publish_and_read(self) -> None:
        self._publish()
        self._read()

    def _publish(self) -> None:
        reached = self.look()
        self._beat += 1
        state = {"beat": self._beat, "count": reached.count, "at": str(reached), "leaving": self._is_leaving}
        self.store.set(f"life/{self.rank}", json.dumps(state))

    def _read(self) -> None:
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

    def _judge(self) -> tuple[Cause | None, bool]:
        """Return why this process must end, if it must, and whether to show where it is."""
        if (told := self._ask(lambda: self._get("cause"))) is not None:
            said = json.loads(told)
            cause = Cause(message=said["message"], is_own=False, lasts=said["lasts"], again=said["again"])
            return cause, said["hung"]
        staying = {rank: m for rank, m in enumerate(self.members) if not self._states.get(rank, {}).get("leaving")}
        if self._is_leaving or not staying:
            return None, False
        for rank, member in staying.items():
            silent = self._watched - self._seen.get(rank, (0.0, 0.0))[0]
            if self._is_dead(member) and not self._has_left(rank):
                return self._decide(
                    f"{member['where']} is gone without a word, last seen at {self._step_of(rank)}; {ENDED_SILENTLY}"
                ), False
            if silent > self.longest_silence:
                return self._decide(
                    f"{member['where']} sends no heartbeat for {silent:.0f} s, last seen at {self._step_of(rank)}; "
                    "its machine or the network to it is gone, or something holds it"
                ), False
        stuck = self._watched - max(self._seen[rank][1] for rank in staying if rank in self._seen)
        if stuck <= self.timeout:
            return None, False
        everybody = "\n".join(f"  {member['where']}: {self._step_of(r)}" for r, member in staying.items())
        message = (
            f"nobody has made progress for {stuck:.0f} s (parallel.timeout is {self.timeout:g}):\n{everybody}\n"
            "The one that is behind the others, or elsewhere, holds them up; if a step really takes that long, set "
            "parallel.timeout to more"
        )
        return self._decide(message, hung=True), True

    def _decide(self, message: str, *, hung: bool = False, lasts: bool = False, again: bool = False) -> Cause:
        """Put down the cause if nobody has; return the one that holds."""
        if self.cause is None:
            mine = json.dumps({"message": message, "hung": hung, "lasts": lasts, "again": again, "by": self.rank})
            try:
                holds = json.loads(self._ask(lambda: self.store.compare_set("cause", "", mine)))
            except RuntimeError:  # no store: nobody to agree with
                holds = json.loads(mine)
            is_own = holds["by"] == self.rank
            self.cause = Cause(message=holds["message"], is_own=is_own, lasts=holds["lasts"], again=holds["again"])
        return self.cause

    def _miss_store(self, fault: RuntimeError) -> None:
        """Give the main thread time to leave by itself, and end it if it does not."""
        if self._lost is None:
            self._lost = self._watched
        if self._is_leaving or self._ending.is_set():
            return
        own = self.members[self.rank]["where"]
        if isinstance(fault, _NoAnswer):
            message = (
                f"{own} is cut off: the store of this job gives no answer for {self.longest_silence:.0f} s; the "
                "network to its launcher or first machine is gone, or that machine hangs"
            )
            self.end(Cause(message=message, is_own=True), "")
        elif self._watched - self._lost > SECONDS_TO_LEAVE:
            message = f"the store of this job is gone, and with it its launcher or first machine ({_first_line(fault)})"
            self.end(Cause(message=message, is_own=True), "")

    def _is_dead(self, member: Mapping[str, Any]) -> bool:
        """Tell whether a process of this machine is gone; of others that is not known."""
        return member["machine"] == self.members[self.rank]["machine"] and not is_running(member["pid"])

    def _has_left(self, rank: int) -> bool:
        """Tell whether a process that is gone has left: it may have said so since its state was last read."""
        told = self._ask(lambda: self._get(f"life/{rank}"))
        return told is not None and bool(json.loads(told)["leaving"])

    def _get(self, key: str) -> bytes | None:
        return self.store.get(key) if self.store.check([key]) else None

    def _step_of(self, rank: int) -> str:
        return self._states[rank]["at"] if rank in self._states else "its start"

    def _format_stack(self) -> str:
        """Return where the main thread of this process is."""
        frame = sys._current_frames().get(self._main.ident or 0)
        return "".join(traceback.format_stack(frame, limit=None)[-NUM_FRAMES:]) if frame else ""


def name_machine() -> str:
    """Return a name that two processes have in common if, and only if, each can see the other by its id."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # another system than Linux: every process is on a machine of its own
        return f"process {os.getpid()}"


def _first_line(fault: BaseException) -> str:
    return str(fault).strip().partition("\n")[0]
