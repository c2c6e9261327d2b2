"""The summary of an evaluation, in the shape of nnU-Net's ``summary.json``.

Where nnU-Net writes the token ``NaN``, which is no JSON, this writes ``null``. Where nnU-Net's foreground mean is NaN
because one label occurs in no case and no prediction, this is the mean over the labels that have a value. All other
numbers are nnU-Net's.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from volseg.data.cases import Structure
from volseg.data.readers import read_volume
from volseg.errors import DataError, GridError
from volseg.evaluation.overlap import METRICS, Metrics, evaluate_case
from volseg.files import replacing

__all__ = ["EvaluatedCase", "Summary", "evaluate_files", "read_structure", "read_summary", "summarise", "write_summary"]

Summary = dict[str, Any]
"""``{"foreground_mean": Metrics, "mean": {"1": Metrics}, "metric_per_case": [...]}``; NaN where nothing was there.

The keys are label values of files as text, and of regions their values: ``"(1, 2)"``.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluatedCase:
    """One case's metrics per label value or region, and the files that were compared."""

    metrics: Mapping[Any, Metrics]
    prediction_file: str | os.PathLike[str] | None = None
    reference_file: str | os.PathLike[str] | None = None


def evaluate_files(
    prediction_file: str | os.PathLike[str],
    reference_file: str | os.PathLike[str],
    labels: Mapping[Any, str],
    **settings: Any,
) -> EvaluatedCase:
    """Read two label maps and compare them; see `evaluate_case` for metrics and errors."""
    prediction, reference = (read_volume(os.fspath(file)) for file in (prediction_file, reference_file))
    try:
        metrics = evaluate_case(prediction, reference, labels, **settings)
    except (DataError, GridError) as fault:
        raise type(fault)(f"{prediction_file} and {reference_file}: {fault}") from fault
    return EvaluatedCase(metrics=metrics, prediction_file=prediction_file, reference_file=reference_file)


def summarise(per_case: Sequence[EvaluatedCase]) -> Summary:
    """Return the means per label over cases, their mean over the foreground labels, and every case.

    A case that neither has nor predicts a label (NaN) does not count in that label's mean.

    Raises
    ------
    DataError
        For no case, or cases with different labels.
    """
    if not per_case:
        raise DataError("a summary needs at least one evaluated case")
    labels = list(per_case[0].metrics)
    for case in per_case:
        if list(case.metrics) != labels:
            raise DataError(f"{case.prediction_file} has labels {list(case.metrics)}, the first case has {labels}")
    mean = {label: _average(case.metrics[label] for case in per_case) for label in labels}
    return {
        "foreground_mean": _average(mean[label] for label in labels if label != 0),
        "mean": {str(label): metrics for label, metrics in mean.items()},
        "metric_per_case": [
            {
                "metrics": {str(label): dict(case.metrics[label]) for label in labels},
                "prediction_file": case.prediction_file and os.fspath(case.prediction_file),
                "reference_file": case.reference_file and os.fspath(case.reference_file),
            }
            for case in per_case
        ],
    }


def write_summary(summary: Summary, path: str | os.PathLike[str]) -> Path:
    """Write ``summary`` as JSON, in one step or not at all; NaN becomes null. Return the path."""
    path = Path(path)
    text = json.dumps(_replace_nan(summary), indent=2, allow_nan=False)
    with replacing(path) as partial:
        partial.write_text(text + "\n", encoding="utf-8")
    return path


def read_structure(key: str) -> Structure:
    """Return the label value, or a region's values, that a key of a summary stands for.

    Raises
    ------
    DataError
        If it stands for neither.

    Examples
    --------
    >>> read_structure("3"), read_structure("(1, 2)"), read_structure("(4,)")
    (3, (1, 2), (4,))
    """
    try:
        if not key.startswith("("):
            return int(key)
        return tuple(int(value) for value in key.strip("()").split(",") if value.strip())
    except ValueError:
        raise DataError(f"a summary's keys are label values, or those of a region as '(1, 2)', got {key!r}") from None


def read_summary(path: str | os.PathLike[str]) -> Summary:
    """Read a ``summary.json`` of ours or of nnU-Net; null and NaN become NaN.

    Raises
    ------
    DataError
        If the file is no summary.
    """
    try:
        summary = json.loads(Path(path).read_text(encoding="utf-8"))
        means = [summary["foreground_mean"], *summary["mean"].values()]
        cases = [metrics for case in summary["metric_per_case"] for metrics in case["metrics"].values()]
    except (ValueError, KeyError, TypeError, AttributeError) as fault:
        raise DataError(f"{path} is not a summary.json as volseg and nnU-Net write it: {fault!r}") from fault
    for metrics in means + cases:
        metrics.update({name: math.nan for name, value in metrics.items() if value is None})
    return summary


def _average(several: Iterable[Mapping[str, float]]) -> Metrics:
    """Return the mean of each metric over those that are not NaN; NaN if none is."""
    rows = list(several)
    means = {}
    for name in rows[0] if rows else METRICS:
        values = [row[name] for row in rows if not math.isnan(row[name])]
        means[name] = math.fsum(values) / len(values) if values else math.nan
    return means


def _replace_nan(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _replace_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_replace_nan(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value
