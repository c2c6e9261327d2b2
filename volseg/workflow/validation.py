"""Validate and test: predict whole cases, then score or write them on their original grid."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from monai.data import MetaTensor
from torch import Tensor

from volseg.data.cases import Case, list_values
from volseg.errors import BatchFieldError, ConfigError
from volseg.evaluation.overlap import evaluate_case
from volseg.evaluation.scoring import Scoring
from volseg.evaluation.summary import (
    EvaluatedCase,
    Summary,
    complete_summary,
    count_undefined,
    read_structure,
    summarise,
    write_summary,
)
from volseg.files import require_writable
from volseg.inference.original_grid import resample
from volseg.inference.predictor import Predictor
from volseg.inference.writing import write_prediction
from volseg.parallel.processes.progress import report_progress
from volseg.transforms.grid import Grid, measure_sides
from volseg.workflow.checks import stop_if_requested
from volseg.workflow.named import Named

SHOWN = ("Dice", "HD95", "ASSD", "NSD", "volume_diff_ml", "lesion_F1")
"""Metrics to plot for each label."""

Show = Callable[[Iterable[Any]], Iterable[Any]]


@dataclass(frozen=True, kw_only=True)
class Example:
    """One validated case for display, on the original grid, on the CPU."""

    case: str
    image: Tensor
    """``(C, D, H, W)``, every channel."""
    label: Tensor
    """``(D, H, W)``, like ``prediction``: indices of the known values, 0 where voxels are not annotated."""
    prediction: Tensor
    affine: Tensor
    """4 x 4, voxel index to RAS+ position in mm."""


@dataclass(frozen=True, kw_only=True)
class Validated:
    """Result of a validation."""

    summary: Summary
    """nnU-Net's summary: foreground mean, mean per label, metrics per case."""
    score: float
    """Mean Dice over the foreground labels."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """``dice/LABEL`` for every label; ``hd95/LABEL``, ``assd/LABEL``, ... if measured; ``undefined/LABEL``, the number
    of undefined cases; further metrics as ``NAME``, ``NAME/LABEL`` and ``undefined/NAME/LABEL``."""


JudgedCase = Mapping[str, Any]
"""Numbers of a case as plain values: its entry in a summary, and further metrics in ``further``, the mean over the
labels by ``NAME`` and each label's by ``NAME/LABEL``."""


def read_evaluated(case: Mapping[str, Any]) -> EvaluatedCase:
    """Return an evaluated case from its entry in a summary."""
    return EvaluatedCase(
        metrics={read_structure(label): metrics for label, metrics in case["metrics"].items()},
        prediction_file=case["prediction_file"],
        reference_file=case["reference_file"],
    )


