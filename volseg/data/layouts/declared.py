"""Read a data set's description in ``dataset.json`` or ``task.yaml``: its channels, its labels and regions.

Labels are read in both usual directions: MSD's ``{"0": "background", "1": "edema"}`` from value to name, and nnU-Net's
``{"background": 0, "whole tumour": [1, 2, 3], "ignore": 4}`` from name to value or values.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any

from volseg.config.nearest import did_you_mean
from volseg.config.yaml_values import read_yaml
from volseg.data.cases import LARGEST_VALUE, Case, Task
from volseg.data.json_files import read_json
from volseg.errors import ConfigError, DataError
from volseg.formatting import list_duplicates

MANIFESTS = ("dataset.json", "task.yaml")
"""Files that may describe a data set."""

KEYS: Mapping[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("labels", "regions", "labelled", "dataset"), dict),
    **dict.fromkeys(("modality", "channel_names"), (dict, list)),
    **dict.fromkeys(("regions_class_order", "training", "test"), list),
    "ignore": int,
    "file_ending": str,
}
"""Keys of a manifest that are read, and the type of each value.

Other keys are allowed. A key similar to one of these with the same type is a typing error; ``"num_training": 260`` is
not.
"""

COUNTS = ("numTraining", "numTest")
"""Keys that only some layouts read, and that are similar to others."""

NEAR = 0.8
"""Similarity (difflib's ratio) from which a key is a typing error: 'lables' has 0.83, 'numTest' for 'test' 0.73."""

NUMBERED = re.compile(r"(Task\d\d|Dataset\d\d\d)_")
"""Names of folders of MSD and of nnU-Net."""

ENTRY_FIELDS = frozenset({"case", "image", "images", "label", "labelled"})
"""Fields of a case's entry that are not columns."""

IGNORE = "ignore"
"""nnU-Net's name of the value for voxels without annotation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeclaredLabels:
    """Meaning of the values of label maps; see `volseg.data.cases.Task`."""

    labels: dict[int, str]
    regions: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    ignore: int | None = None


def read_manifest(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return the path and the content of a folder's manifest, or None without one.

    Raises
    ------
    DataError
        If it cannot be read, is not a mapping, or there are two.
    """
    found = [folder / name for name in MANIFESTS if (folder / name).is_file()]
    if not found:
        return None
    if len(found) > 1:
        raise DataError(f"{folder} contains both {' and '.join(MANIFESTS)}; keep one of them")
    [path] = found
    declared = read_json(path) if path.suffix == ".json" else _read_yaml(path)
    if not isinstance(declared, dict):
        kind = "a JSON object" if path.suffix == ".json" else "`key: value` lines"
        raise DataError(f"{path} should contain {kind}, got {type(declared).__name__}")
    _refuse_slips(declared, path)
    return path, declared


def _refuse_slips(declared: Mapping[Any, Any], path: Path) -> None:
    """Raise if an unknown key is similar to an absent known key: it would have no effect."""
    for key, value in declared.items():
        absent = [name for name, kind in KEYS.items() if name not in declared and isinstance(value, kind)]
        if key not in (*KEYS, *COUNTS) and (
            near := get_close_matches(str(key).strip().lower(), absent, n=1, cutoff=NEAR)
        ):
            raise DataError(f"{path}: the key {key!r} is not known; did you mean {near[0]!r}?")


def _read_yaml(path: Path) -> Any:
    try:
        return read_yaml(path, str(path))
    except OSError as fault:
        raise DataError(f"{path} cannot be read as YAML: {fault}") from fault
    except ConfigError as fault:
        raise DataError(str(fault)) from fault


def read_channel_names(declared: Mapping[str, Any], source: Path) -> tuple[str, ...]:
    """Return the names of the channels: ``modality`` in MSD's manifests, ``channel_names`` in nnU-Net's.

    Raises
    ------
    DataError
        If there are none, or both exist and differ.
    """
    keys = [key for key in ("channel_names", "modality") if key in declared] or ["modality"]
    first, *others = [read_modalities(declared.get(key), source, key) for key in keys]
    if any(other != first for other in others):
        raise DataError(f"{source}: 'channel_names' and 'modality' name different channels; keep one of them")
    return first


def read_modalities(declared: Any, source: Path, key: str = "modality") -> tuple[str, ...]:
    """Return the channel names that ``source`` declares: {"0": "MRI"} in tasks, or a list.

    Raises
    ------
    DataError
        If there are none, or one is not a name.
    """
    names = declared if isinstance(declared, list) and declared else _sort_by_number(declared, key, source)
    for number, name in enumerate(names):
        if not isinstance(name, str) or not name.strip():
            raise DataError(f"{source}: {key!r} should name channel {number}, got {name!r}; reports use the names")
    return tuple(name.strip() for name in names)


def _sort_by_number(mapping: Any, key: str, manifest: Path) -> list[Any]:
    """Return the values of {"0": ..., "1": ...} in numeric order; the keys must count from 0 without a gap."""
    wanted = f"{manifest}: {key!r} should map the numbers 0, 1, 2 ... to names"
    if not isinstance(mapping, dict) or not mapping:
        raise DataError(f"{wanted}, got {mapping!r}")
    try:
        by_number = {int(number): name for number, name in mapping.items()}
    except (ValueError, TypeError):
        raise DataError(f"{wanted}, got the keys {list(mapping)}") from None
    if sorted(by_number) != list(range(len(mapping))):
        raise DataError(f"{wanted} without a gap, one per channel of an image; got the keys {list(mapping)}")
    return [by_number[number] for number in range(len(mapping))]


def read_regions(declared: Mapping[str, Any], source: Path) -> DeclaredLabels:
    """Return labels, regions and the value to ignore, as a manifest declares them.

    The keys are ``labels``, in either direction, and ``regions`` (name to values), ``regions_class_order`` and
    ``ignore``.

    Raises
    ------
    DataError
        If there are fewer than two labels, 0 is not a label, a value or a name occurs twice, or no label map could
        represent the regions.
    """
    entries = declared.get("labels")
    if not isinstance(entries, dict) or not entries:
        raise DataError(
            f"{source}: 'labels' should map values to names ({{'0': 'background', '1': ...}}) or names to values, got "
            f"{entries!r}"
        )
    pairs = _list_pairs(entries, source)
    named: dict[int, str] = {}
    for name, (value, *others) in pairs:
        if not others and value in named:
            raise DataError(f"{source} gives the value {value} to {named[value]!r} and to {name!r}; keep one of them")
        if not others:
            named[value] = name
    inside: dict[str, tuple[int, ...]] = {}
    if any(len(values) > 1 for _, values in pairs):  # then every name but the background's is a region, as in nnU-Net
        inside = {name: values for name, values in pairs if name != IGNORE and set(values) != {0}}
    for value in sorted({value for values in inside.values() for value in values}):
        named.setdefault(value, f"label_{value}")
    ignore = _read_ignore(declared.get(IGNORE), named, source)
    named = {value: name for value, name in named.items() if value != ignore}
    outside = declared.get("regions") or {}
    if inside and outside:
        raise DataError(f"{source} declares regions in 'labels' and in 'regions'; keep one of them")
    regions = inside or _read_own_regions(outside, named, source)
    if len(named) < 2 or 0 not in named:
        raise DataError(
            f"{source} declares the labels {named}; needed: 0 for the background and at least one structure"
        )
    if doubled := list_duplicates(named.values()):
        raise DataError(f"{source} gives the name {doubled[0]!r} to several labels; metrics need unique names")
    for name, values in regions.items():
        if strange := sorted(set(values) - (named.keys() - {0})):
            raise DataError(
                f"{source}: the region {name!r} contains {strange}; needed: values of declared structures, here "
                f"{sorted(named.keys() - {0})}"
            )
    painted = _paint(regions, declared.get("regions_class_order"), source)
    return DeclaredLabels(labels=dict(sorted(named.items())), regions=painted, ignore=ignore)


def _list_pairs(entries: Mapping[Any, Any], source: Path) -> list[tuple[str, tuple[int, ...]]]:
    """Return name and values of each entry, of a mapping from values to names or from names to values."""
    pairs = list(entries.items())
    if all(isinstance(key, int) or (isinstance(key, str) and key.strip().lstrip("-").isdigit()) for key in entries):
        pairs = [(name, value) for value, name in pairs]
    for name, values in pairs:
        if not isinstance(name, str) or not name.strip():
            raise DataError(f"{source}: 'labels' should name {values}, got {name!r}; reports use the names")
    return [(name.strip(), _as_values(values, name, source)) for name, values in pairs]


def _as_values(value: Any, name: str, source: Path) -> tuple[int, ...]:
    listed = value if isinstance(value, list) else [value]
    if not listed:
        raise DataError(f"{source}: the region {name!r} has no values")
    found = tuple(_as_value(one, name, source) for one in listed)
    if doubled := list_duplicates(map(str, found)):
        raise DataError(f"{source}: the region {name!r} lists the value {doubled[0]} twice")
    return found


def _as_value(value: Any, name: object, source: Path) -> int:
    """Return a value of label maps as an integer; like nnU-Net, accept a string of digits."""
    if isinstance(value, str) and value.strip().isascii() and value.strip().isdigit():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= LARGEST_VALUE:
        raise DataError(
            f"{source}: the value of the label {name!r} should be an integer from 0 to {LARGEST_VALUE}, got {value!r}"
        )
    return value


def _read_ignore(declared: Any, named: Mapping[int, str], source: Path) -> int | None:
    """Return the value to ignore, from the label ``ignore`` or the key ``ignore``."""
    called = [value for value, name in named.items() if name == IGNORE]
    if declared is None:
        ignore = called[0] if called else None
    else:
        ignore = _as_value(declared, IGNORE, source)
        if called and called != [ignore]:
            raise DataError(f"{source} ignores {ignore}, but gives {called[0]} the name {IGNORE!r}; keep one of them")
        if not called and ignore in named:
            raise DataError(f"{source} ignores {ignore}, which is the label {named[ignore]!r}; use another value")
    if ignore == 0:
        raise DataError(f"{source} ignores 0, which is the background; ignored voxels need a value of their own")
    return ignore


def _read_own_regions(entries: Any, named: Mapping[int, str], source: Path) -> dict[str, tuple[int, ...]]:
    """Return the regions of the key ``regions``; their members may be names."""
    if not isinstance(entries, dict) or not all(isinstance(name, str) and name.strip() for name in entries):
        raise DataError(f"{source}: 'regions' should map names to the labels that belong to each, got {entries!r}")
    by_name = {name: value for value, name in named.items()}
    regions = {}
    for name, members in entries.items():
        listed = members if isinstance(members, list) else [members]
        regions[name.strip()] = _as_values([by_name.get(member, member) for member in listed], name, source)
    return regions


def _paint(regions: Mapping[str, tuple[int, ...]], order: Any, source: Path) -> dict[str, tuple[int, ...]]:
    """Return the regions, each with its painted value first.

    A region is painted over those before it, so its value is one that no later region has, if there is such a value.
    """
    if order is not None and (not isinstance(order, list) or len(order) != len(regions)):
        raise DataError(
            f"{source}: 'regions_class_order' should list a value for each of the {len(regions)} regions, got {order!r}"
        )
    painted: dict[str, tuple[int, ...]] = {}
    names = list(regions)
    for number, (name, values) in enumerate(regions.items()):
        later = {value for other in names[number + 1 :] for value in regions[other]}
        own = [value for value in values if value not in later] or list(values)
        first = own[0] if order is None else _as_value(order[number], name, source)
        if first not in own:
            raise DataError(
                f"{source}: 'regions_class_order' paints {name!r} with {first}; needed: one of {own}, which belong to "
                "it and to no later region"
            )
        painted[name] = (first, *(value for value in values if value != first))
    _require_seen(painted, source)
    return painted


def _require_seen(painted: Mapping[str, tuple[int, ...]], source: Path) -> None:
    """Raise unless every voxel is still in the same regions after painting region over region."""
    for value in sorted({value for values in painted.values() for value in values}):
        inside = [name for name, values in painted.items() if value in values]
        last = inside[-1]
        seen = [name for name, values in painted.items() if painted[last][0] in values]
        if seen != inside:
            raise DataError(
                f"{source}: voxels of {value} are in the regions {', '.join(inside)}, but {last!r}, the last of these, "
                f"is painted over them with {painted[last][0]}, which is in {', '.join(seen)}: predictions could not "
                f"show the difference. List regions from the largest to the smallest, or add a region of only {value}"
            )


def read_labelled(declared: Any, labels: Mapping[int, str], where: str) -> tuple[int, ...] | None:
    """Return the values that were annotated in a case, given as values or names, or None for all of them.

    Raises
    ------
    DataError
        If one is not a label, or there is none.
    """
    if declared is None:
        return None
    by_name = {name: value for value, name in labels.items()}
    structures = {value: name for value, name in labels.items() if value != 0}
    found: list[int] = []
    for member in declared if isinstance(declared, Sequence) and not isinstance(declared, str) else [declared]:
        digits = isinstance(member, str) and member.isascii() and member.isdigit() and member not in by_name
        value = int(member) if digits else by_name.get(member, member)
        if isinstance(value, bool) or value not in structures:
            known = did_you_mean(str(member), [*structures.values(), *map(str, structures)])
            raise DataError(f"{where}: 'labelled' contains {member!r}, which is not a structure of the task; {known}")
        found.append(value)
    if not found:
        raise DataError(f"{where}: 'labelled' names no label; leave it out if all labels were annotated")
    return tuple(sorted(set(found)))


def add_labelled(cases: Sequence[Case], declared: Any, labels: Mapping[int, str], source: Path) -> tuple[Case, ...]:
    """Return the cases, each with its annotated values if ``labelled`` maps its id to labels.

    Raises
    ------
    DataError
        If it names an unknown case, or an unknown label.
    """
    if declared is None:
        return tuple(cases)
    if not isinstance(declared, dict):
        raise DataError(f"{source}: 'labelled' should map case ids to lists of labels, got {type(declared).__name__}")
    _require_cases(declared, "labelled", cases, source)
    found = {name: read_labelled(members, labels, f"{source}, {name}") for name, members in declared.items()}
    return tuple(
        case if found.get(case["case"]) is None else {**case, "labelled": found[case["case"]]} for case in cases
    )


def _require_cases(named: Iterable[object], key: str, cases: Sequence[Case], source: Path) -> None:
    known = {case["case"] for case in cases}
    if unknown := [str(name) for name in named if name not in known]:
        raise DataError(f"{source}: {key!r} names {unknown[0]!r}, an unknown case; {did_you_mean(unknown[0], known)}")


def make_task(
    source: Path,
    declared: Mapping[str, Any],
    modalities: tuple[str, ...],
    labels: DeclaredLabels,
    cases: tuple[Sequence[Case], Sequence[Case]],
    columns: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
) -> Task:
    """Return the task of a folder that its manifest ``source`` describes.

    Parameters
    ----------
    cases
        Cases to train on and to predict, as `sort_cases` returns them.
    columns
        Further facts about the cases, in addition to those in the manifest.
    """
    training, test = cases
    return Task(
        name=name_task(source.parent, declared),
        root=source.parent,
        modalities=modalities,
        labels=labels.labels,
        regions=labels.regions,
        ignore=labels.ignore,
        training=add_labelled(training, declared.get("labelled"), labels.labels, source),
        test=tuple(test),
        columns={**columns, **_read_patients(declared, training, source)},
    )


def name_task(folder: Path, declared: Mapping[str, Any]) -> str:
    """Return the name of a task: its folder's if that is numbered as in MSD and nnU-Net, else the declared one."""
    return folder.name if NUMBERED.match(folder.name) else str(declared.get("name") or folder.name).strip()


def _read_patients(declared: Mapping[str, Any], cases: Sequence[Case], source: Path) -> dict[str, dict[str, str]]:
    """Return the column ``patients`` of a manifest that maps cases to patients; no column without such a mapping.

    Raises
    ------
    DataError
        If it is not a mapping of names to names, or names an unknown case.
    """
    if (patients := declared.get("patients")) is None:
        return {}
    if not isinstance(patients, Mapping) or not all(_is_name(value) for value in patients.values()):
        raise DataError(f"{source}: 'patients' should map each case to its patient, got {str(patients)[:80]!r}")
    _require_cases(patients, "patients", cases, source)
    return {"patients": {name: str(value).strip() for name, value in patients.items()}}


def note_columns(entry: Mapping[str, Any], case: str, columns: dict[str, dict[str, str]]) -> None:
    """Add the further facts in a case's entry, such as its patient, to ``columns``."""
    for name, value in entry.items():
        if name not in ENTRY_FIELDS and (_is_name(value) or isinstance(value, float)):
            columns.setdefault(name, {})[case] = str(value).strip()


def _is_name(value: object) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool)
