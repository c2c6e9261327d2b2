"""Anybody's predictions, compared with label maps of the same cases: two folders, paired by their files' names."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from volseg.data.cases import Case, Structure, Task
from volseg.data.layouts.declared import add_labelled, name_task, read_manifest, read_regions
from volseg.data.layouts.files import list_images
from volseg.data.layouts.pairs import LABEL_WORDS
from volseg.data.names import find_doubled, list_some
from volseg.data.nifti import read_label_table
from volseg.data.readers import read_volume, stem
from volseg.data.threads import map_in_threads
from volseg.errors import ConfigError, DataError, GridError
from volseg.evaluation.scoring import Scoring, choose_scoring
from volseg.evaluation.summary import EvaluatedCase, Summary, evaluate_files, summarise

__all__ = ["EvaluatedFolders", "Pairs", "evaluate_folders", "find_names", "pair_files"]

WORDS = (*LABEL_WORDS, "pred", "preds", "prediction", "predicted")
"""Last word of a name that says what the file is, not which case."""

CHANNEL = re.compile(r"_\d{4}$")
"""What nnU-Net puts behind a case's id in the names of images."""

FIRST_CHANNEL = "_0000"
"""That of the first one, which who renames its predictions may leave there. No other number is taken for a channel's:
``scan_0010`` and ``scan_0011`` are two cases."""

MOST_FOUND = 1000
"""Values of a file in which the labels are looked for; one with more is an image."""


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """The files of two folders, by case."""

    matched: Mapping[str, tuple[Path, Path]]
    """Case to prediction and label."""
    missing: tuple[str, ...]
    """Cases that have a label and no prediction."""
    surplus: tuple[Path, ...]
    """Predictions of cases without a label, which are not scored."""


@dataclass(frozen=True, kw_only=True)
class EvaluatedFolders:
    """What two folders came to."""

    summary: Summary | None
    """Of the cases that could be scored; None if none could."""
    names: Mapping[str, str]
    """Key of the summary to the label's name."""
    scoring: Scoring
    pairs: Pairs
    faults: Mapping[str, str] = field(default_factory=dict)
    """Cases that could not be scored, and why."""


def pair_files(predictions: str | Path, labels: str | Path) -> Pairs:
    """Pair predictions with labels by the id of the case.

    An id is a file's name without its suffix, and without a last ``_0000`` (a channel) or ``_seg``, ``_pred`` ... where
    only so it has a partner.

    Raises
    ------
    DataError
        If a folder holds no volumes, two files of one case, or no case is in both.
    """
    predictions, labels = Path(predictions), _find_labels(Path(labels))
    predicted, true = (_list_by_id(folder) for folder in (predictions, labels))
    matched = {case: (predicted[case], path) for case, path in true.items() if case in predicted}
    spare = {case: path for case, path in predicted.items() if case not in matched}
    alone = [case for case in true if case not in matched]
    if doubled := find_doubled(map(_strip, alone)):
        same = [true[case].name for case in alone if _strip(case) == doubled[0]]
        raise DataError(f"{labels} holds {list_some(same)}, which may all be case {doubled[0]}; keep one of them")
    for case in alone:
        if (found := _find_partner(_strip(case), spare, predictions)) is not None:
            matched[case] = (spare.pop(found), true[case])
    if not matched:
        raise DataError(
            f"no case is in both {predictions} ({list_some(sorted(predicted), 3)}) and {labels} "
            f"({list_some(sorted(true), 3)}); files are paired by their names: CASE.nii.gz in both"
        )
    return Pairs(
        matched=dict(sorted(matched.items())),
        missing=tuple(sorted(true.keys() - matched.keys())),
        surplus=tuple(sorted(spare.values())),
    )


def _find_labels(folder: Path) -> Path:
    """Return the folder of the label maps, where a data set was named."""
    inside = folder / "labelsTr"
    return inside if inside.is_dir() and not list_images(folder) else folder


