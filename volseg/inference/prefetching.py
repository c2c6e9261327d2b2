"""Predict many cases: read the next cases and write the previous ones during a computation.

::

    a thread ahead    prepare 2   prepare 3   prepare 4   ...
    the caller's             finish, predict 1   finish, predict 2   ...
    a thread behind                  write 1     write 2   ...

Decompression, resampling and compression release Python's lock, so threads suffice, whereas processes would have to
send each volume. The model runs in the caller's thread, which receives signals and captures graphs.
"""

import logging
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from monai.data import MetaTensor

from volseg.data.case_store.preprocessed import Preprocessing, preprocess
from volseg.fields import Case
from volseg.inference.original_grid import Prediction
from volseg.inference.predictor import group_equal_sizes
from volseg.inference.streaming import count_free_bytes
from volseg.transforms.preprocessing import Preprocessing as Composed

logger = logging.getLogger(__name__)

Predict = Callable[[Sequence[Case]], Sequence[Prediction]]
"""`Predictor.predict`, or a ``functools.partial`` of it."""

Ends = tuple[type[Exception], ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CaseOutcome:
    """A case in progress, and finally its outcome: a file or an error."""

    case: Case
    """The input case, with paths."""
    prepared: Case | None = None
    prediction: Prediction | None = None
    file: Path | None = None
    """Return value of ``write``; None if the case failed."""
    fault: Exception | None = None
    """The error of a failed case."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds per part: ``read`` (with preprocessing), ``compute`` (up to the label map on the file's grid), ``write``.
    Parts of different cases overlap. If volumes are predicted together, the first has the time of all."""

    def fail(self, fault: Exception) -> "CaseOutcome":
        """Return the case with the error ``fault``, without volumes in the error's tracebacks."""
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
    batch_size: int = 1,
    size_of: Callable[[Case], tuple[int, ...]] = lambda _: (),
    ends: Ends = (),
) -> Iterator[CaseOutcome]:
    """Predict cases and yield their outcomes; reading, computing and writing overlap.

    An error of one case is its outcome; the other cases continue. If a batch of volumes fails, each volume is predicted
    again separately, to find the failing case. Outcomes are yielded in the order of the cases, as far as batches keep
    it, and only while a later case is computed. So a caller that records finished cases, to avoid repetition after a
    power cut, should record them in ``write``. At most three cases are in memory, plus those that wait for a batch.
    Closing the generator, Ctrl-C and errors end the threads: a file in progress is completed, waiting work is dropped.

    Parameters
    ----------
    cases : iterable of Case
        Cases with paths; the next case is requested when there is room.
    prepare : callable
        Maps a case with paths to a preprocessed case, as `volseg.data.case_store.preprocessed.prepare`; runs in a
        thread.
    predict : callable
        Maps preprocessed cases of one size to their predictions: `Predictor.predict`.
    write : callable
        Maps a preprocessed case and its prediction, which is on the CPU, to the written file; runs in a thread.
    finish : callable, optional
        The rest of the preparation, in the caller's thread: work on the GPU, which no other thread may use.
    batch_size : int
        Cases of one size that are predicted together.
    size_of : callable
        Size of a preprocessed case.
    ends : tuple of exception types
        Errors that concern no single case and end everything: a request to stop, a full disk. Earlier predictions are
        written and yielded, then the error is raised.
    """
    failed: list[CaseOutcome] = []

    def take() -> Iterator[CaseOutcome]:
        for work in _read_ahead(cases, prepare, reader, ends):
            if finish is not None and work.prepared is not None:
                work = _prepare(work, finish, ends)
            if work.prepared is None:
                failed.append(work)
            else:
                yield work
            del work

    def predicted() -> Iterator[CaseOutcome]:
        for group in group_equal_sizes(take(), lambda work: size_of(work.prepared or {}), batch_size):
            while failed:
                yield failed.pop(0)
            yield from _predict(group, predict, ends)
        yield from failed

    pending: list[Future[CaseOutcome]] = []
    ending: Exception | None = None
    with _thread("reading") as reader, _thread("writing") as writer:
        try:
            for work in predicted():
                if pending:
                    yield pending.pop().result()
                pending.append(writer.submit(_write, [work], write, ends))
                del work  # otherwise the volumes of a written case stay alive until the next one is computed
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
    """Yield a thread that is always joined at the end; waiting work is dropped."""
    thread = ThreadPoolExecutor(1, name)
    try:
        yield thread
    finally:
        thread.shutdown(wait=True, cancel_futures=True)


