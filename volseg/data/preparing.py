"""Cases from paths to what the network sees: read, preprocess, and keep the label on its own grid for validation."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event

from volseg.data.cases import Case, Task
from volseg.data.checks import Problem, Remark, read_case, refuse_held_out, remark_on_same_images, require_sound
from volseg.data.readers import Read
from volseg.data.threads import map_in_threads

__all__ = ["PreparedCases", "prepare", "prepare_all", "prepare_sound"]

Preprocessing = Callable[[Case], Case]


@dataclass(frozen=True, kw_only=True)
class PreparedCases:
    """Cases of a training as the network sees them."""

    training: Sequence[Case] = ()
    validation: Sequence[Case] = ()
    """Each with its ``reference``; see `prepare`."""
    problems: Sequence[Problem] = ()
    """Of cases that were left out."""
    remarks: Sequence[Remark] = ()
    """What should be looked at, of all cases."""


def prepare_sound(
    training: Sequence[Case],
    validation: Sequence[Case],
    task: Task,
    preprocessing: Preprocessing,
    *,
    skip_bad: bool = False,
    workers: int | None = None,
    progress: Callable[[], object] | None = None,
) -> PreparedCases:
    """Check cases while preparing them: every file is decompressed once.

    Every case is checked whatever was wrong with others, so that all bad ones are named at once.

    Parameters
    ----------
    training, validation : sequence of Case
        With paths; no case stands in both.
    task : Task
        Declares the channels and labels that the files must have.
    preprocessing : callable
        See `volseg.transforms.build_preprocessing`.
    skip_bad : bool
        Leave bad cases out instead of raising.
    workers : int, optional
        Threads; see `map_in_threads`.
    progress : callable, optional
        Called after each case.

    Raises
    ------
    DataError
        If a case is bad and ``skip_bad`` is off: all bad cases at once.
    Exception
        If no case is bad, or bad ones are left out, and one cannot be preprocessed: what the first such case raised.
    """
    is_refused = Event()  # from then on cases are checked and not prepared any more: nothing will come of them

    def attempt(case: Case, keep_reference: bool) -> _Attempt:
        checked = read_case(case, task)
        found = _Attempt(case=case, problems=checked.problems, remarks=checked.remarks, digest=checked.digest)
        if checked.problems and not skip_bad:
            is_refused.set()
        if checked.problems or is_refused.is_set():
            return found
        try:
            return replace(found, prepared=_preprocess(checked.case, case, preprocessing, keep_reference))
        except Exception as fault:  # whatever a step may raise is told below, unless there are bad cases
            return replace(found, fault=fault)

    sides = [*((case, False) for case in training), *((case, True) for case in validation)]
    attempts: list[_Attempt] = []
    for tried in map_in_threads(lambda side: attempt(*side), sides, workers):
        attempts.append(tried)
        if progress is not None:
            progress()
    sound = [(tried.case, tried.digest) for tried in attempts if tried.digest and not tried.problems]
    learnt = refuse_held_out(sound, {case["case"] for case in validation})
    problems = [problem for tried in attempts for problem in (*tried.problems, *learnt.get(tried.case["case"], ()))]
    if not skip_bad:
        require_sound(problems)
    sound = [(case, digest) for case, digest in sound if case["case"] not in learnt]
    return PreparedCases(
        training=_take_prepared([tried for tried in attempts[: len(training)] if tried.case["case"] not in learnt]),
        validation=_take_prepared(attempts[len(training) :]),
        problems=problems,
        remarks=[*(remark for tried in attempts for remark in tried.remarks), *remark_on_same_images(sound)],
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Attempt:
    """What became of one case."""

    case: Case
    """With paths."""
    digest: str | None = None
    remarks: Sequence[Remark] = ()
    problems: Sequence[Problem] = ()
    prepared: Case | None = None
    fault: Exception | None = None
    """Why a case without problems could not be preprocessed."""


def _take_prepared(attempts: Sequence[_Attempt]) -> list[Case]:
    for tried in attempts:
        if tried.fault is not None:
            raise tried.fault
    return [tried.prepared for tried in attempts if tried.prepared is not None]


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
    return _preprocess(Read(fields)(case), case, preprocessing, keep_reference)


def _preprocess(read: Case, paths: Case, preprocessing: Preprocessing, keep_reference: bool) -> Case:
    prepared = preprocessing(read)
    if keep_reference and "label" in read:
        prepared["reference"] = read["label"]
        prepared["reference_file"] = Path(paths["label"])
    return prepared


def prepare_all(
    cases: Sequence[Case],
    preprocessing: Preprocessing,
    *,
    keep_reference: bool = False,
    workers: int | None = None,
    show: Callable[[Iterable[Case]], Iterable[Case]] = iter,
) -> list[Case]:
    """Prepare cases in threads, unchecked.

    Parameters
    ----------
    cases, preprocessing, keep_reference
        As for `prepare`.
    workers : int, optional
        Threads; see `map_in_threads`.
    show : callable
        Wraps the prepared cases, for instance in a progress bar.
    """
    return list(
        show(map_in_threads(lambda case: prepare(case, preprocessing, keep_reference=keep_reference), cases, workers))
    )
