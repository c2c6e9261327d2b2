"""Write a corrected copy of a data set: safe repairs only, and a record of them.

Four faults are repaired: a label that has no place, another order of axes, or a place that differs from its image's by
rounding; label values within a thousandth of integers; a qform that disagrees with the sform, which the readers use;
and equal cases in training and in validation, of which the first is kept. All other faults need a person who knows the
patient: the value for a NaN, the meaning of an undeclared value, the right name of two equal images.

The copy is a task in MSD's layout with its own files: through links, a later edit would change the original.
The copy appears under its name once it is complete, and every repaired case has been read again.
"""

import gzip
import json
import os
import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import torch
from monai.data import MetaTensor
from nibabel.spatialimages import HeaderDataError

from volseg.data.cases import Case, Split, Task, write_splits
from volseg.data.checks.kinds import KINDS, Finding
from volseg.data.checks.reading import read_case
from volseg.data.checks.task import TaskCheck
from volseg.data.checks.volumes import ROUNDED_VALUE, check_grid
from volseg.data.itk import simpleitk
from volseg.data.readers import list_files, read_label, read_volume, stem
from volseg.data.threads import map_in_threads
from volseg.errors import DataError
from volseg.files import name_partial
from volseg.transforms.grid import Grid

ROUNDED_VOXELS = 0.25
"""Largest distance of a label from its image that counts as rounding: half of the usual error of half a voxel."""

FORMS = {"mirrored", "forms-disagree"}
PLACES = {"affine", "label-fractions", "label-reordered"}
DETACHED = {".mhd": ".mha", ".nhdr": ".nrrd"}
"""Suffixes of headers with voxels in a second file, and of the formats that store both in one file."""