def _read_ahead(
    cases: Iterable[Case], prepare: Callable[[Case], Case], reader: ThreadPoolExecutor, ends: Ends
) -> Iterator[CaseOutcome]:
    """Yield prepared cases in order, while the next case is being prepared."""
    waiting: deque[Future[CaseOutcome]] = deque()
    for case in cases:
        waiting.append(reader.submit(_prepare, CaseOutcome(case=case), prepare, ends))
        if len(waiting) > 1:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _attempt(work: CaseOutcome, part: str, run: Callable[[], dict[str, Any]], ends: Ends) -> CaseOutcome:
    """Return a case with the fields that ``run`` returns, or with its error; add the seconds of the part."""
    begin = time.perf_counter()
    try:
        made = run()
    except ends:
        raise
    except Exception as fault:  # any other error is this case's outcome
        return work.fail(fault)
    seconds = work.seconds.get(part, 0.0) + time.perf_counter() - begin
    return replace(work, **made, seconds={**work.seconds, part: seconds})


def _prepare(work: CaseOutcome, prepare: Callable[[Case], Case], ends: Ends) -> CaseOutcome:
    """Return a case after a part of its preparation."""
    given = work.case if work.prepared is None else work.prepared
    return _attempt(work, "read", lambda: {"prepared": prepare(given)}, ends)


def _predict(group: list[CaseOutcome], predict: Predict, ends: Ends) -> Iterator[CaseOutcome]:
    """Yield cases with their predictions, or one by one with the errors of single cases; empty the list."""
    begin = time.perf_counter()
    try:
        predictions = list(predict([work.prepared for work in group if work.prepared is not None]))
    except ends:
        raise
    except Exception as fault:
        if len(group) == 1:
            yield group.pop().fail(fault)
            return
        predictions = []
    seconds = time.perf_counter() - begin
    while group:
        if predictions:
            work = group.pop(0)
            yield replace(work, prediction=predictions.pop(0), seconds={**work.seconds, "compute": seconds})
            del work
            seconds = 0.0
        else:
            yield from _predict([group.pop(0)], predict, ends)


def _write(handed: list[CaseOutcome], write: Callable[[Case, Prediction], Path], ends: Ends) -> CaseOutcome:
    work = handed.pop()  # a list, since the executor keeps arguments alive for a moment after completion
    prepared, prediction = work.prepared, work.prediction
    if prepared is None or prediction is None:
        return work
    made = {"prepared": None, "prediction": None}
    return _attempt(work, "write", lambda: {"file": write(prepared, prediction), **made}, ends)


# Preprocess an image on the GPU that predicts it: resampling a CT there takes only as long as its transfer. The
# computing thread does this, since no other thread may use a GPU during a capture. Reductions (means, quantiles) and
# nearest-voxel sampling stay on the CPU, as in the training: a GPU could return other numbers. A resampled voxel may
# differ in the last bit of float32.


BYTES_ON_THE_WAY = 24
"""Bytes per input voxel: its float32 and float64 values, and two copies of the result."""

LARGEST_PART = 4
"""Preparation may use a quarter of the free memory, since an image is small compared with its windows."""

KEPT_PART = 8
"""A prepared image stays on the device, to cut windows there, if it needs at most an eighth of the free memory."""


def suits(preprocessing: Preprocessing, device: torch.device) -> bool:
    """Return whether a device computes the CPU's results of preprocessing, and is faster."""
    return device.type != "cpu" and isinstance(preprocessing, Composed) and preprocessing.suits_devices


def prepare_on(device: torch.device, read: dict[str, Any], preprocessing: Preprocessing) -> Case:
    """Return the preprocessed case; its image is on the device if the device `suits` and has memory, else on the CPU.

    Parameters
    ----------
    device : torch.device
        Device of the networks.
    read : dict
        The case as read; the call empties the dictionary.
    preprocessing : callable
        See `volseg.transforms.build_preprocessing`.
    """
    image = read["image"]
    suited = suits(preprocessing, device)
    if not suited or image.numel() * BYTES_ON_THE_WAY > count_free_bytes(device) // LARGEST_PART:
        del image
        return preprocess(read, read, preprocessing, keep_reference=False)
    try:
        prepared = preprocess({**read, "image": image.to(device)}, read, preprocessing, keep_reference=False)
    except torch.OutOfMemoryError as fault:
        logger.info("an image is prepared on the CPU: %s", str(fault).partition("\n")[0])
        prepared = None
    if prepared is None:  # after the block above, whose exception keeps the failed tensors alive
        del image
        return preprocess(read, read, preprocessing, keep_reference=False)
    read.clear()
    made: MetaTensor = prepared["image"]
    if made.numel() * made.element_size() > count_free_bytes(device) // KEPT_PART:
        prepared["image"] = made.cpu()
    return prepared
