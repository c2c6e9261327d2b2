"""Definitions of a case, a batch and a task, and the split of cases into training and validation.

The folds are nnU-Net's: scikit-learn's ``KFold(5, shuffle=True, random_state=12345)`` over the sorted case ids, so that
a Dice can be compared with published values fold by fold. Ten lines replace scikit-learn.

If patients have several cases, patients are dealt instead of cases: shuffled by the same generator, sorted by their
number of cases (most first), each to the fold with the fewest cases so far. Two folds differ by at most the number of
cases of the largest patient.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from volseg.config.nearest import did_you_mean
from volseg.data.json_files import read_json
from volseg.errors import DataError
from volseg.fields import Batch, Case
from volseg.files import replacing
from volseg.formatting import list_duplicates, list_some


@dataclass(frozen=True)
class Split:
    """Case ids to train on and case ids to validate on; the latter may be empty."""

    training: tuple[str, ...]
    validation: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.training:
            raise DataError(f"a split needs cases to train on, got none ({len(self.validation)} for validation)")
        for side, ids in (("training", self.training), ("validation", self.validation)):
            if doubled := list_duplicates(ids):
                raise DataError(f"{_list_ids(doubled)} occur twice among the {side} cases; list each once")
        if shared := sorted(set(self.training) & set(self.validation)):
            raise DataError(f"{_list_ids(shared)} are in both training and validation; keep each in only one")


def folds(
    ids: Iterable[str], num_folds: int = 5, seed: int = 12345, *, groups: Mapping[str, str] | None = None
) -> list[Split]:
    """Return nnU-Net's folds; each case validates exactly once.

    Parameters
    ----------
    ids
        Case ids in any order: they are sorted first, as nnU-Net does.
    groups
        The patient of each case; all cases of a patient validate in the same fold. If each patient has one case, the
        folds are nnU-Net's.

    Raises
    ------
    DataError
        For fewer cases or patients than folds, fewer than two folds, or a duplicate id.

    References
    ----------
    .. [1] Isensee et al., nnU-Net, Nat. Methods 18 (2021), 203-211, doi:10.1038/s41592-020-01008-z.

    Examples
    --------
    >>> folds(["c", "a", "b"], num_folds=3)[0]
    Split(training=('b', 'c'), validation=('a',))
    """
    names = sorted(ids)
    if doubled := list_duplicates(names):
        raise DataError(f"case ids must be unique, but {_list_ids(doubled)} occur twice")
    if not 2 <= num_folds <= len(names):
        fewer = f"split.num_folds to {max(2, min(num_folds, len(names)))}, or " if len(names) > 1 else ""
        raise DataError(
            f"needed: at least 2 folds and a case per fold, got {num_folds} folds of {len(names)} cases; "
            f"set {fewer}split.validation to none"
        )
    if groups is not None and len(patients := _gather_patients(names, groups)) < len(names):
        validated = _deal_patients(patients, num_folds, seed)
    else:
        parts = np.array_split(_shuffle(len(names), seed), num_folds)
        validated = [{names[index] for index in part} for part in parts]
    return [
        Split(
            training=tuple(name for name in names if name not in chosen),
            validation=tuple(name for name in names if name in chosen),
        )
        for chosen in validated
    ]


def _shuffle(count: int, seed: int) -> np.ndarray:
    # The legacy generator defines scikit-learn's folds.
    return np.random.RandomState(seed).permutation(count)


def _gather_patients(names: Sequence[str], groups: Mapping[str, str]) -> list[list[str]]:
    """Return the cases of each patient, in the order of their first cases; patients may have any names."""
    if missing := [name for name in names if name not in groups]:
        raise DataError(f"folds by patient need the patient of each case, but {_list_ids(missing)} have none")
    cases: dict[str, list[str]] = defaultdict(list)
    for name in names:
        cases[groups[name]].append(name)
    return list(cases.values())


def _deal_patients(patients: Sequence[Sequence[str]], num_folds: int, seed: int) -> list[set[str]]:
    """Return the validation cases of each fold."""
    if len(patients) < num_folds:
        num_cases = sum(map(len, patients))
        remedy = f"set split.num_folds to {len(patients)}" if len(patients) > 1 else "set split.validation to none"
        raise DataError(
            f"needed: at least one patient per fold, got {num_folds} folds of {len(patients)} patients ({num_cases} "
            f"cases, by split.group); {remedy}, or split.group to none if each case is of a different patient"
        )
    shuffled = [patients[index] for index in _shuffle(len(patients), seed)]
    dealt: list[set[str]] = [set() for _ in range(num_folds)]
    for cases in sorted(shuffled, key=len, reverse=True):  # stable: equal counts stay shuffled
        min(dealt, key=len).update(cases)
    return dealt


def write_splits(path: str | Path, splits: Sequence[Split]) -> Path:
    """Write splits in the format of nnU-Net's ``splits_final.json``, atomically."""
    path = Path(path)
    text = json.dumps([{"train": split.training, "val": split.validation} for split in splits], indent=1)
    with replacing(path) as partial:
        partial.write_text(text + "\n", encoding="utf-8")
    return path


