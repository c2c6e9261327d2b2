"""What keeps a case from being used, each fault in one sentence, and all bad cases at once.

A header can be right while the voxels are not, so files are read to their end; a training prepares what was read here
(`volseg.data.preparing`), so that no file is decompressed twice.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from monai.data import MetaTensor
from torch import Tensor

from volseg.data.cases import Case, Task
from volseg.data.readers import read_volume
from volseg.data.threads import map_in_threads
from volseg.errors import DataError, ReaderError
from volseg.parallel.progress import report_progress
from volseg.transforms.grid import Grid

__all__ = ["Problem", "check_case", "check_cases", "read_case", "require_sound"]


@dataclass(frozen=True)
class Problem:
    """What is wrong with a case, where, and how to mend it."""

    case: str
    file: Path | None
    message: str

    def __str__(self) -> str:
        return f"{self.case}: {self.message}"


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
    problems: list[Problem] = []
    for found in map_in_threads(lambda case: check_case(case, task), cases, workers):
        problems.extend(found)
        if progress is not None:
            progress()
    return problems


def check_case(case: Case, task: Task) -> list[Problem]:
    """Read a case to its end and return what keeps it from being used.

    A case without ``label`` is checked as one to predict.
    """
    return read_case(case, task)[1]


def read_case(case: Case, task: Task) -> tuple[Case, list[Problem]]:
    """Read a case to its end; return it with volumes in place of paths, and what keeps it from being used.

    A field that cannot be read keeps its path.
    """
    found: list[Problem] = []
    volumes: dict[str, MetaTensor] = {}
    for field, check in (("image", _find_image_faults), ("label", _find_label_faults)):
        if field not in case:
            continue
        report_progress("read", item=case["case"])
        try:
            volumes[field] = read_volume(case[field])
        except ReaderError as fault:
            found.append(Problem(case["case"], Path(case[field]), str(fault)))
            continue
        faults = check(volumes[field], task)
        found.extend(Problem(case["case"], Path(case[field]), f"{case[field]} {fault}") for fault in faults)
    if len(volumes) == 2:
        misplaced = Grid.of(volumes["image"]).fault_of(Grid.of(volumes["label"]), "image")
        if misplaced:
            found.append(Problem(case["case"], Path(case["label"]), f"{case['label']} {misplaced}"))
    return {**case, **volumes}, found


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
