"""Validation and testing: whole cases through the model, judged or written on their own grid."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from monai.data import MetaTensor
from torch import Tensor

from volseg.data.cases import Case
from volseg.errors import BatchFieldError
from volseg.evaluation.overlap import evaluate_case
from volseg.evaluation.summary import EvaluatedCase, Summary, read_structure, summarise, write_summary
from volseg.inference.original_grid import resample
from volseg.inference.predictor import Predictor
from volseg.inference.writing import write_prediction
from volseg.parallel.progress import report_progress
from volseg.transforms.grid import Grid
from volseg.workflow.interrupts import stop_if_requested
from volseg.workflow.named import Named

__all__ = ["Example", "JudgedCase", "Testing", "Validated", "Validation"]

Show = Callable[[Iterable[Any]], Iterable[Any]]


@dataclass(frozen=True, kw_only=True)
class Example:
    """One validated case to look at; ``(D, H, W)`` each, on the original grid, on the CPU."""

    case: str
    image: Tensor
    label: Tensor
    prediction: Tensor


@dataclass(frozen=True, kw_only=True)
class Validated:
    """What a validation found."""

    summary: Summary
    """nnU-Net's summary: foreground mean, mean per label, metrics per case."""
    score: float
    """Mean Dice over the foreground labels."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """``dice/LABEL`` for every label, and the means of further metrics."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgedCase:
    """One case's numbers."""

    evaluated: EvaluatedCase
    further: Mapping[str, float]
    """Means over the labels of further metrics."""