RECORD = "repaired.json"
SPLITS = "splits.json"
"""File for the folds of a table, which the layout of the copy cannot store."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RepairedTask:
    """A corrected copy, and the record of its repairs."""

    root: Path
    repaired: tuple[dict[str, str], ...]
    """``case``, ``file`` (of the copy), ``kind`` and ``done`` of each repair."""
    left_out: tuple[str, ...]
    """Ids of bad cases that could not be repaired and were left out."""
    kept_bad: tuple[str, ...]
    """Ids of bad cases that were copied unchanged."""
    splits: Path | None = None
    """File of the folds, if the data set defines folds."""

    def lines(self) -> list[str]:
        """Return the lines of a report."""
        cases = {row["case"] for row in self.repaired}
        told = [f"repaired  {row['case']}  {row['kind']}  {row['file']}: {row['done']}" for row in self.repaired]
        told += [f"left out  {name}" for name in self.left_out]
        told += [f"copied unchanged  {name}" for name in self.kept_bad]
        if self.splits is not None:
            told.append(f"the folds of the table are in {self.splits}; set split.file to it, or other folds are used")
        return [
            *told,
            f"{self.root} is the corrected copy: {len(cases)} case(s) repaired, {len(self.left_out)} left out",
        ]


def repair_task(
    check: TaskCheck, target: str | Path, *, keep_bad: bool = False, workers: int | None = None
) -> RepairedTask:
    """Write a corrected copy of a checked data set.

    Parameters
    ----------
    check : TaskCheck
        Result of `check_task`.
    target : path
        A new or empty folder, neither in the data set's folder nor above it.
    keep_bad : bool
        Copy cases that cannot be repaired unchanged, instead of leaving them out.
    workers : int, optional
        Threads; see `map_in_threads`.

    Raises
    ------
    DataError
        If the target is not allowed, no training case is left, or a repaired case is still bad.
    """
    target = Path(os.path.abspath(target))
    _require_free(target, check.task)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial_root = name_partial(target)
    partial_root.mkdir()
    try:
        outcomes = _write_cases(check, partial_root, keep_bad, workers)
        repaired = _write_manifests(check, partial_root, outcomes, target)
        os.replace(partial_root, target)  # an empty folder of that name is replaced
    finally:
        shutil.rmtree(partial_root, ignore_errors=True)
    return repaired


@dataclass(frozen=True, kw_only=True, slots=True)
class _Outcome:
    """Result of copying a case."""

    case: Case | None
    """The case with its files in the copy; None if it was left out."""
    done: tuple[dict[str, str], ...] = ()
    is_bad: bool = False


def _require_free(target: Path, task: Task) -> None:
    source = Path(os.path.realpath(task.root))
    real = Path(os.path.realpath(target))
    if real.is_relative_to(source) or source.is_relative_to(real):
        raise DataError(f"{target} is inside {task.root} or contains it; choose another folder for the corrected copy")
    if target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
        raise DataError(f"{target} exists and is not an empty folder; name a new folder for the corrected copy")


def _write_cases(check: TaskCheck, root: Path, keep_bad: bool, workers: int | None) -> list[_Outcome]:
    for folder in ("imagesTr", "labelsTr", *(["imagesTs"] if check.task.test else [])):
        (root / folder).mkdir()
    found: dict[str, list[Finding]] = defaultdict(list)
    for finding in check.findings:
        found[finding.case].append(finding)
    once = {first: others for first, *others in check.equal}
    write = partial(_write_case, task=check.task, root=root, keep_bad=keep_bad, once=once)
    pairs = [(case, found[case["case"]]) for case in check.cases]
    with closing(map_in_threads(lambda pair: write(*pair), pairs, workers)) as outcomes:
        return list(outcomes)


def _write_case(
    case: Case, found: Sequence[Finding], *, task: Task, root: Path, keep_bad: bool, once: Mapping[str, Sequence[str]]
) -> _Outcome:
    """Copy a case with possible repairs; ``once`` maps cases to their duplicates, which are left out."""
    kinds = {finding.kind for finding in found}
    bad = {kind for kind in kinds if KINDS[kind].severity == "bad"}
    stays_alone = "leak" in bad and case["case"] in once and not keep_bad
    bad -= {"leak"} if stays_alone else set()
    label = _repair_label(case, task) if bad and bad <= PLACES else None
    is_bad = bool(bad) and label is None
    sources = {name: list_files(case[name]) for name in ("image", "label") if name in case}
    files = [file for several in sources.values() for file in several]
    # It is unknown which voxel file belongs to the header of a bad case.
    if is_bad and not (keep_bad and all(file.exists() and file.suffix not in DETACHED for file in files)):
        return _Outcome(case=None, is_bad=True)
    name, done = case["case"], list[dict[str, str]]()
    folder = root / ("imagesTr" if "label" in case else "imagesTs")
    images = sources["image"]
    names = [name] if len(images) == 1 else [f"{name}_{number:04d}" for number in range(len(images))]
    copies = [_copy(file, folder / new) for file, new in zip(images, names, strict=True)]
    copied: Case = {**case, "image": copies[0] if len(copies) == 1 else tuple(copies)}
    if "label" in case:
        if label is None:
            copied["label"] = _copy(sources["label"][0], root / "labelsTr" / name)
        else:
            copied["label"] = root / "labelsTr" / f"{name}.nii.gz"
            _write_label(label, copied["label"])
            done += [_describe_repair(copied["label"], name, kind, root) for kind in sorted(bad)]
    if stays_alone:
        done.append(_describe_repair(copies[0], name, "leak", root))
    if kinds & FORMS:
        files = [*copies, *([copied["label"]] if "label" in copied and label is None else [])]
        done += [_describe_repair(file, name, kind, root) for file in files for kind in _align_forms(file)]
    if done:
        _require_repaired(copied, task, {row["kind"] for row in done})
    return _Outcome(case=copied, done=tuple(done), is_bad=is_bad)


def _describe_repair(file: Path, case: str, kind: str, root: Path) -> dict[str, str]:
    return {"case": case, "file": str(file.relative_to(root)), "kind": kind, "done": KINDS[kind].repaired}


def _require_repaired(copied: Case, task: Task, kinds: set[str]) -> None:
    """Raise if a repaired copy, read again, still has the repaired faults."""
    checked = read_case(copied, task)
    left = [finding for finding in (*checked.problems, *checked.remarks) if finding.kind in kinds]
    if left:
        raise DataError(f"the correction failed: {left[0]}; correct the file by hand, and report this as a bug")


def _repair_label(case: Case, task: Task) -> MetaTensor | None:
    """Return the label on its image's grid with integer values if that needs no guess; else None."""
    image = read_volume(case["image"])
    label = read_label(case["label"], image, task)
    voxels = label.as_tensor().round()
    values = voxels.unique().to(torch.int64).tolist()
    if (voxels - label.as_tensor()).abs().max() > ROUNDED_VALUE or not {*task.file_values}.issuperset(values):
        return None
    grid, other = Grid.of(image), Grid.of(label)
    if (order := grid.find_axis_order(other)) is not None:
        dims, flipped = order
        voxels = voxels.permute(0, *(1 + dim for dim in dims)).flip([1 + axis for axis in flipped])
        other = other.reorder(dims, flipped)
    is_placed = bool(label.meta["sform_code"] or label.meta["qform_code"])
    if grid.shape != other.shape:
        return None
    if is_placed and grid.distance(other) > ROUNDED_VOXELS * float(grid.affine[:3, :3].norm(dim=0).min()):
        return None
    return MetaTensor(voxels, affine=image.affine)


