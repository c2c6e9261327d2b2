"""Read tables of paths (CSV or TSV): a row per case, a column per file.

========== ==========================================================================================================
column     content
========== ==========================================================================================================
case       id, which determines folds and names predictions
image      path of the image; or a column ``image_NAME`` for each channel
label      path of the label map
labelled   the labels that were annotated in this case, by value or name, separated by ``;``; empty: all
weight     relative frequency of the case's patches; 0: never; empty: 1
fold       number of the fold in which the case validates
split      ``train``, ``validation`` or ``test``, in place of ``fold``
========== ==========================================================================================================

``split.group`` may name any other column, such as ``patient``: its cells give the patient of each case.

Paths are relative to the table. The names of labels and channels are in ``dataset.json`` or ``task.yaml`` next to
the table; for a table without them, see `volseg.data.layouts.naming`.
"""

import csv
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from volseg.config.nearest import did_you_mean
from volseg.data.cases import Case, Split, Task
from volseg.data.layouts.declared import make_task, read_manifest
from volseg.data.layouts.files import require_id, sort_cases, split_path
from volseg.data.layouts.naming import image_of, log_once, match_channels, name_channels, name_labels
from volseg.errors import DataError
from volseg.formatting import list_duplicates

TABLES = (".csv", ".tsv")
"""Suffixes of tables."""

COLUMNS = ("case", "image", "label", "labelled", "weight", "fold", "split")
CHANNEL = "image_"
"""Prefix of the columns of an image's channels."""

NEAR = 0.8
"""Similarity (difflib's ratio) from which the name of a column counts as misspelt: ``imgae`` does, ``age`` does not."""

NO_SLIPS = ("height",)
"""Common columns whose names are similar to one that is read."""