class Validation:
    """Predict cases and compare them with their labels on the original grid.

    Parameters
    ----------
    predictor : Predictor
        The model and how it is applied to a volume.
    cases : sequence of Case
        Prepared with ``keep_reference=True``: ``reference`` is the label map on the image's own grid.
    labels : mapping
        Names of scored structures, by label value (0 is the background) or tuple of a region's values; see
        ``Task.structures``.
    ignore : int, optional
        Value of voxels that are not scored.
    values : collection of int
        Further values of label maps that are not scored; see `evaluate_case`. Only the annotated labels of a case with
        ``labelled`` are scored.
    metrics : sequence of Named
        Further metrics of the fields ``pred`` and ``label``, label maps ``(1, 1, D, H, W)`` on the original grid, and
        ``spacing``, its voxels' sides in mm. Finite results are averaged over cases, per label and over labels; the
        others are counted, for labels that a case has.
    scoring : Scoring, optional
        Measurements in mm and ml; by default only counts and overlap.
    folder : path, optional
        Folder for the predictions (``CASE.nii.gz``) and ``summary.json``.
    batch_size : int
        Volumes of equal size that go through the model together.
    num_examples : int
        Number of cases to keep in ``examples``; the first cases are kept.
    show : callable
        Wraps the loop over cases, for instance in a progress bar.

    Attributes
    ----------
    examples : list of Example
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
        scoring: Scoring | None = None,
        folder: str | Path | None = None,
        batch_size: int = 1,
        num_examples: int = 2,
        show: Show = iter,
    ) -> None:
        _require_predictor(predictor, "Validation")
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
        self.scoring = scoring
        self.folder = None if folder is None else require_writable(folder)
        self.batch_size = batch_size
        self.num_examples = num_examples
        self.show = show
        self.examples: list[Example] = []

    def __call__(self) -> Validated:
        """Predict and score every case; stop between two cases if the training is interrupted."""
        judged = dict(self.judge())
        # In the order of the cases: the predictor groups volumes of equal size.
        return self.conclude([judged[case["case"]] for case in self.cases])

    def judge(self, *, keeps_examples: bool = True) -> Iterator[tuple[str, JudgedCase]]:
        """Predict and score the cases, in the order of the predictions."""
        self.examples = []
        num_examples = self.num_examples if keeps_examples else 0
        for case, predicted in self.show(self.predictor.stream(self.cases, batch_size=self.batch_size)):
            stop_if_requested()
            report_progress("validate", item=case["case"])
            prediction = predicted.labels.cpu()
            evaluated = self._evaluated(case, prediction)
            reference = case["reference"]
            volumes = (prediction.as_tensor()[None], reference.as_tensor()[None])
            if self.ignore is not None:  # not annotated: background in both
                volumes = tuple(volume.masked_fill(volumes[1] == self.ignore, 0) for volume in volumes)
            spacing = list(measure_sides(reference.affine))
            fields = {**case, "pred": volumes[0], "label": volumes[1], "spacing": spacing}
            further = {
                key: number
                for metric in self.metrics
                for name, value in metric(fields).items()
                for key, number in self._part(name, torch.as_tensor(value).float(), case).items()
            }
            if (mapped := case.get("mapped")) is not None:  # a file of the cache
                mapped.require_unchanged()
            if len(self.examples) < num_examples:
                scored = {value for key in self.labels for value in list_values(key)}
                self.examples.append(make_example(case, prediction, {0, *self.values, *scored}, self.ignore))
            (entry,) = summarise([evaluated])["metric_per_case"]
            yield case["case"], {**entry, "further": further}

    def conclude(self, judged: Sequence[JudgedCase], *, writes: bool = True) -> Validated:
        """Return the result of scored cases, in their order; write the summary if there is a folder."""
        summary = summarise(list(map(read_evaluated, judged)))
        if writes and self.folder is not None:
            write_summary(complete_summary(summary, self.scoring, self.labels), self.folder / "summary.json")
        return Validated(
            summary=summary,
            score=summary["foreground_mean"]["Dice"],
            scores=self._name_scores(summary) | self._average_further(judged),
        )

    def _name_scores(self, summary: Summary) -> dict[str, float]:
        """Return the means over cases by ``METRIC/LABEL``, and the cases without a distance by ``undefined/LABEL``."""
        names = {key: self.labels[read_structure(key)] for key in summary["mean"]}
        scores = {
            f"{metric.lower()}/{names[key]}": mean[metric]
            for metric in SHOWN
            for key, mean in summary["mean"].items()
            if metric in mean
        }
        undefined = {names[key]: max(of.values()) for key, of in count_undefined(summary).items() if of}
        return scores | {f"undefined/{name}": count for name, count in undefined.items()}

    def _average_further(self, judged: Sequence[JudgedCase]) -> dict[str, float]:
        scores: dict[str, float] = {}
        for metric in (output for named in self.metrics for output in named.outputs):
            scores[metric] = _mean([case["further"][metric] for case in judged])
            for label in self.labels:
                key = f"{metric}/{self.labels[label]}"
                if label == 0 or not all(key in case["further"] for case in judged):
                    continue
                scores[key] = _mean([case["further"][key] for case in judged])
                # A case that neither has nor predicts the label does not count, nor does one not annotated for it.
                count = sum(
                    1
                    for case in judged
                    if case["metrics"][str(label)]["n_pred"] + case["metrics"][str(label)]["n_ref"] > 0
                    and not math.isfinite(case["further"][key])
                )
                scores |= {f"undefined/{key}": count} if count else {}
        return scores

    def _part(self, name: str, metric: Tensor, case: Mapping[str, Any]) -> dict[str, float]:
        """Return a case's mean over its scored labels, NaN if unknown, and the metric of each label."""
        structures = {key: label for key, label in self.labels.items() if key != 0}
        columns = metric.flatten()[-len(structures) :]  # without the background, if the metric has it
        if len(columns) < len(structures):  # one number for all labels
            whole = metric if case.get("labelled") is None else torch.tensor(math.nan)
            return {name: _mean(whole.flatten().tolist())}
        labelled = case.get("labelled")
        values = {
            label: value
            for (key, label), value in zip(structures.items(), columns.tolist(), strict=True)
            if labelled is None or set(list_values(key)) <= set(labelled)
        }
        mean = _mean(metric.flatten().tolist() if labelled is None else list(values.values()))
        return {name: mean, **{f"{name}/{label}": values.get(label, math.nan) for label in structures.values()}}

    def _evaluated(self, case: Mapping[str, Any], prediction: MetaTensor) -> EvaluatedCase:
        metrics = evaluate_case(
            prediction,
            case["reference"],
            self.labels,
            ignore=self.ignore,
            values=self.values,
            labelled=case.get("labelled"),
            scoring=self.scoring,
        )
        path = None
        if self.folder is not None:
            names = {v: n for v, n in self.labels.items() if isinstance(v, int) and v and not self.predictor.regions}
            path = write_prediction(prediction, case["image"], self.folder / f"{case['case']}.nii.gz", names)
        return EvaluatedCase(metrics=metrics, prediction_file=path, reference_file=case.get("reference_file"))


