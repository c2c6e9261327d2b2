"""Score the predictions of any program: pair them with label maps by file names or a table, and compare them."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from volseg.data.cases import Case, Structure, Task
from volseg.data.json_files import parse_json
from volseg.data.layouts import load_task
from volseg.data.layouts.declared import add_labelled, make_task, read_manifest, read_regions
from volseg.data.layouts.files import list_images, list_labels
from volseg.data.layouts.naming import attempt_values, cut_channel, name_channels
from volseg.data.layouts.pairs import LABEL_FOLDERS, LABEL_WORDS, detect_arrangement
from volseg.data.layouts.table import TABLES, read_labels
from volseg.data.nifti import read_label_table
from volseg.data.readers import Files, stem
from volseg.data.threads import map_in_threads
from volseg.errors import ConfigError, DataError, GridError
from volseg.evaluation.scoring import Scoring, choose_scoring
from volseg.evaluation.summary import EvaluatedCase, Summary, complete_summary, evaluate_files, summarise
from volseg.formatting import list_duplicates, list_some

WORDS = (*LABEL_WORDS, "pred", "preds", "prediction", "predicted")
"""Last words of names that describe the file, not the case."""

FIRST_CHANNEL, SECOND_CHANNEL = "_0000", "_0001"
"""Number of the first channel, which predictions may keep in their names. Other numbers are not read as channels:
``scan_0010`` and ``scan_0011`` are two cases."""

DECLARED = ("name", "labels", "regions", "regions_class_order", "ignore")
"""Keys that are read from a manifest; those about cases are not."""

RECORD = "predicted.jsonl"
"""File next to predictions; its first line describes their source."""


REMEDY = (
    "files are paired by their names, CASE.nii.gz in both: rename them, or pass a table (CSV) with the columns case, "
    "prediction and label with --labels"
)


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """The files of two folders, by case."""

    matched: Mapping[str, tuple[Path, Path]]
    """Prediction and label by case."""
    missing: tuple[str, ...]
    """Cases with a label but without a prediction."""
    surplus: tuple[Path, ...]
    """Predictions of cases without a label, which are not scored."""
    labelled: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Annotated labels by case of a table, for partially labelled cases."""
    images: Mapping[str, Files] = field(default_factory=dict)
    """Images by case of a data set."""


@dataclass(frozen=True, kw_only=True)
class EvaluatedFolders:
    """Result of scoring two folders."""

    summary: Summary | None
    """Complete summary of the scored cases; None if no case could be scored."""
    names: Mapping[str, str]
    """Names of labels by key of the summary."""
    scoring: Scoring
    pairs: Pairs
    faults: Mapping[str, str] = field(default_factory=dict)
    """Reason by case that could not be scored."""


def pair_files(predictions: str | Path, labels: str | Path) -> Pairs:
    """Pair predictions with labels by the id of the case.

    Labels are those of a folder, of a data set in any layout, or of a table with the columns ``case`` and ``label``; a
    column ``prediction`` names files of the folder of predictions. Without this column, an id is a file's name without
    its suffix; if that has no partner, also without a final ``_0000``, ``_seg``, ``_pred`` ... or channel name.
    Channels are those of the data set and of the run that predicted.

    Raises
    ------
    DataError
        If a folder contains no volumes or two files of one case, or no case is in both.
    """
    predictions, labels = Path(predictions), Path(labels)
    predicted = _list_by_id(predictions)
    if not (labels.is_file() and labels.suffix.lower() in TABLES):
        true, images = _list_labels(labels)
        return replace(_pair_names(predicted, true, predictions, labels), images=images)
    listed = read_labels(labels)
    true = {case: row.label for case, row in listed.items()}
    labelled = {case: row.labelled for case, row in listed.items() if row.labelled}
    if all(row.prediction is None for row in listed.values()):
        return replace(_pair_names(predicted, true, predictions, labels), labelled=labelled)
    files = {case: predictions / row.prediction for case, row in listed.items() if row.prediction}
    matched = {case: (path, true[case]) for case, path in files.items() if path.is_file()}
    if not matched:
        raise DataError(f"{labels} names no prediction in {predictions}; its column 'prediction' needs file names")
    surplus = tuple(sorted(set(predicted.values()) - set(files.values())))
    return Pairs(matched=matched, missing=tuple(sorted(true.keys() - matched)), surplus=surplus, labelled=labelled)


