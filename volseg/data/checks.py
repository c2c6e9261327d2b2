"""What keeps a case from being used, each fault in one sentence, and all bad cases at once.

A header can be right while the voxels are not, so files are read to their end; a training prepares what was read here
(`volseg.data.preparing`), so that no file is decompressed twice.
"""

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import product
from pathlib import Path

import numpy as np
import torch
from monai.data import MetaTensor
from torch import Tensor

from volseg.data.cases import Case, Task
from volseg.data.names import list_some
from volseg.data.readers import list_files, name_files, read_volume
from volseg.data.threads import map_in_threads
from volseg.errors import DataError
from volseg.parallel.progress import report_progress
from volseg.transforms.grid import MISPLACED_VOXELS, Grid

__all__ = [
    "CheckedCase",
    "Findings",
    "Problem",
    "Remark",
    "check_case",
    "check_cases",
    "find_same_images",
    "inspect_cases",
    "read_case",
    "refuse_held_out",
    "remark_on_same_images",
    "require_sound",
    "summarise_remarks",
]

FINEST_SPACING, COARSEST_SPACING = 0.01, 50.0
"""Voxel sides (mm) between which a volume of a patient lies: micrometres or metres were taken for mm otherwise."""

LARGEST_EXTENT = 5000.0
"""Along an axis (mm)."""


@dataclass(frozen=True)
class Problem:
    """What is wrong with a case, where, and how to mend it."""

    case: str
    file: Path | None
    message: str

    def __str__(self) -> str:
        return f"{self.case}: {self.message}"


