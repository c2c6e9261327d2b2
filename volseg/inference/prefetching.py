"""Predict many cases: read the next cases and write the last ones during a computation.

::

    a thread ahead    prepare 2   prepare 3   prepare 4   ...
    the caller's             finish, predict 1   finish, predict 2   ...
    a thread behind                  write 1     write 2   ...

Decompression, resampling and compression release Python's lock, so threads suffice; a process would have to send each
volume. The model runs in the caller's thread, which receives signals and captures graphs.
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

Predict = Callable[[Iterable[Case]], Iterator[tuple[Mapping[str, Any], Prediction]]]
"""`Predictor.stream`, or a ``functools.partial`` of it with a batch size."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CaseOutcome:
    """A case in progress, and finally its outcome: a file or an error."""

    number: int
    case: Case
    """The input case, with paths."""
    prepared: Case | None = None
    prediction: Prediction | None = None
    file: Path | None = None
    """Return value of ``write``; None if the case failed."""
    fault: Exception | None = None
    """The error of a failed case."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the parts: ``read`` (and preprocessed), ``compute`` (to the label map on the file's grid), ``write``.
    Parts of different cases overlap. If volumes are predicted together, the first has the time of all."""

    def fail(self, fault: Exception) -> "CaseOutcome":
        """Return the case with the error ``fault``, whose tracebacks no longer hold the volumes."""
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
    ends: tuple[type[Exception], ...] = (),
) -> Iterator[CaseOutcome]:
    """Predict cases and yield their outcomes; reading, computing and writing overlap.

    An error of one case is its outcome; the other cases go on. If a batch of volumes fails, each volume is predicted
    again by itself, so that the failing case is named. Outcomes come in the order of the cases, as far as ``predict``
    keeps it, and only while a later case is computed. So a caller that records finished cases, to avoid repetition
    after a power cut, records them in ``write``. At most three cases are in memory, plus those that ``predict`` holds
    beyond one. Closing the generator, Ctrl-C and errors end the threads: a file in progress is completed, waiting work
    is dropped.

    Parameters
    ----------
    cases : iterable of Case
        Cases with paths; the next case is requested when there is room.
    prepare : callable
        Maps a case with paths to a preprocessed case, as `volseg.data.case_store.preprocessed.prepare`; runs in a
        thread.
    predict : callable
        Maps preprocessed cases to pairs of a case, the same object, and its `Prediction`: `Predictor.stream`.
    write : callable
        Maps a preprocessed case and its prediction, which is on the CPU, to the written file; runs in a thread.
    finish : callable, optional
        The rest of the preparation, in the caller's thread: work on the GPU, which no other thread may use.
    ends : tuple of exception types
        Errors of no single case, which end everything: a request to stop, a full disk. Earlier predictions are written
        and yielded, then the error is raised.
    """
    pending: list[Future[CaseOutcome]] = []
    ending: Exception | None = None
    with _thread("reading") as reader, _thread("writing") as writer:
        try:
            for work in _predict_each(_read_ahead(cases, prepare, reader, ends), finish, predict, ends):
                if pending:
                    yield pending.pop().result()
                pending.append(writer.submit(_write, [work], write, ends))
                del work  # or the volumes of a written case stay alive until the next one is computed
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
def _thread(name: str) -> Iterator[ThreadPoolExecutor]:
    """Yield a thread that is joined at the end in any case; waiting work is dropped."""
    thread = ThreadPoolExecutor(1, name)
    try:
        yield thread
    finally:
        thread.shutdown(wait=True, cancel_futures=True)


def _read_ahead(
    cases: Iterable[Case],
    prepare: Callable[[Case], Case],
    reader: ThreadPoolExecutor,
    ends: tuple[type[Exception], ...],
) -> Iterator[CaseOutcome]:
    """Yield prepared cases in order; the next case is in progress meanwhile."""
    waiting: deque[Future[CaseOutcome]] = deque()
    for number, case in enumerate(cases):
        waiting.append(reader.submit(_prepare, CaseOutcome(number=number, case=case), prepare, ends))
        if len(waiting) > 1:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _prepare(work: CaseOutcome, prepare: Callable[[Case], Case], ends: tuple[type[Exception], ...]) -> CaseOutcome:
    """Return a case after a part of its preparation, or with its error."""
    begin = time.perf_counter()
    try:
        prepared = prepare(work.case if work.prepared is None else work.prepared)
    except ends:
        raise
    except Exception as fault:  # any other error is this case's outcome
        return work.fail(fault)
    return replace(
        work, prepared=prepared, seconds={"read": work.seconds.get("read", 0.0) + time.perf_counter() - begin}
    )


class _Source:
    """The cases that a predictor takes, and those that it has not returned yet."""

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
        """Yield prepared cases; set failed cases aside."""
        while True:
            begin = time.perf_counter()
            try:
                work = next(self._read, None)
                if work is not None and work.prepared is not None and self._finish is not None:
                    work = _prepare(work, self._finish, self._ends)
            except BaseException as fault:  # not an error of the predictor, though it passes through
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
        """Yield the cases before ``number`` that could not be read."""
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
        if prediction.labels.is_cuda:  # copied here: a thread would wait behind the next case
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
    work = handed.pop()  # the executor keeps arguments alive for a moment after completion
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
