"""Cases from paths to what the network sees: read, preprocess, and keep the label on its own grid for validation."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from volseg.data.cases import Case
from volseg.data.readers import Read

__all__ = ["prepare", "prepare_all"]

Preprocessing = Callable[[Case], Case]


def prepare(case: Case, preprocessing: Preprocessing, *, keep_reference: bool = False) -> Case:
    """Read ``image`` and, where the case has one, ``label``, and preprocess them.

    Parameters
    ----------
    case : Case
        With paths.
    preprocessing : callable
        See `volseg.transforms.build_preprocessing`.
    keep_reference : bool
        Add the fields ``reference``, the label ``(1, D, H, W)`` as it was read (a prediction is compared with it), and
        ``reference_file``.
    """
    fields = [field for field in ("image", "label") if field in case]
    read = Read(fields)(case)
    prepared = preprocessing(read)
    if keep_reference and "label" in read:
        prepared["reference"] = read["label"]
        prepared["reference_file"] = Path(case["label"])
    return prepared


def prepare_all(
    cases: Sequence[Case],
    preprocessing: Preprocessing,
    *,
    keep_reference: bool = False,
    workers: int | None = None,
    show: Callable[[Iterable[Case]], Iterable[Case]] = iter,
) -> list[Case]:
    """Prepare cases in threads; decompression and resampling run outside Python's lock.

    Parameters
    ----------
    cases, preprocessing, keep_reference
        As for `prepare`.
    workers : int, optional
        Threads; by default one per core, at most 8, since each holds a case in memory.
    show : callable
        Wraps the prepared cases, for instance in a progress bar.
    """

    def prepared() -> Iterator[Case]:
        with ThreadPoolExecutor(workers or min(8, os.cpu_count() or 1)) as threads:
            yield from threads.map(lambda case: prepare(case, preprocessing, keep_reference=keep_reference), cases)

    return list(show(prepared()))