@dataclass(frozen=True)
class Remark:
    """What may be meant so, and should be looked at."""

    kind: str
    """What it is and what to do, in the same words for each case."""
    case: str
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class CheckedCase:
    """A case as it was read, and what was found in it."""

    case: Case
    """With volumes in place of paths; a field that cannot be read keeps its path."""
    problems: tuple[Problem, ...] = ()
    """What keeps the case from being used."""
    remarks: tuple[Remark, ...] = ()
    digest: str | None = None
    """Of the image's voxels, whatever the file's name and format; None without an image."""
    fingerprint: str = ""
    """Changes with any voxel of image and label, and with the place of either in the patient."""


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What was found in many cases."""

    problems: list[Problem]
    remarks: list[Remark]


def check_cases(
    cases: Sequence[Case], task: Task, *, workers: int | None = None, progress: Callable[[], object] | None = None
) -> list[Problem]:
    """Check all cases; an empty list means that every one can be used.

    Parameters
    ----------
    cases, task
        As for `check_case`.
    workers
        Threads; see `map_in_threads`.
    progress
        Called after each case, for instance ``bar.update``.
    """
    return inspect_cases(cases, task, workers=workers, progress=progress).problems


def inspect_cases(
    cases: Sequence[Case], task: Task, *, workers: int | None = None, progress: Callable[[], object] | None = None
) -> Findings:
    """Check all cases; return what keeps some from being used, and what should be looked at.

    The parameters are those of `check_cases`.
    """
    problems: list[Problem] = []
    remarks: list[Remark] = []
    digests: list[tuple[Case, str]] = []

    def without_volumes(case: Case) -> CheckedCase:
        checked = read_case(case, task)
        return CheckedCase(case=case, problems=checked.problems, remarks=checked.remarks, digest=checked.digest)

    for checked in map_in_threads(without_volumes, cases, workers):
        problems.extend(checked.problems)
        remarks.extend(checked.remarks)
        if checked.digest is not None:
            digests.append((checked.case, checked.digest))
        if progress is not None:
            progress()
    return Findings(problems=problems, remarks=[*remarks, *remark_on_same_images(digests)])


def check_case(case: Case, task: Task) -> list[Problem]:
    """Read a case to its end and return what keeps it from being used.

    A case without ``label`` is checked as one to predict.
    """
    return list(read_case(case, task).problems)


def read_case(case: Case, task: Task) -> CheckedCase:
    """Read a case to its end, and check it.

    Whatever goes wrong with a case is a problem of that case, so that none hides the others.
    """
    found: list[Problem] = []
    remarks: list[Remark] = []
    volumes: dict[str, MetaTensor] = {}
    name = case["case"]
    for field, check in (("image", _find_image_faults), ("label", _find_label_faults)):
        if field not in case:
            continue
        report_progress("read", item=name)
        first, named = list_files(case[field])[0], name_files(case[field])
        try:
            volume = read_volume(case[field])
            faults = [*_find_grid_faults(volume), *check(volume, task)]
        except DataError as fault:
            found.append(Problem(name, first, str(fault)))
            continue
        except MemoryError:
            message = f"{named} needs more memory to be checked than there is; crop or resample it"
            found.append(Problem(name, first, message))
            continue
        except Exception as fault:  # such as torch's RuntimeError where it gets no memory
            message = f"{named} cannot be checked ({type(fault).__name__}: {fault})".partition("\n")[0]
            found.append(Problem(name, first, f"{message}; leave it out"))
            continue
        volumes[field] = volume
        found.extend(Problem(name, first, f"{named} {fault}") for fault in faults)
        remarks.extend(_remark_on_grid(volume, name))
    if len(volumes) == 2:
        misplaced = Grid.of(volumes["image"]).fault_of(Grid.of(volumes["label"]), "image")
        if misplaced:
            found.append(Problem(name, Path(case["label"]), f"{case['label']} {misplaced}"))
    return CheckedCase(
        case={**case, **volumes},
        problems=tuple(found),
        remarks=tuple(dict.fromkeys(remarks)),  # image and label share a grid, and its oddity
        digest=(digest := _digest(volumes["image"]) if "image" in volumes else None),
        fingerprint=_fingerprint(digest, volumes),
    )


def find_same_images(digests: Iterable[tuple[Case, str]]) -> list[list[Case]]:
    """Return the groups of cases, of pairs of a case and its digest, that hold the same voxels."""
    cases: dict[str, list[Case]] = defaultdict(list)
    for case, digest in digests:
        cases[digest].append(case)
    return [same for same in cases.values() if len(same) > 1]


def remark_on_same_images(digests: Iterable[tuple[Case, str]]) -> list[Remark]:
    """Remark on images that stand under several names."""
    kind = "the same image stands under several names; keep one, or it counts more than others and may be tested on"
    return [
        Remark(kind, first["case"], f"also {list_some([case['case'] for case in rest])}")
        for first, *rest in find_same_images(digests)
    ]


def refuse_held_out(digests: Iterable[tuple[Case, str]], validation: Container[str]) -> dict[str, list[Problem]]:
    """Return problems of training cases whose image validates as well, so that it would be known by heart.

    Parameters
    ----------
    digests
        Each case with its digest, on both sides of the split.
    validation
        Ids of the cases that validate.
    """
    refused: dict[str, list[Problem]] = {}
    for same in find_same_images(digests):
        held_out = [case["case"] for case in same if case["case"] in validation]
        for case in same if held_out else ():
            if case["case"] not in validation:
                message = (
                    f"{name_files(case['image'])} holds the same voxels as the validation case {held_out[0]}; keep one "
                    "of them, or both on one side of the split"
                )
                refused[case["case"]] = [Problem(case["case"], list_files(case["image"])[0], message)]
    return refused


def summarise_remarks(remarks: Sequence[Remark], most: int = 3) -> list[str]:
    """Return a line per kind: how many cases, what it is, and the first names."""
    by_kind: dict[str, list[Remark]] = defaultdict(list)
    for remark in remarks:
        by_kind[remark.kind].append(remark)
    return [
        f"{len({remark.case for remark in same})} case(s): {kind}: "
        + list_some([remark.case + (f" ({remark.detail})" if remark.detail else "") for remark in same], most)
        for kind, same in by_kind.items()
    ]


def require_sound(
    problems: Sequence[Problem], remedy: str = "mend them, or set data.skip_bad to leave them out of training"
) -> None:
    """Raise one error that names every bad case, and the remedy.

    Raises
    ------
    DataError
        There is a problem; one line each.
    """
    if problems:
        cases = len({problem.case for problem in problems})
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise DataError(f"{cases} case(s) cannot be used:\n{lines}\n{remedy}")


def _find_grid_faults(volume: MetaTensor) -> Iterable[str]:
    spacing = np.linalg.norm(volume.affine.numpy()[:3, :3], axis=0)
    extent = spacing * volume.shape[1:]
    if not (spacing.min() >= FINEST_SPACING and spacing.max() <= COARSEST_SPACING and extent.max() < LARGEST_EXTENT):
        yield (
            f"has voxels of {_list_lengths(spacing)} mm and an extent of {_list_lengths(extent)} mm; needed: sides of "
            f"{FINEST_SPACING:g} to {COARSEST_SPACING:g} mm and less than {LARGEST_EXTENT:g} mm in all; mend the "
            "spacing in the header, or its unit"
        )


def _list_lengths(lengths: Iterable[float]) -> str:
    return " x ".join(f"{length:.4g}" for length in lengths)


def _remark_on_grid(volume: MetaTensor, case: str) -> Iterator[Remark]:
    shape, sform = tuple(volume.shape[1:]), volume.affine.numpy()
    if 1 in shape:
        yield Remark("the volume is a single slice; is a volume missing?", case, f"{shape} voxels")
    qform = np.asarray(volume.meta.get("qform_affine", sform))
    if not np.isfinite(qform).all():  # damaged; nothing here goes by it
        return
    corners = np.array([(*corner, 1) for corner in product(*((0, side - 1) for side in shape))]).T
    distance = np.linalg.norm(((sform - qform) @ corners)[:3], axis=0).max()
    apart = distance / np.linalg.norm(sform[:3, :3], axis=0).min()
    if apart <= MISPLACED_VOXELS:
        return
    if np.linalg.det(sform[:3, :3]) * np.linalg.det(qform[:3, :3]) < 0:
        kind = "sform and qform mirror each other (left-right); one of them swaps the sides, and the sform is taken"
    else:
        kind = "sform and qform disagree; the sform is taken, other programs may go by the qform"
    yield Remark(kind, case, f"up to {apart:.3g} voxels apart")


def _digest(image: MetaTensor) -> str:
    voxels = image.as_tensor().contiguous().numpy()
    digest = sha256(repr(voxels.shape).encode())
    digest.update(voxels)
    return digest.hexdigest()


def _fingerprint(digest: str | None, volumes: Mapping[str, MetaTensor]) -> str:
    """Return `CheckedCase.fingerprint`."""
    parts = [str(digest), "" if "label" not in volumes else _digest(volumes["label"])]
    places = [volume.affine.to(torch.float64).contiguous().numpy().tobytes() for volume in volumes.values()]
    return sha256("".join(parts).encode() + b"".join(places)).hexdigest()


def _find_image_faults(image: MetaTensor, task: Task) -> Iterable[str]:
    channels = image.as_tensor()
    if len(channels) != task.num_channels:
        yield (
            f"has {len(channels)} channel(s), but dataset.json declares {task.num_channels} "
            f"({', '.join(task.modalities)}); mend the file or 'modality'"
        )
    if fault := _find_not_finite(channels):
        yield fault
        return
    for index, channel in enumerate(channels):
        if channel.min() == channel.max():
            where = f" in channel {index}" if len(channels) > 1 else ""
            yield f"is constant{where}: every voxel is {channel.min().item():g}; export the image again"


def _find_label_faults(label: MetaTensor, task: Task) -> Iterable[str]:
    voxels = label.as_tensor()
    if len(voxels) != 1:
        yield f"has {len(voxels)} channels; a label map needs one, with a number per structure"
    if fault := _find_not_finite(voxels):
        yield fault
        return
    values = voxels.unique()
    if (broken := values[values != values.round()]).numel():
        yield (
            f"holds values that are no integers ({_list_values(broken)}); "
            "it was probably resampled linearly, so export it again with nearest neighbours"
        )
        return
    declared = torch.tensor(sorted(task.labels), dtype=values.dtype)
    if (unknown := values[~torch.isin(values, declared)]).numel():
        count = int(torch.isin(voxels, unknown).sum())
        yield (
            f"holds {_list_values(unknown)} in {count} voxel(s), but dataset.json declares {sorted(task.labels)}; "
            "mend the label map or declare the value"
        )
    if not (values > 0).any():
        yield "holds background only; label the structures or leave the case out"


def _find_not_finite(voxels: Tensor) -> str | None:
    bad = ~voxels.isfinite()
    if not bad.any():
        return None
    first = tuple(bad.nonzero()[0].tolist())
    return (
        f"holds {int(bad.sum())} voxel(s) that are NaN or infinite, the first at (c, i, j, k) = {first}; "
        "replace them, for instance by the value of air"
    )


def _list_values(values: Tensor, most: int = 5) -> str:
    shown = ", ".join(f"{value:g}" for value in values[:most].tolist())
    return shown + (f" and {len(values) - most} more" if len(values) > most else "")