def read_splits(path: str | Path, ids: Iterable[str] | None = None) -> list[Split]:
    """Read splits in the format of nnU-Net's ``splits_final.json``: ``[{"train": [...], "val": [...]}, ...]``.

    Parameters
    ----------
    ids
        The existing cases; other ids are refused. A split need not use all of them.

    Raises
    ------
    DataError
        If the file has another format, or a split overlaps, repeats an id or names an unknown one.
    """
    path = Path(path)
    content = read_json(path, "a split file")
    if not isinstance(content, list) or not content:
        raise DataError(f'{path} should be a list of folds, [{{"train": [...], "val": [...]}}, ...]')
    known = None if ids is None else set(ids)
    return [_parse_split(entry, f"{path}, fold {fold}", known) for fold, entry in enumerate(content)]


def _parse_split(entry: object, where: str, known: set[str] | None) -> Split:
    if not isinstance(entry, dict) or set(entry) != {"train", "val"}:
        raise DataError(f'{where} should be {{"train": [...], "val": [...]}}, got {_describe(entry)}')
    for side, ids in entry.items():
        if not isinstance(ids, list) or not all(isinstance(name, str) for name in ids):
            raise DataError(f"{where}: {side!r} should be a list of case ids (strings)")
        if known is not None and (unknown := [name for name in ids if name not in known]):
            raise DataError(
                f"{where}: {side!r} has unknown cases: {_list_ids(unknown)}; {did_you_mean(unknown[0], known)}"
            )
    try:
        return Split(training=tuple(entry["train"]), validation=tuple(entry["val"]))
    except DataError as fault:
        raise DataError(f"{where}: {fault}") from None


def _describe(entry: object) -> str:
    return f"keys {sorted(entry)}" if isinstance(entry, dict) else type(entry).__name__


def _list_ids(names: Sequence[str]) -> str:
    return list_some([repr(name) for name in names])


__all__ = ["MOST_CLASSES", "Batch", "Case", "Structure", "Task", "list_values"]

MOST_CLASSES = 254
"""Label maps in memory are uint8, which leaves a value for ignored voxels and a spare one."""

LARGEST_VALUE = 2**24 - 1
"""Largest value of a label file, which is read as float32."""

Structure = int | tuple[int, ...]
"""A scored structure: a value of label maps, or the values of a region."""


