"""Measure which postprocessing helps: try each step on labelled predictions, and keep the steps that raise the Dice.

The order is nnU-Net's [1]_: first the largest component of the whole foreground, then of each structure. Then holes are
tried, which nnU-Net does not do. A step is kept if the mean Dice rises and the Dice of no structure falls. nnU-Net
applies this rule to the foreground as a whole. For a single structure, it requires only that the structure's own Dice
rises, which may cost an overlapping region.

Scores are those of `volseg.evaluation`: the mean over cases per structure, and the mean of these. A case that neither
has nor predicts a structure does not count for that structure.

References
----------
.. [1] Isensee et al., Nat Methods 18 (2021), 203-211, doi:10.1038/s41592-020-01008-z; nnunetv2 2.8.1,
   ``postprocessing/remove_connected_components.py``.
"""

import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from volseg.data.cases import Task, list_values
from volseg.data.readers import read_label, read_volume
from volseg.errors import DataError, GridError
from volseg.evaluation.overlap import LabelMap, evaluate_case
from volseg.files import replace_nan
from volseg.formatting import align_columns
from volseg.inference.postprocessing import Postprocessing, Step
from volseg.version import __version__

RULE = "a step is kept if the mean Dice over the structures rises and the Dice of no structure falls"


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """A prediction and its reference label."""

    case: str
    prediction: Path
    reference: Path
    labelled: tuple[int, ...] | None = None
    """The annotated values of a partially labelled case."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TriedStep:
    """The scores before and after a step; NaN if a structure has no score."""

    step: Step
    name: str
    """Name of the structure."""
    before: tuple[float, ...]
    """Mean Dice of each structure."""
    after: tuple[float, ...]
    changed_cases: int
    changed_voxels: int

    @property
    def is_kept(self) -> bool:
        """Whether the step helps."""
        falls = any(
            later < earlier for earlier, later in zip(self.before, self.after, strict=True)
        )  # a NaN compares as false
        return _average(self.after) > _average(self.before) and not falls


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredPostprocessing:
    """The steps that help, and all steps that were tried."""

    postprocessing: Postprocessing
    names: tuple[str, ...]
    """Names of the structures, in the order of the scores before and after a step."""
    tried: tuple[TriedStep, ...]
    cases: tuple[str, ...]

    def save(self, path: str | Path) -> Path:
        """Write ``postprocessing.json``; return the path."""
        tried = [{**asdict(tried), "kept": tried.is_kept} for tried in self.tried]
        further = {"names": self.names, "tried": tried, "rule": RULE, "cases": self.cases, "version": __version__}
        return self.postprocessing.save(path, replace_nan(further))

    def lines(self) -> list[str]:
        """Return a table of the tried steps."""
        rows: list[tuple[str, ...]] = [("step", "structure", "Dice before", "after", "cases", "kept")]
        for tried in self.tried:
            means = [f"{_average(dice):.4f}" for dice in (tried.before, tried.after)]
            name = tried.step.operation.replace("_", " ")
            rows.append((name, tried.name, *means, str(tried.changed_cases), "yes" if tried.is_kept else "no"))
        return align_columns(rows)


def measure_postprocessing(
    predictions: Sequence[Judged], task: Task, *, show: Callable[[Iterable[Any]], Iterable[Any]] = iter
) -> MeasuredPostprocessing:
    """Try the steps in order on predictions; each step starts from the result of the steps kept so far.

    Parameters
    ----------
    predictions : sequence of Judged
        Predictions of cases that the network was not trained on.
    task : Task
        The task of the predictions.
    show : callable
        Wraps the loop over the steps, for instance in a progress bar.

    Raises
    ------
    DataError
        If there is no prediction, or a prediction does not match its label.
    """
    if not predictions:
        raise DataError("postprocessing needs predictions with labels to be measured on, but there are none")
    order = Postprocessing.of(task)
    held = [_HeldCase.read(prediction, task, order) for prediction in predictions]
    kept: list[Step] = []
    tried = []
    before = _average_dice(held)
    for name, step in show(_list_steps(task)):
        changed = [case.change(order, step) for case in held]
        counts = [count for _, count in changed if count]
        attempt = TriedStep(
            step=step,
            name=name,
            before=before,
            after=_average_dice([case for case, _ in changed]),
            changed_cases=len(counts),
            changed_voxels=sum(counts),
        )
        tried.append(attempt)
        if attempt.is_kept:
            kept.append(step)
            held, before = [case for case, _ in changed], attempt.after
    return MeasuredPostprocessing(
        postprocessing=replace(order, steps=tuple(kept)),
        names=tuple(task.structures.values()),
        tried=tuple(tried),
        cases=tuple(prediction.case for prediction in predictions),
    )


def _list_steps(task: Task) -> list[tuple[str, Step]]:
    """Return the steps to try, each with the name of its structure."""
    structures = {name: list_values(key) for key, name in task.structures.items()}
    foreground = task.class_values[1:]
    steps = [("all", Step(operation="keep_largest", values=foreground))]
    if list(structures.values()) == [foreground]:  # the only structure is the foreground
        steps = []
    steps += [(name, Step(operation="keep_largest", values=values)) for name, values in structures.items()]
    return steps + [(name, Step(operation="fill_holes", values=values)) for name, values in structures.items()]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _HeldCase:
    """A prediction and its label, compressed about a hundredfold, so that all cases fit into memory."""

    files: Judged
    task: Task
    shape: tuple[int, ...]
    dtype: np.dtype
    prediction: bytes
    reference: bytes
    """Compressed int32 values, since the reference may also contain the ignored value."""
    dice: tuple[float, ...]
    """Dice of each structure; NaN for a structure that is not annotated, or in neither volume."""

    @classmethod
    def read(cls, files: Judged, task: Task, order: Postprocessing) -> "_HeldCase":
        prediction = read_volume(files.prediction)
        reference = read_label(files.reference, prediction, task)
        try:
            dice = _measure_dice(prediction, reference, files, task)
            voxels = order.require_values(prediction)
        except (DataError, GridError) as fault:
            raise type(fault)(f"{files.prediction} and {files.reference}: {fault}") from fault
        return cls(
            files=files,
            task=task,
            shape=voxels.shape,
            dtype=voxels.dtype,
            prediction=_pack(voxels),
            reference=_pack(reference.numpy(force=True).astype(np.int32)),
            dice=dice,
        )

    def change(self, order: Postprocessing, step: Step) -> tuple["_HeldCase", int]:
        """Return the case after a step, and the number of changed voxels."""
        voxels = self._unpack(self.prediction, self.dtype).copy()
        if not (count := order.apply(voxels, step)):
            return self, 0
        dice = _measure_dice(voxels, self._unpack(self.reference, np.dtype(np.int32)), self.files, self.task)
        return replace(self, prediction=_pack(voxels), dice=dice), count

    def _unpack(self, packed: bytes, dtype: np.dtype) -> NDArray[Any]:
        return np.frombuffer(zlib.decompress(packed), dtype=dtype).reshape(self.shape)


def _measure_dice(prediction: LabelMap, reference: LabelMap, files: Judged, task: Task) -> tuple[float, ...]:
    metrics = evaluate_case(
        prediction, reference, task.structures, ignore=task.ignore, values=task.class_values, labelled=files.labelled
    )
    return tuple(metrics[key]["Dice"] for key in task.structures)


def _pack(voxels: NDArray[Any]) -> bytes:
    return zlib.compress(np.ascontiguousarray(voxels).data, level=1)


def _average_dice(cases: Sequence[_HeldCase]) -> tuple[float, ...]:
    """Return the mean Dice of each structure over the cases."""
    return tuple(_average(column) for column in zip(*(case.dice for case in cases), strict=True))


def _average(values: Sequence[float]) -> float:
    """Return the mean of the values that are not NaN, as in a summary, or NaN."""
    known = [value for value in values if not math.isnan(value)]
    return math.fsum(known) / len(known) if known else math.nan