class Testing:
    """Predict cases without labels and write each as ``CASE.nii.gz`` on its image's own grid.

    Parameters
    ----------
    predictor : Predictor
        The model and how it is applied to a volume.
    cases : iterable of Case
        Prepared; may be a generator, so that only a few volumes are in memory.
    folder : path
        Folder for the predictions.
    batch_size : int
        Volumes of equal size that go through the model together.
    show : callable
        Wraps the loop over cases, for instance in a progress bar.
    """

    __test__ = False  # otherwise pytest collects this workflow as a class of tests

    def __init__(
        self, predictor: Predictor, cases: Iterable[Case], folder: str | Path, *, batch_size: int = 1, show: Show = iter
    ) -> None:
        _require_predictor(predictor, "Testing")
        self.predictor = predictor
        self.cases = cases
        self.folder = require_writable(folder)
        self.batch_size = batch_size
        self.show = show

    def __call__(self) -> dict[str, Path]:
        """Predict and write every case; return the file of each."""
        return {
            case["case"]: write_prediction(predicted.labels, case["image"], self.folder / f"{case['case']}.nii.gz")
            for case, predicted in self.show(self.predictor.stream(self.cases, batch_size=self.batch_size))
        }


def make_example(
    case: Mapping[str, Any], prediction: MetaTensor, known: Collection[int], ignore: int | None
) -> Example:
    """Return a prepared case and its prediction for display; the image is resampled to its original grid.

    Parameters
    ----------
    case : Case
        With ``image`` and ``reference``.
    prediction : MetaTensor
        ``(1, D, H, W)``, on the image's own grid.
    known : collection of int
        Every value of the label maps, including 0.
    ignore : int, optional
        Value of voxels that are not annotated.
    """
    image, grid = case["image"], Grid.original(case["image"])
    original = resample(grid, image.as_tensor().float(), Grid.of(image))
    label, found = (_number(volume.as_tensor()[0], known, ignore) for volume in (case["reference"], prediction))
    return Example(
        case=case["case"], image=original.cpu(), label=label.cpu(), prediction=found.cpu(), affine=grid.affine.cpu()
    )


def _number(label_map: Tensor, known: Collection[int], ignore: int | None) -> Tensor:
    """Return a label map of indices of the known values, for colours; 0 where voxels are not annotated."""
    if ignore is not None:
        label_map = label_map.masked_fill(label_map == ignore, 0)
    return torch.searchsorted(torch.tensor(sorted(known), device=label_map.device), label_map.long())


def _require_predictor(predictor: Any, workflow: str) -> None:
    """Raise unless ``predictor`` can predict whole volumes; a network cannot."""
    if not callable(getattr(predictor, "stream", None)):
        raise ConfigError(
            f"{workflow} needs a Predictor, which applies a network to whole volumes, got a "
            f"{type(predictor).__name__}; pass Predictor(model=network, num_classes=K)"
        )


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return math.fsum(known) / len(known) if known else math.nan