def _copy(file: Path, target: Path) -> Path:
    """Copy a file or a DICOM folder under a new stem; return the copy."""
    if file.is_dir():
        return Path(shutil.copytree(file, target))
    if together := DETACHED.get(file.suffix.lower()):
        target = target.with_name(target.name + together)
        simpleitk().WriteImage(simpleitk().ReadImage(str(file)), str(target), useCompression=True)
        return target
    target = target.with_name(target.name + (file.name[len(stem(file)) :] or "".join(file.suffixes)))
    shutil.copyfile(file, target)
    return target


def _write_label(label: MetaTensor, path: Path) -> None:
    voxels, affine = label.as_tensor()[0].numpy(), label.affine.numpy()
    kind = np.uint8 if voxels.max() <= np.iinfo(np.uint8).max else np.int32
    image = nibabel.Nifti1Image(voxels.astype(kind), affine)
    image.header.set_xyzt_units("mm")
    image.header.set_sform(affine, code="scanner")
    _set_qform(image.header, affine, 1)
    nibabel.save(image, path)


def _align_forms(file: Path) -> list[str]:
    """Make the qform of a copied NIfTI file agree with its sform; return the kinds of the repaired faults.

    Only the header is rewritten; the bytes of the voxels do not change.
    """
    found = [fault.kind for fault in check_grid(read_volume(file)) if fault.kind in FORMS]
    if found:
        is_packed = file.suffix.lower() == ".gz"
        content = gzip.decompress(file.read_bytes()) if is_packed else file.read_bytes()
        kinds = (nibabel.Nifti1Header, nibabel.Nifti2Header)
        kind = next(kind for kind in kinds if kind.may_contain_header(content[: kind.sizeof_hdr]))
        header = kind(content[: kind.sizeof_hdr], check=False)
        _set_qform(header, header.get_sform(), int(header["qform_code"]))
        content = header.binaryblock + content[kind.sizeof_hdr :]
        file.write_bytes(gzip.compress(content, mtime=0) if is_packed else content)
    return found


def _set_qform(header: Any, sform: np.ndarray, code: int) -> None:
    """Set the qform to the sform, or switch it off if the sform has shears, which a qform cannot express."""
    try:
        header.set_qform(sform, code, strip_shears=False)
    except HeaderDataError:
        header["qform_code"] = 0


def _write_manifests(check: TaskCheck, root: Path, outcomes: Sequence[_Outcome], target: Path) -> RepairedTask:
    """Write the task's ``dataset.json``, and the record of repairs next to it."""
    task = check.task
    cases = [outcome.case for outcome in outcomes if outcome.case is not None]
    training, test = (
        [_enter(case, task, root) for case in cases if ("label" in case) is wanted] for wanted in (True, False)
    )
    if not training:
        raise DataError(f"no training case of {task.name} is left; correct the files that the check lists by hand")
    declared: dict[str, Any] = {
        "name": task.name,
        "modality": {str(index): name for index, name in enumerate(task.modalities)},
        "labels": {str(value): name for value, name in sorted(task.labels.items())},
        **({"regions": {name: list(values) for name, values in task.regions.items()}} if task.regions else {}),
        **({} if task.ignore is None else {"ignore": task.ignore}),
        "numTraining": len(training),
        "numTest": len(test),
        "training": training,
        "test": test,
    }
    bad_cases = [(case["case"], one) for case, one in zip(check.cases, outcomes, strict=True) if one.is_bad]
    left_out = tuple(name for name, one in bad_cases if one.case is None)
    kept_bad = tuple(name for name, one in bad_cases if one.case is not None)
    rows = tuple(row for outcome in outcomes for row in outcome.done)
    splits = target / SPLITS if task.splits else None
    repaired = RepairedTask(root=target, repaired=rows, left_out=left_out, kept_bad=kept_bad, splits=splits)
    if task.splits:
        _write_splits(task.splits, {case["case"] for case in training}, root / SPLITS)
    record = {"source": str(task.root), "repaired": rows, "left_out": left_out, "kept_bad": kept_bad}
    for name, content in (("dataset.json", declared), (RECORD, record)):
        (root / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return repaired


def _write_splits(splits: Sequence[Split], kept: Set[str], path: Path) -> None:
    """Write the folds of the cases that are in the copy."""
    of_kept = [
        Split(*(tuple(name for name in side if name in kept) for side in (split.training, split.validation)))
        for split in splits
    ]
    write_splits(path, of_kept)


def _enter(case: Case, task: Task, root: Path) -> dict[str, Any]:
    """Return a case's entry in the manifest, with its other columns, such as its patient."""
    columns = {name: of[case["case"]] for name, of in task.columns.items() if of.get(case["case"])}
    images = [str(file.relative_to(root)) for file in list_files(case["image"])]
    entry: dict[str, Any] = {**columns, "case": case["case"], "image": images[0] if len(images) == 1 else images}
    if "label" in case:
        entry["label"] = str(case["label"].relative_to(root))
    if case.get("labelled") is not None:
        entry["labelled"] = list(case["labelled"])
    return entry