def _pair_names(predicted: Mapping[str, Path], true: Mapping[str, Path], predictions: Path, labels: Path) -> Pairs:
    strip = partial(strip_id, channels=_read_channels(predictions, labels))
    matched = {case: (predicted[case], path) for case, path in true.items() if case in predicted}
    spare: dict[str, list[str]] = defaultdict(list)
    alone: dict[str, list[str]] = defaultdict(list)
    for files, groups in ((predicted, spare), (true, alone)):
        for case in files:
            if case not in matched:
                groups[strip(case)].append(case)
    for key in sorted(spare.keys() & alone.keys()):
        if len(spare[key]) + len(alone[key]) > 2:
            same = [predicted[name].name for name in spare[key]] + [true[case].name for case in alone[key]]
            raise DataError(f"{list_some(same)} of {predictions} and {labels} may all be case {key}; keep one of each")
        [name], [case] = spare.pop(key), alone[key]
        if name.endswith(FIRST_CHANNEL) and (second := name.removesuffix(FIRST_CHANNEL) + SECOND_CHANNEL) in predicted:
            raise DataError(
                f"{predicted[name].name} and {predicted[second].name} of {predictions} are named as two channels of "
                f"the image {key}, not as its label map; name a folder with one prediction for each case"
            )
        matched[case] = (predicted[name], true[case])
    missing = tuple(sorted(true.keys() - matched.keys()))
    if not matched:
        raise DataError(
            f"no case is in both {predictions} ({list_some(sorted(predicted), 3)}) and {labels} "
            f"({list_some(missing, 3)}); {REMEDY}"
        )
    surplus = tuple(sorted(predicted[name] for names in spare.values() for name in names))
    return Pairs(matched=dict(sorted(matched.items())), missing=missing, surplus=surplus)


def _list_labels(labels: Path) -> tuple[dict[str, Path], dict[str, Files]]:
    """Return the label map of each case of a folder of label maps or of a data set, and the images of a data set."""
    if not labels.is_dir() or labels.name.casefold() in {name.casefold() for name in LABEL_FOLDERS}:
        return _list_by_id(labels), {}
    has_images = bool(list_images(labels))
    if (labels / "labelsTr").is_dir() and not has_images and list_images(labels / "labelsTr"):
        return _list_by_id(labels / "labelsTr"), {}
    manifest, arrangement = read_manifest(labels), detect_arrangement(labels)
    is_listed = manifest is not None and "training" in manifest[1] and not has_images
    if not is_listed and (arrangement is None or not (arrangement.images and arrangement.labels)):
        return _list_by_id(labels), {}
    cases = load_task(labels, require_files=False).training
    return {case["case"]: case["label"] for case in cases}, {case["case"]: case["image"] for case in cases}


def _list_by_id(folder: Path) -> dict[str, Path]:
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder; name one with a label map for each case")
    files = list_labels(folder)
    if not files:
        raise DataError(f"{folder} contains no volume; needed: a label map for each case, such as CASE.nii.gz")
    if doubled := list_duplicates(stem(path) for path in files):
        same = [path.name for path in files if stem(path) == doubled[0]]
        raise DataError(f"{folder} contains {' and '.join(same)} of one case; keep one of them")
    return {stem(path): path for path in files}


def _read_channels(predictions: Path, labels: Path) -> tuple[str, ...]:
    """Return the names of the channels of the run or of the data set."""
    manifests = filter(None, map(read_manifest, (labels, labels.absolute().parent)))
    declared = [name_channels(values, source) or () for source, values in manifests]
    made_by = _read_record(predictions / RECORD) if (predictions / RECORD).is_file() else {}
    return tuple(dict.fromkeys(name for names in (*declared, made_by.get("channels", ())) for name in names))


def _read_record(record: Path) -> Mapping[str, Any]:
    with record.open(encoding="utf-8", errors="replace") as file:
        line = file.readline()
    try:
        made_by = parse_json(line)
    except ValueError as fault:
        raise DataError(f"{record} does not begin with a description of predictions ({fault}); remove it") from fault
    return made_by if isinstance(made_by, dict) else {}


def strip_id(case: str, channels: Sequence[str] = ()) -> str:
    """Return an id without the first channel or a channel's name, and without a last word for the kind of file.

    >>> strip_id("liver_001_0000"), strip_id("liver_001_seg"), strip_id("liver_0011"), strip_id("liver_001_ct", ["CT"])
    ('liver_001', 'liver_001', 'liver_0011', 'liver_001')
    """
    case = case.removesuffix(FIRST_CHANNEL)
    head, _, word = case.rpartition("_")
    case = head if head and word.casefold() in WORDS else case
    found = cut_channel(case, channels)
    return found[0] if found and found[0] else case


def load_label_names(labels: str | Path, predictions: str | Path, names: str | None = None) -> Task | None:
    """Return the labels of label maps as a task without cases; None if no source has their names.

    Parameters
    ----------
    labels, predictions : path
        Folders, or a table for ``labels``. The names are read from a ``dataset.json`` (or ``task.yaml``) in or above
        ``labels`` or in ``predictions``, else from the label table in the header of a first file.
    names : str, optional
        Another source: such a file, or ``1=liver,2=tumour``.

    Raises
    ------
    DataError
        If the source cannot be read.
    """
    if names is not None and "=" in names and not Path(names).exists():
        return _make_task({"labels": _parse_names(names)}, Path("--names"))
    if names is not None:
        folders = [Path(names) if Path(names).is_dir() else Path(names).parent]
    else:
        folders = [Path(labels), Path(labels).absolute().parent, Path(predictions)]
    for folder in folders:
        manifest = read_manifest(folder)
        if manifest is not None and "labels" in manifest[1]:
            return _make_task(manifest[1], manifest[0].absolute())
    if names is not None:
        raise DataError(f"{names} is not a dataset.json with 'labels'; name such a file, or write 1=NAME,2=NAME")
    folders = [folder for folder in (Path(predictions), Path(labels)) if folder.is_dir()]
    for file in (file for folder in folders for file in list_images(folder)[:1]):
        with suppress(DataError):  # another format or damaged: reported when its case is scored
            if table := read_label_table(file):
                values = {"0": "background"} | {str(key): table[key] for key in table}
                return replace(_make_task({"labels": values}, file), name="")
    return None