class Validation:
    """Predict cases and compare them with their labels on the original grid.

    Parameters
    ----------
    predictor : Predictor
        The model and how it is applied to a volume.
    cases : sequence of Case
        Prepared with ``keep_reference=True``: ``reference`` is the label map on the image's own grid.
    labels : mapping
        What is scored to its name: label values, of which 0 is the background, or the values of regions. A task's are
        ``Task.structures``.
    ignore : int, optional
        Value of the label maps where nothing is scored.
    values : collection of int
        Further values of label maps, which nothing is scored of; see `evaluate_case`. Of a case with ``labelled``
        nothing is scored but what was looked for.
    metrics : sequence of Named
        Further metrics of the fields ``pred`` and ``label``, label maps ``(1, 1, D, H, W)`` on the original grid, and
        ``spacing``, its voxels' sides in mm. Their results are averaged over labels and cases, without NaN.
    folder : Path, optional
        Where to write the predictions (``CASE.nii.gz``) and ``summary.json``.
    batch_size : int
        Volumes of equal size that go through the model together.
    num_examples : int
        How many of the first cases are kept in ``examples`` to look at.
    show : callable
        Wraps the loop over cases, for instance in a progress bar.

    Attributes
    ----------
    examples : list of Example
        Of the last call.
    """

    def __init__(
        self,
        predictor: Predictor,
        cases: Sequence[Case],
        labels: Mapping[Any, str],
        *,
        ignore: int | None = None,
        values: Collection[int] = (),
        metrics: Sequence[Named] = (),
        folder: Path | None = None,
        batch_size: int = 1,
        num_examples: int = 2,
        show: Show = iter,
    ) -> None:
        if missing := [case.get("case") for case in cases if "reference" not in case]:
            raise BatchFieldError(
                f"Validation needs the field 'reference', which {len(missing)} case(s) lack, first {missing[0]}; "
                "prepare the cases with keep_reference=True"
            )
        self.predictor = predictor
        self.cases = cases
        self.labels = dict(labels)
        self.ignore = ignore
        self.values = tuple(values)
        self.metrics = list(metrics)
        self.folder = folder
        self.batch_size = batch_size
        self.num_examples = num_examples
        self.show = show
        self.examples: list[Example] = []

    def __call__(self) -> Validated:
        """Predict and judge every case; stop between two of them where a training has been interrupted."""
        judged = dict(self.judge())
        # In the order of the cases: batches of equal size come back in another.
        return self.conclude([judged[case["case"]] for case in self.cases])

    def judge(self, *, keeps_examples: bool = True) -> Iterator[tuple[str, JudgedCase]]:
        """Predict and judge case after case, in the order in which predictions come."""
        self.examples = []
        num_examples = self.num_examples if keeps_examples else 0
        for case, predicted in self.show(self.predictor.stream(self.cases, batch_size=self.batch_size)):
            stop_if_requested()
            report_progress("validate", item=case["case"])
            prediction = predicted.labels.cpu()
            evaluated = self._evaluated(case, prediction)
            reference = case["reference"]
            volumes = (prediction.as_tensor()[None], reference.as_tensor()[None])
            if self.ignore is not None:  # background in both, where nobody annotated
                volumes = tuple(volume.masked_fill(volumes[1] == self.ignore, 0) for volume in volumes)
            fields = {
                **case,
                "pred": volumes[0],
                "label": volumes[1],
                "spacing": reference.affine[:3, :3].norm(dim=0).tolist(),
            }
            further = {
                name: self._average(torch.as_tensor(value).float(), case)
                for metric in self.metrics
                for name, value in metric(fields).items()
            }
            if len(self.examples) < num_examples:
                self.examples.append(self._example(case, prediction))
            yield case["case"], JudgedCase(evaluated=evaluated, further=further)

    def conclude(self, judged: Sequence[JudgedCase], *, writes: bool = True) -> Validated:
        """Return what judged cases, in their order, come to; write the summary where a folder was given."""
        summary = summarise([case.evaluated for case in judged])
        if writes and self.folder is not None:
            write_summary(summary, self.folder / "summary.json")
        names = [name for metric in self.metrics for name in metric.outputs]
        return Validated(
            summary=summary,
            score=summary["foreground_mean"]["Dice"],
            scores={f"dice/{self.labels[read_structure(key)]}": mean["Dice"] for key, mean in summary["mean"].items()}
            | {name: _mean([case.further[name] for case in judged]) for name in names},
        )

    def _example(self, case: Mapping[str, Any], prediction: MetaTensor) -> Example:
        """Return the first channel of the image, back on its original grid, with label and prediction."""
        image = case["image"]
        original = resample(Grid.original(image), image.as_tensor()[:1].float(), Grid.of(image))[0]
        label, found = (self._number(volume.as_tensor()[0]) for volume in (case["reference"], prediction))
        return Example(case=case["case"], image=original.cpu(), label=label.cpu(), prediction=found)

    def _number(self, label_map: Tensor) -> Tensor:
        """Return a label map that counts the known values from 0 on, for colours; 0 where nobody annotated."""
        if self.ignore is not None:
            label_map = label_map.masked_fill(label_map == self.ignore, 0)
        scored = {value for key in self.labels for value in (key if isinstance(key, tuple) else (key,))}
        known = torch.tensor(sorted({0, *self.values, *scored}), device=label_map.device)
        return torch.searchsorted(known, label_map.long())

    def _average(self, metric: Tensor, case: Mapping[str, Any]) -> float:
        """Return the mean of a metric over what is scored in a case, without NaN; NaN where that cannot be told."""
        if case.get("labelled") is None:
            return float(metric.nanmean())
        looked_for = set(case["labelled"])
        scored = [key for key in self.labels if key != 0]
        judged = [set(key if isinstance(key, tuple) else (key,)) <= looked_for for key in scored]
        columns = metric.flatten()[-len(judged) :]  # without the background, where the metric has it
        return float(columns[torch.tensor(judged)].nanmean()) if len(columns) == len(judged) else math.nan

    def _evaluated(self, case: Mapping[str, Any], prediction: MetaTensor) -> EvaluatedCase:
        metrics = evaluate_case(
            prediction,
            case["reference"],
            self.labels,
            ignore=self.ignore,
            values=self.values,
            labelled=case.get("labelled"),
        )
        path = None
        if self.folder is not None:
            path = write_prediction(prediction, case["image"], self.folder / f"{case['case']}.nii.gz")
        return EvaluatedCase(metrics=metrics, prediction_file=path, reference_file=case.get("reference_file"))


class Testing:
    """Predict cases without labels and write each as ``CASE.nii.gz`` on its image's own grid.

    Parameters
    ----------
    predictor : Predictor
        The model and how it is applied to a volume.
    cases : iterable of Case
        Prepared; may be a generator, so that only a few volumes are in memory.
    folder : Path
        Where the predictions are written.
    batch_size : int
        Volumes of equal size that go through the model together.
    show : callable
        Wraps the loop over cases, for instance in a progress bar.
    """

    __test__ = False  # a workflow, which pytest would take for a class of tests

    def __init__(
        self, predictor: Predictor, cases: Iterable[Case], folder: Path, *, batch_size: int = 1, show: Show = iter
    ) -> None:
        self.predictor = predictor
        self.cases = cases
        self.folder = folder
        self.batch_size = batch_size
        self.show = show

    def __call__(self) -> dict[str, Path]:
        """Predict and write every case; return the file of each."""
        return {
            case["case"]: write_prediction(predicted.labels, case["image"], self.folder / f"{case['case']}.nii.gz")
            for case, predicted in self.show(self.predictor.stream(self.cases, batch_size=self.batch_size))
        }


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return math.fsum(known) / len(known) if known else math.nan