SIDES = {
    **dict.fromkeys(("train", "training"), "training"),
    **dict.fromkeys(("val", "valid", "validation"), "validation"),
    "test": "test",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Table:
    path: Path
    columns: tuple[str, ...]
    rows: tuple[tuple[str, Mapping[str, str]], ...]
    """Place of each row, for messages, and its cells by column."""

    @property
    def channels(self) -> tuple[str, ...]:
        """Return the names of the channels; one empty name for a single column."""
        return tuple(name[len(CHANNEL) :] for name in self.columns if name.startswith(CHANNEL)) or ("",)

    @property
    def others(self) -> list[str]:
        """Return the names of the columns that a task keeps unchanged, for weights and for `split.group`."""
        own = {*COLUMNS} - {"weight"}
        return [name for name in self.columns if name and name not in own and not name.startswith(CHANNEL)]


def list_tables(folder: Path) -> list[Path]:
    """Return the tables in a folder whose first line names case, image and label: other tables do not list cases."""
    tables = [path for path in sorted(folder.glob("[!.]*")) if path.suffix.lower() in TABLES and path.is_file()]
    return [path for path in tables if {"case", "image", "label"} <= {*re.split(r'[\s",;_]+', _read_head(path))}]


def _read_head(path: Path) -> str:
    with path.open(encoding="utf-8-sig", errors="replace") as table:
        return table.readline().casefold()


def load_table(path: Path, *, require_files: bool) -> Task:
    """Return the task that a table lists; see `volseg.data.layouts.load_task`."""
    table = _read(path, ("case", "image", "label"))
    manifest, declared = read_manifest(path.parent) or (path.parent / "task.yaml", {})
    if "labelled" in declared and "labelled" not in table.columns:
        raise DataError(f"{manifest} has 'labelled'; move it to a column 'labelled' of {path}")
    modalities, order = match_channels(table.channels, name_channels(declared, manifest), manifest)
    sides = [_read_side(row, where) for where, row in table.rows]
    listed: dict[str, list[Case]] = {"training": [], "test": []}
    for (where, row), side in zip(table.rows, sides, strict=True):
        case: Case = {"case": require_id(row["case"], where), "image": _read_image(table, row, where, order)}
        if side != "test":
            case["label"] = _locate(row["label"], "label", table, where)
        listed["test" if side == "test" else "training"].append(case)
    training, test = sort_cases(listed["training"], listed["test"], path, require_files=require_files)
    labels = name_labels(
        declared, manifest, [case["label"] for case in training], path.parent, require_files=require_files
    )
    looked_for = {
        row["case"]: cells
        for (_, row), side in zip(table.rows, sides, strict=True)
        if side != "test" and (cells := _split(row.get("labelled", "")))
    }
    columns = {name: {row["case"]: row[name] for _, row in table.rows} for name in table.others}
    task = make_task(path, {"labelled": looked_for}, modalities, labels, (training, test), columns)
    return replace(task, name=path.stem, splits=_make_splits(table, sides))


def read_images(path: Path, modalities: Sequence[str]) -> list[Case]:
    """Return the cases of a table to predict, with the channels in the order of ``modalities``.

    Raises
    ------
    DataError
        If the table cannot be read, or has other channels.
    """
    table = _read(path, ("case", "image"))
    _, order = match_channels(table.channels, modalities, Path("the task"))
    return [
        {"case": require_id(row["case"], where), "image": _read_image(table, row, where, order)}
        for where, row in table.rows
    ]


class LabelRow(NamedTuple):
    """Label map of a case, from its row."""

    label: Path
    prediction: str | None
    """The cell's text; None without such a column."""
    labelled: Sequence[str]
    """The annotated labels, by value or name; empty for all."""


def read_labels(path: Path) -> dict[str, LabelRow]:
    """Return the label map of each case with one, and the name of its prediction; images are not needed.

    Raises
    ------
    DataError
        If the table cannot be read, has no label map, or a case or a prediction occurs twice.
    """
    table = _read(path, ("case", "label"))
    rows = []
    for where, row in table.rows:
        if row["label"]:
            label, labelled = _locate(row["label"], "label", table, where), _split(row.get("labelled", ""))
            rows.append((require_id(row["case"], where), LabelRow(label, row.get("prediction"), labelled)))
    found = dict(rows)
    if not found:
        raise DataError(f"{path} lists no label map; needed: a path under 'label'")
    named = [row.prediction for row in found.values() if row.prediction]
    if doubled := list_duplicates(case for case, _ in rows) or list_duplicates(named):
        raise DataError(f"{path} lists {doubled[0]!r} twice; needed: a row per case, each with its own prediction")
    return found


def _read(path: Path, required: Sequence[str]) -> _Table:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = file.readlines()
        first = next((line for line in lines if line.strip()), "")
        delimiter = "\t" if path.suffix.lower() == ".tsv" else max(",;\t", key=first.count)
        reader = csv.reader(lines, delimiter=delimiter, skipinitialspace=True, strict=True)
        rows = [
            (reader.line_num, [cell.strip() for cell in row]) for row in reader if any(cell.strip() for cell in row)
        ]
    except UnicodeDecodeError as fault:
        raise DataError(f"{path} is not text in UTF-8 ({fault.reason}); save it as CSV in UTF-8") from fault
    except (OSError, csv.Error) as fault:
        raise DataError(f"{path} cannot be read as a table: {fault}") from fault
    if len(rows) < 2:
        raise DataError(
            f"{path} lists no case; needed: a line of column names ({', '.join(COLUMNS)}), and a line per case"
        )
    columns = _read_columns(rows[0][1], required, path)
    for number, cells in rows[1:]:
        if len(cells) != len(columns):
            raise DataError(f"{path}, line {number} has {len(cells)} cells; needed: {len(columns)}, as in the header")
    return _Table(
        path=path,
        columns=columns,
        rows=tuple((f"{path}, line {number}", dict(zip(columns, cells, strict=True))) for number, cells in rows[1:]),
    )


def _read_columns(header: Sequence[str], required: Sequence[str], path: Path) -> tuple[str, ...]:
    """Return the names of the columns; unknown ones are allowed, unless they resemble typing errors."""
    names = [name.casefold() for name in header]
    if doubled := list_duplicates(name for name in names if name):
        raise DataError(f"{path} has two columns called {doubled[0]!r}; keep one of them")
    channels = [name for name in names if name.startswith(CHANNEL) and name != CHANNEL]
    if "image" in required and ("image" in names) == bool(channels):
        raise DataError(
            f"{path} needs either a column 'image' or a column 'image_NAME' for each channel, got {', '.join(names)}; "
            f"{did_you_mean('image', names)}"
        )
    if missing := [name for name in required if name not in {*names, "image"}]:
        raise DataError(f"{path} needs a column {missing[0]!r}; {did_you_mean(missing[0], names)}")
    other = [name for name in names if name and name not in {*COLUMNS, *channels}]
    for name in other:
        if channels and name.startswith(CHANNEL.rstrip("_")):
            written = header[names.index(name)]
            channel = CHANNEL + written[len(CHANNEL) - 1 :].lstrip("-. ")
            raise DataError(
                f"{path} has a column {written!r}; rename it to {channel!r} if it is a channel, or to a name that "
                "does not begin with 'image'"
            )
        if name not in NO_SLIPS and (near := get_close_matches(name, COLUMNS, n=1, cutoff=NEAR)):
            raise DataError(f"{path} has a column {name!r}; rename it to {near[0]!r}, or to a less similar name")
    if other:
        log_once(f"{path}: training ignores the column(s) {', '.join(other)}, unless split.group names them")
    # The names of channels keep upper and lower case.
    return tuple(
        CHANNEL + raw[len(CHANNEL) :] if name in channels else name for name, raw in zip(names, header, strict=True)
    )


def _read_image(table: _Table, row: Mapping[str, str], where: str, order: Sequence[int]) -> Path | tuple[Path, ...]:
    columns = [CHANNEL + name for name in table.channels] if table.channels != ("",) else ["image"]
    return image_of([_locate(row[columns[number]], columns[number], table, where) for number in order])


def _locate(text: str, column: str, table: _Table, where: str) -> Path:
    """Return the path in a cell, relative to the table; it may be anywhere."""
    if not text:
        raise DataError(
            f"{where}: {column!r} is empty; needed: a path (a case without a label needs 'test' under 'split')"
        )
    if os.path.isabs(text):
        return Path(os.path.abspath(text))
    path = split_path(text, where)
    if path.anchor:
        raise DataError(f"{where}: {column!r} is {text!r}, a path of another system; needed: one relative to the table")
    return Path(os.path.abspath(table.path.parent.joinpath(*path.parts)))


def _split(text: str) -> list[str]:
    return [cell.strip() for cell in text.split(";") if cell.strip()]


def _read_side(row: Mapping[str, str], where: str) -> str | None:
    """Return the side of the split that a row names, or None."""
    if not (side := row.get("split", "").casefold()):
        return None
    if side not in SIDES:
        raise DataError(f"{where}: 'split' is {side!r}; {did_you_mean(side, ('train', 'validation', 'test'))}")
    return SIDES[side]


def _make_splits(table: _Table, sides: Sequence[str | None]) -> tuple[Split, ...]:
    """Return the splits that the table's columns define, or none without such columns."""
    rows = [(where, row) for (where, row), side in zip(table.rows, sides, strict=True) if side != "test"]
    ids = [row["case"] for _, row in rows]
    validates = {row["case"] for (_, row), side in zip(table.rows, sides, strict=True) if side == "validation"}
    if not any(row.get("fold") for _, row in rows):
        if not validates:
            return ()
        return (_divide(ids, validates, table.path),)
    if validates:
        raise DataError(f"{table.path} chooses the validation cases both by 'fold' and by 'split'; keep one of them")
    folds = {row["case"]: _read_fold(row["fold"], where) for where, row in rows}
    numbers = sorted({fold for fold in folds.values() if fold is not None})
    if numbers != list(range(len(numbers))):
        raise DataError(f"{table.path}: 'fold' contains {numbers}; needed: the numbers 0, 1, 2 ... without a gap")
    return tuple(_divide(ids, {name for name in ids if folds[name] == number}, table.path) for number in numbers)


def _read_fold(text: str, where: str) -> int | None:
    """Return the fold in which a case validates, or None if it always trains."""
    if not text:
        return None
    if not (text.isascii() and text.isdigit()):
        raise DataError(f"{where}: 'fold' is {text!r}; needed: the number of the fold in which the case validates")
    return int(text)


def _divide(ids: Sequence[str], validates: Collection[str], path: Path) -> Split:
    try:
        return Split(
            training=tuple(sorted(name for name in ids if name not in validates)), validation=tuple(sorted(validates))
        )
    except DataError as fault:
        raise DataError(f"{path}: {fault}") from fault
