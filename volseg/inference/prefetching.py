"""Many cases from files to label maps: the next ones are read and the last ones written while one is computed.

::

    threads ahead     prepare 2   prepare 3   prepare 4   ...
    the caller's             finish, predict 1   finish, predict 2   ...
    threads behind                   write 1     write 2   ...

Decompression, resampling and compression run outside Python's lock, so threads do: a process would have to send each
volume. The model runs in the caller's thread, which is where signals arrive and recordings are made.
"""

import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from volseg.fields import Case
from volseg.inference.original_grid import Prediction

__all__ = ["CaseOutcome", "overlapped"]

Predict = Callable[[Iterable[Case]], Iterator[tuple[Mapping[str, Any], Prediction]]]
"""`Predictor.stream`, or a ``functools.partial`` of it with a batch size."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CaseOutcome:
    """A case on its way, and in the end what became of it: a file, or what went wrong."""

    number: int
    case: Case
    """As it was given, with paths."""
    prepared: Case | None = None
    prediction: Prediction | None = None
    file: Path | None = None
    """What ``write`` returned; None where the case failed."""
    fault: Exception | None = None
    """Why it failed."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Of its parts: ``read`` (and preprocessed), ``compute`` (to the label map on the file's grid), ``write``. Parts of
    different cases overlap. Of volumes that were predicted together the first has the time of all."""

    def fail(self, fault: Exception) -> "CaseOutcome":
        """Return the case that ends with ``fault``, which no longer holds on to the volumes it arose from."""
        one: BaseException | None = fault
        while one is not None:
            traceback.clear_frames(one.__traceback__)
            one = one.__cause__ or one.__context__
        return replace(self, fault=fault, prepared=None, prediction=None)


def overlapped(
    cases: Iterable[Case],
    prepare: Callable[[Case], Case],
    predict: Predict,
    write: Callable[[Case, Prediction], Path],
    *,
    finish: Callable[[Case], Case] | None = None,
    ahead: int = 1,
    behind: int = 1,
    ends: tuple[type[Exception], ...] = (),
) -> Iterator[CaseOutcome]:
    """Predict cases and yield what became of each; reading, computing and writing overlap.

    One case's error is that case's outcome, and the others go on. Where volumes were predicted together and that
    failed, each is predicted again by itself, so that the one that fails is named. Outcomes come in the order of the
    cases, as far as ``predict`` keeps it, and each only while a later case is computed: who notes what is done, lest it
    be computed twice after a power cut, notes it in ``write``. There are never more than ``ahead + behind + 1`` cases
    in memory, and those that ``predict`` holds at a time beyond one. Closing the generator, Ctrl-C and errors end the
    threads: what is being written is written to its end, what has not begun is dropped.

    Parameters
    ----------
    cases : iterable of Case
        With paths; asked for the next one when there is room for it.
    prepare : callable
        From a case with paths to a preprocessed one, as `volseg.data.preprocessed.prepare`; runs in ``ahead`` threads.
    predict : callable
        From preprocessed cases to pairs of a case, the same object, and its `Prediction`: `Predictor.stream`.
    write : callable
        From a preprocessed case and its prediction, which lies on the CPU, to the file that was written; runs in
        ``behind`` threads.
    finish : callable, optional
        The rest of the preparation, in the caller's thread: what works on the GPU, on which no other thread may work.
    ahead, behind : int
        Cases that are read, or are waiting, before the one that is computed, and written after it; at least 1.
    ends : tuple of exception types
        Errors that are no case's own and end everything: a request to stop, a full disk. What was predicted before is
        written and delivered, then the error is raised.
    """
    if min(ahead, behind) < 1:
        raise ValueError(f"ahead and behind count cases, at least 1 each, got {ahead} and {behind}")
    pending: deque[Future[CaseOutcome]] = deque()
    ending: Exception | None = None
    with _threads("reading", ahead) as readers, _threads("writing", behind) as writers:
        try:
            for work in _predict_each(_read_ahead(cases, prepare, readers, ahead, ends), finish, predict, ends):
                while pending and (len(pending) >= behind or pending[0].done()):
                    yield pending.popleft().result()
                pending.append(writers.submit(_write, [work], write, ends))
                del work  # or the volumes of a case that is written live on until the next one is computed
        except ends as fault:
            ending = fault
        for future in pending:
            try:
                yield future.result()
            except ends as fault:
                ending = ending or fault
    if ending is not None:
        raise ending


@contextmanager
def _threads(name: str, count: int) -> Iterator[ThreadPoolExecutor]:
    """Give threads that are joined at the end, whatever it is; what they have not begun then is dropped."""
    threads = ThreadPoolExecutor(count, name)
    try:
        yield threads
    finally:
        threads.shutdown(wait=True, cancel_futures=True)


def _read_ahead(
    cases: Iterable[Case],
    prepare: Callable[[Case], Case],
    readers: ThreadPoolExecutor,
    ahead: int,
    ends: tuple[type[Exception], ...],
) -> Iterator[CaseOutcome]:
    """Yield cases in order, prepared; ``ahead`` of them are under way when one is asked for."""
    waiting: deque[Future[CaseOutcome]] = deque()
    for number, case in enumerate(cases):
        waiting.append(readers.submit(_prepare, CaseOutcome(number=number, case=case), prepare, ends))
        if len(waiting) > ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _prepare(work: CaseOutcome, prepare: Callable[[Case], Case], ends: tuple[type[Exception], ...]) -> CaseOutcome:
    """Return a case after a part of its preparation, or with what went wrong in it."""
    begin = time.perf_counter()
    try:
        prepared = prepare(work.case if work.prepared is None else work.prepared)
    except ends:
        raise
    except Exception as fault:  # whatever it is, it is this case's, and told as such
        return work.fail(fault)
    return replace(
        work, prepared=prepared, seconds={"read": work.seconds.get("read", 0.0) + time.perf_counter() - begin}
    )


class _Source:
    """The cases that a predictor takes, and those of them that it has not given back."""

    def __init__(
        self,
        read: Iterator[CaseOutcome],
        finish: Callable[[Case], Case] | None = None,
        ends: tuple[type[Exception], ...] = (),
    ) -> None:
        self._read, self._finish, self._ends = read, finish, ends
        self.failed: deque[CaseOutcome] = deque()
        self.taken: dict[int, CaseOutcome] = {}
        self.waited = 0.0
        self.is_at_end = False
        self.fault: BaseException | None = None

    def take(self) -> Iterator[Case]:
        """Yield prepared cases; set aside those that could not be read."""
        while True:
            begin = time.perf_counter()
            try:
                work = next(self._read, None)
                if work is not None and work.prepared is not None and self._finish is not None:
                    work = _prepare(work, self._finish, self._ends)
            except BaseException as fault:  # not of the predictor, through which it goes
                self.fault = fault
                raise
            self.waited += time.perf_counter() - begin
            if work is None:
                self.is_at_end = True
                return
            if work.prepared is None:
                self.failed.append(work)
                continue
            prepared = work.prepared
            self.taken[id(prepared)] = work
            del work
            yield prepared
            del prepared

    def fail_before(self, number: int) -> Iterator[CaseOutcome]:
        """Yield what could not be read before case ``number``."""
        while self.failed and self.failed[0].number < number:
            yield self.failed.popleft()


def _predict_each(
    read: Iterator[CaseOutcome],
    finish: Callable[[Case], Case] | None,
    predict: Predict,
    ends: tuple[type[Exception], ...],
) -> Iterator[CaseOutcome]:
    """Yield cases with their predictions or faults."""
    source = _Source(read, finish, ends)
    while not source.is_at_end:
        try:
            for work in _predict_some(source, predict, source.take()):
                yield from source.fail_before(work.number)
                yield work
                del work
        except ends:
            raise
        except Exception as fault:
            if fault is source.fault or not source.taken:
                raise
            begun = sorted(source.taken.values(), key=lambda work: work.number)
            source.taken.clear()
            if len(begun) == 1:
                yield from source.fail_before(begun[0].number)
                yield begun.pop().fail(fault)
                continue
            while begun:
                work = begun.pop(0)
                yield from source.fail_before(work.number)
                yield _predict_alone(work, predict, ends)
                del work
    yield from source.failed


def _predict_some(source: _Source, predict: Predict, cases: Iterable[Case]) -> Iterator[CaseOutcome]:
    begin, source.waited = time.perf_counter(), 0.0
    for prepared, prediction in predict(cases):
        work = source.taken.pop(id(prepared))
        if prediction.labels.is_cuda:  # here, where the device is at it: a thread would wait behind the next case
            prediction = replace(prediction, labels=prediction.labels.cpu())
        seconds = {**work.seconds, "compute": time.perf_counter() - begin - source.waited}
        work = replace(work, prediction=prediction, seconds=seconds)
        del prepared, prediction
        yield work
        del work
        begin, source.waited = time.perf_counter(), 0.0


def _predict_alone(work: CaseOutcome, predict: Predict, ends: tuple[type[Exception], ...]) -> CaseOutcome:
    source = _Source(iter([work]))
    try:
        (done,) = _predict_some(source, predict, source.take())
    except ends:
        raise
    except Exception as fault:
        return work.fail(fault)
    return done


def _write(
    handed: list[CaseOutcome],
    write: Callable[[Case, Prediction], Path],
    ends: tuple[type[Exception], ...],
) -> CaseOutcome:
    work = handed.pop()  # the executor keeps arguments for a moment longer than it takes to say that it is done
    if work.prepared is None or work.prediction is None:
        return work
    begin = time.perf_counter()
    try:
        file = write(work.prepared, work.prediction)
    except ends:
        raise
    except Exception as fault:
        return work.fail(fault)
    seconds = {**work.seconds, "write": time.perf_counter() - begin}
    return replace(work, file=file, prepared=None, prediction=None, seconds=seconds)