def _parse_names(text: str) -> dict[str, str]:
    pairs = [part.split("=", 1) for part in text.split(",")]
    if not all(len(pair) == 2 and pair[0].strip().isdigit() and pair[1].strip() for pair in pairs):
        raise DataError(f"label names must be written as 1=liver,2=tumour, got {text!r}")
    if doubled := list_duplicates(str(int(value)) for value, _ in pairs):
        raise DataError(f"each label must be named once, as in 1=liver,2=tumour, but {text!r} names {doubled[0]} twice")
    return {"0": "background", **{value.strip(): name.strip() for value, name in pairs}}


def _make_task(declared: Mapping[str, Any], source: Path) -> Task:
    of_labels = {key: declared[key] for key in DECLARED if key in declared}
    return make_task(source, of_labels, ("image",), read_regions(of_labels, source), ((), ()))


def _find_values(pairs: Pairs) -> Task:
    """Return a task with the values in the label maps, if no names are known; unreadable files fail later."""
    read = map_in_threads(attempt_values, [path for pair in pairs.matched.values() for path in pair])
    values = {0} | {value for found in read if not isinstance(found, DataError) for value in found}
    if len(values) == 1:
        raise DataError("all files contain only background; name the labels with --names 1=NAME,2=NAME")
    labels = {value: f"label_{value}" if value else "background" for value in sorted(values)}
    return Task(name="", root=Path(), modalities=("image",), labels=labels, training=(), test=())


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
    """Score every case of two folders in parallel; a case that cannot be scored does not stop the others.

    Parameters
    ----------
    predictions, labels : path
        A folder with a label map for each case, and a folder of references, a data set or a table; see `pair_files`.
    names : str, optional
        Source of the label names; see `load_label_names`. If no source has names, labels are called by their values.
    distances, tolerance, lesions
        Measurements; see `volseg.evaluation.scoring.choose_scoring`.
    needs_tolerance : bool
        Whether to raise if the task has no known tolerance, instead of leaving out NSD.
    allow_missing : bool
        Whether to leave out cases without a prediction.

    Raises
    ------
    DataError
        If files cannot be paired, or predictions are missing.
    ConfigError
        For a name that no label has, or a missing tolerance.
    """
    pairs = pair_files(predictions, labels)
    if pairs.missing and not allow_missing:
        raise DataError(
            f"{predictions} lacks {len(pairs.missing)} of {len(pairs.missing) + len(pairs.matched)} case(s): "
            f"{list_some(pairs.missing)}; predict them, or leave them out with --allow-missing; {REMEDY}"
        )
    declared = load_label_names(labels, predictions, names)
    task = declared or _find_values(pairs)
    scoring = choose_scoring(task.structures, task.name, distances=distances, tolerance=tolerance, lesions=lesions)
    if needs_tolerance and not scoring.tolerances:
        raise ConfigError("NSD needs a tolerance (the distance up to which surfaces agree); set --tolerance MM")
    score = partial(_score, pairs=pairs, task=task, labelled=_find_labelled(pairs, task), scoring=scoring)
    outcomes = dict(zip(pairs.matched, map_in_threads(score, pairs.matched), strict=True))
    scored = [outcome for outcome in outcomes.values() if isinstance(outcome, EvaluatedCase)]
    names_by_key = {str(key): name for key, name in task.structures.items()}
    return EvaluatedFolders(
        summary=complete_summary(summarise(scored), scoring, names_by_key) if scored else None,
        names=names_by_key,
        scoring=scoring,
        pairs=pairs,
        faults={case: outcome for case, outcome in outcomes.items() if isinstance(outcome, str)},
    )


def _find_labelled(pairs: Pairs, task: Task) -> dict[str, Sequence[int] | None]:
    """Return the annotated values of each case; None for fully labelled cases."""
    manifest = read_manifest(task.root) if task.name else None
    cases: list[Case] = [{"case": case} for case in (*pairs.matched, *pairs.missing)]
    listed = pairs.labelled or (manifest[1].get("labelled") if manifest else None) or {}
    known = (
        {name: of for name, of in listed.items() if name in pairs.matched} if isinstance(listed, Mapping) else listed
    )
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
            task=task,
            image=pairs.images.get(case),
            ignore=task.ignore,
            values=task.class_values,
            labelled=labelled[case],
            scoring=scoring,
        )
    except (DataError, GridError) as fault:
        return str(fault)