def _list_by_id(folder: Path) -> dict[str, Path]:
    if not folder.is_dir():
        raise DataError(f"{folder} is no folder; name one with a label map for each case")
    files = list_images(folder)
    if not files:
        raise DataError(f"{folder} holds no volume; needed: a label map for each case, such as CASE.nii.gz")
    if doubled := find_doubled(stem(path) for path in files):
        same = [path.name for path in files if stem(path) == doubled[0]]
        raise DataError(f"{folder} holds {' and '.join(same)} of one case; keep one of them")
    return {stem(path): path for path in files}


def _find_partner(case: str, spare: Mapping[str, Path], folder: Path) -> str | None:
    """Return which of the predictions without a partner is of a case; of several that may be, none is taken."""
    likely = sorted(name for name in spare if _strip(CHANNEL.sub("", name)) == case)
    if len(likely) > 1:
        same = list_some([spare[name].name for name in likely])
        raise DataError(f"{folder} holds {same}, which may all be case {case}; keep one of them")
    return next((name for name in likely if _strip(name) == case), None)


def _strip(case: str) -> str:
    """Return an id without the first channel and without a last word that says what the file is.

    >>> _strip("liver_001_0000"), _strip("liver_001_seg"), _strip("liver_001"), _strip("liver_0011")
    ('liver_001', 'liver_001', 'liver_001', 'liver_0011')
    """
    case = case.removesuffix(FIRST_CHANNEL)
    head, _, word = case.rpartition("_")
    return head if head and word.casefold() in WORDS else case


def find_names(labels: str | Path, predictions: str | Path, names: str | None = None) -> Task | None:
    """Return what the values of label maps mean, as a task without cases; None where nobody says it.

    Parameters
    ----------
    labels, predictions : path
        Folders: a ``dataset.json`` (or ``task.yaml``) in the first, above it, or in the second is read, else the label
        table in the header of the first file of the second, or of the first.
    names : str, optional
        In place of these: such a file, or ``1=liver,2=tumour``.

    Raises
    ------
    DataError
        If what was named cannot be read.
    """
    if names is not None and "=" in names and not Path(names).exists():
        return _make_task({"labels": _parse_names(names)}, Path("--names"), "")
    if names is not None:
        folders = [Path(names) if Path(names).is_dir() else Path(names).parent]
    else:
        folders = [Path(labels), Path(labels).absolute().parent, Path(predictions)]
    for folder in folders:
        manifest = read_manifest(folder)
        if manifest is not None and "labels" in manifest[1]:
            return _make_task(manifest[1], manifest[0], name_task(manifest[0].absolute().parent, manifest[1]))
    if names is not None:
        raise DataError(f"{names} is no dataset.json with 'labels'; name one, or give 1=NAME,2=NAME")
    for file in (file for folder in (Path(predictions), Path(labels)) for file in list_images(folder)[:1]):
        with suppress(DataError):  # of another format or damaged: said when its case is scored
            if table := read_label_table(file):
                return _make_task({"labels": {"0": "background"} | {str(key): table[key] for key in table}}, file, "")
    return None


def _parse_names(text: str) -> dict[str, str]:
    pairs = [part.split("=", 1) for part in text.split(",")]
    if not all(len(pair) == 2 and pair[0].strip().isdigit() and pair[1].strip() for pair in pairs):
        raise DataError(f"labels are named as 1=liver,2=tumour, got {text!r}")
    if doubled := find_doubled(str(int(value)) for value, _ in pairs):
        raise DataError(
            f"labels are named once each, as 1=liver,2=tumour, got {text!r}, which names {doubled[0]} twice"
        )
    return {"0": "background", **{value.strip(): name.strip() for value, name in pairs}}


def _make_task(declared: Mapping[str, Any], source: Path, name: str) -> Task:
    read = read_regions(declared, source)
    return Task(
        name=name,
        root=source.parent,
        modalities=("image",),
        labels=read.labels,
        regions=read.regions,
        ignore=read.ignore,
        training=(),
        test=(),
    )


def _find_values(pairs: Pairs) -> Task:
    """Return a task of the values that occur in any file, for want of names."""
    files = [path for pair in pairs.matched.values() for path in pair]
    values = {0} | {value for found in map_in_threads(_read_values, files) for value in found}
    if len(values) == 1:
        raise DataError("all files hold background only; name the labels by --names 1=NAME,2=NAME")
    labels = {value: f"label_{value}" if value else "background" for value in sorted(values)}
    return Task(name="", root=Path(), modalities=("image",), labels=labels, training=(), test=())