def list_values(structure: Structure) -> tuple[int, ...]:
    """Return the values that a structure has in label maps."""
    return structure if isinstance(structure, tuple) else (structure,)


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A segmentation problem: its cases (paths, sorted by id), its channels and its labels.

    Raises
    ------
    DataError
        If labels, regions and the ignored value do not fit together.
    """

    name: str
    root: Path
    modalities: tuple[str, ...]
    """Name of each image channel, in the order of the channels."""
    labels: dict[int, str]
    """Name of each value of a label map, including 0 (background)."""
    training: tuple[Case, ...]
    test: tuple[Case, ...]
    """Cases without labels."""
    regions: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Values of each structure that may overlap others, in the order of painting into a label map: a later region
    covers earlier ones. Empty: the values themselves are the structures."""
    ignore: int | None = None
    """Value of voxels without annotation, which are neither trained on nor scored; not a key of ``labels``."""
    splits: tuple[Split, ...] = ()
    """Training and validation cases of each fold, if the data set defines folds."""
    columns: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Further facts about the cases, such as their patients: by column, and by case."""

    stage_labels: tuple[int, ...] = ()
    """Values of a previous stage's label maps; their masks are further input channels."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "root", Path(self.root))
        shown = sorted(self.labels)
        if 0 not in self.labels or not 0 <= shown[0] <= max(shown[-1], self.ignore or 0) <= LARGEST_VALUE:
            raise DataError(
                f"{self.name}: labels need 0 for the background and values up to {LARGEST_VALUE}, got {shown} and the "
                f"ignored value {self.ignore}"
            )
        if len(shown) > MOST_CLASSES:
            raise DataError(f"{self.name}: a task has at most {MOST_CLASSES} labels, got {len(shown)}; merge some")
        if self.ignore is not None and (self.ignore in self.labels or self.ignore < 0):
            raise DataError(
                f"{self.name}: the ignored value is {self.ignore}; needed: a positive number other than the labels "
                f"{shown}"
            )
        for name, values in self.regions.items():
            if not values or 0 in values or not self.labels.keys() >= set(values):
                raise DataError(
                    f"{self.name}: the region {name!r} has the values {list(values)}; needed: values of labels other "
                    f"than the background, from {shown[1:]}"
                )
        if len({frozenset(values) for values in self.regions.values()}) < len(self.regions):
            raise DataError(f"{self.name}: two of the regions {dict(self.regions)} are equal; keep one of them")

    @property
    def num_channels(self) -> int:
        """Channels of every image."""
        return len(self.modalities)

    @property
    def num_inputs(self) -> int:
        """Input channels of a network: those of the image, and the masks of a previous stage."""
        return len(self.modalities) + len(self.stage_labels)

    @property
    def num_classes(self) -> int:
        """Number of classes, background included; a class's index is the position of its value in ascending order."""
        return len(self.labels)

    @property
    def num_outputs(self) -> int:
        """Channels of a network's logits: one per class (softmax), or one per region (sigmoid) if there are any."""
        return len(self.regions) or self.num_classes

    @property
    def class_values(self) -> tuple[int, ...]:
        """Value of each class in files, in the order of the classes' indices."""
        return tuple(sorted(self.labels))

    @property
    def file_values(self) -> tuple[int, ...]:
        """Values that label files may contain: those of the classes, then the ignored value."""
        return self.class_values if self.ignore is None else (*self.class_values, self.ignore)

    @property
    def output_values(self) -> tuple[int, ...]:
        """Value of each output in a written label map: that of its class, or the value painted for its region.

        A region is painted with its first declared value that no later region has. If it has no such value (it is the
        union of later regions), it is painted with its first value.
        """
        if not self.regions:
            return self.class_values
        regions = list(self.regions.values())
        painted = []
        for place, values in enumerate(regions):
            later = {value for region in regions[place + 1 :] for value in region}
            painted.append(next((value for value in values if value not in later), values[0]))
        return tuple(painted)

    @property
    def foreground(self) -> dict[int, str]:
        """The labels without the background."""
        return {value: name for value, name in self.labels.items() if value != 0}

    @property
    def value_names(self) -> dict[int, str]:
        """Name of each foreground value of a label map; empty for regions, since a value may be in several."""
        return {} if self.regions else self.foreground

    @property
    def structures(self) -> dict[Structure, str]:
        """Name of each scored structure: regions if there are any, else the foreground's values.

        The keys are nnU-Net's: the sorted values of a region, or its single value.
        """
        if not self.regions:
            return {value: self.labels[value] for value in self.class_values if value != 0}
        return {tuple(sorted(values)) if len(values) > 1 else values[0]: name for name, values in self.regions.items()}

    def labelled(self, case: Case) -> tuple[int, ...] | None:
        """Return the values that were annotated in a case, in order, or None if all were.

        Raises
        ------
        DataError
            If the case names no value, or values that the task does not have.
        """
        if case.get("labelled") is None:
            return None
        values = sorted(set(case["labelled"]) - {0})
        if not values or not self.labels.keys() >= set(values):
            raise DataError(
                f"case {case['case']}: 'labelled' should list the values that were annotated in it, from "
                f"{list(self.class_values[1:])}, got {list(case['labelled'])}"
            )
        return None if len(values) == self.num_classes - 1 else tuple(values)