def _read_values(path: Path) -> list[int]:
    """Return the values of a label map; none of what is not one, which is said when its case is scored."""
    try:
        values = np.unique(read_volume(path).numpy(force=True))
    except DataError:
        return []
    is_map = len(values) <= MOST_FOUND and np.array_equal(values, values.round()) and values[0] >= 0
    return values.astype(np.int64).tolist() if is_map else []


def evaluate_folders(
    predictions: str | Path,
    labels: str | Path,
    *,
    names: str | None = None,
    distances: bool = True,
    tolerance: float | Mapping[str, float] | None = None,
    lesions: Sequence[str] = (),
    needs_tolerance: bool = False,
    allow_missing: bool = False,
) -> EvaluatedFolders:
    """Score every case of two folders, several at a time; a case that cannot be scored does not end the others.

    Parameters
    ----------
    predictions, labels : path
        Folders with a label map for each case; see `pair_files`.
    names : str, optional
        Which labels there are; see `find_names`. Without any, the values that occur.
    distances, tolerance, lesions
        What is measured; see `volseg.evaluation.scoring.choose_scoring`.
    needs_tolerance : bool
        Refuse a task of which no tolerance is known, rather than measure no NSD.
    allow_missing : bool
        Leave cases without a prediction out.

    Raises
    ------
    DataError
        If files cannot be paired, or predictions are missing.
    ConfigError
        For a name that no label has, or no tolerance where one is needed.
    """
    pairs = pair_files(predictions, labels)
    if pairs.missing and not allow_missing:
        raise DataError(
            f"{predictions} lacks {len(pairs.missing)} of {len(pairs.missing) + len(pairs.matched)} case(s): "
            f"{list_some(pairs.missing)}; predict them, or leave them out by --allow-missing"
        )
    declared = find_names(labels, predictions, names)
    task = declared or _find_values(pairs)
    scoring = choose_scoring(task.structures, task.name, distances=distances, tolerance=tolerance, lesions=lesions)
    if needs_tolerance and not scoring.tolerances:
        raise ConfigError("NSD needs the distance within which two surfaces count as one; give it by --tolerance MM")
    score = partial(_score, pairs=pairs, task=task, labelled=_find_labelled(pairs, task), scoring=scoring)
    outcomes = dict(zip(pairs.matched, map_in_threads(score, pairs.matched), strict=True))
    scored = [outcome for outcome in outcomes.values() if isinstance(outcome, EvaluatedCase)]
    return EvaluatedFolders(
        summary=summarise(scored) if scored else None,
        names={str(key): name for key, name in task.structures.items()},
        scoring=scoring,
        pairs=pairs,
        faults={case: outcome for case, outcome in outcomes.items() if isinstance(outcome, str)},
    )


def _find_labelled(pairs: Pairs, task: Task) -> dict[str, Sequence[int] | None]:
    """Return the values that were looked for in each case, where the data set says that these are not all."""
    manifest = read_manifest(task.root) if task.name else None
    cases: list[Case] = [{"case": case} for case in (*pairs.matched, *pairs.missing)]
    listed = (manifest[1].get("labelled") if manifest else None) or {}
    known = {name: of for name, of in listed.items() if name in pairs.matched} if isinstance(listed, dict) else listed
    return {case["case"]: case.get("labelled") for case in add_labelled(cases, known, task.labels, task.root)}


def _score(
    case: str, *, pairs: Pairs, task: Task, labelled: Mapping[str, Sequence[int] | None], scoring: Scoring
) -> EvaluatedCase | str:
    structures: dict[Structure, str] = task.structures
    prediction, label = pairs.matched[case]
    try:
        return evaluate_files(
            prediction,
            label,
            structures,
            ignore=task.ignore,
            values=task.class_values,
            labelled=labelled[case],
            scoring=scoring,
        )
    except (DataError, GridError) as fault:
        return str(fault)
