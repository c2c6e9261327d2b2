"""Summarise an evaluation in the format of nnU-Net's ``summary.json``.

NaN is written as ``null``; nnU-Net writes ``NaN``, which is not JSON. If a label occurs in no case and no prediction,
the foreground mean is over the labels that have a value; nnU-Net's is NaN. All other numbers are nnU-Net's.

A distance is infinite if only one of the two label maps has the structure. It is left out of the means, counted in
``undefined``, and also written as ``null``: ``n_pred`` and ``n_ref`` distinguish it from other nulls.
"""

import csv
import json
import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from volseg.data.cases import Structure, Task
from volseg.data.dicom.labels import find_dicom_label
from volseg.data.json_files import read_json
from volseg.data.readers import Files, read_label, read_volume, stem
from volseg.errors import DataError, GridError
from volseg.evaluation.intervals import CONFIDENCE, NUM_RESAMPLES, mean_intervals
from volseg.evaluation.overlap import METRICS, Metrics, evaluate_case
from volseg.evaluation.scoring import Scoring
from volseg.evaluation.surfaces import DISTANCES
from volseg.files import replace_nan, replacing
from volseg.formatting import UNITS, format_table, format_value, list_duplicates

JUDGED = ("Dice", "IoU", "NSD", "HD95", "ASSD", "lesion_F1")
"""Scores that compare methods; their means get intervals."""

Summary = dict[str, Any]
"""``{"foreground_mean": Metrics, "mean": {"1": Metrics}, "metric_per_case": [...]}``; NaN if there was nothing to find
and nothing found. The keys are label values of files as text, or the values of regions: ``"(1, 2)"``.
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
    *,
    task: Task | None = None,
    image: Files | None = None,
    **settings: Any,
) -> EvaluatedCase:
    """Read two label maps and compare them; see `evaluate_case` for metrics and errors.

    A label map in DICOM is read with the names of ``task``, on the grid of the other one or of ``image``.
    """
    if find_dicom_label(Path(prediction_file)) is None:
        prediction = read_volume(os.fspath(prediction_file))
        reference = read_label(os.fspath(reference_file), prediction, task)
    else:
        reference = read_label(os.fspath(reference_file), image, task)
        prediction = read_label(os.fspath(prediction_file), reference, task)
    try:
        metrics = evaluate_case(prediction, reference, labels, **settings)
    except (DataError, GridError) as fault:
        raise type(fault)(f"{prediction_file} and {reference_file}: {fault}") from fault
    return EvaluatedCase(metrics=metrics, prediction_file=prediction_file, reference_file=reference_file)


def summarise(per_case: Sequence[EvaluatedCase]) -> Summary:
    """Return the means per label over cases, their mean over the foreground labels, and every case.

    The mean of a label leaves out cases that neither have nor predict it (NaN), and infinite distances.

    Raises
    ------
    DataError
        If there is no case, or cases have different labels.
    """
    if not per_case:
        raise DataError("a summary needs at least one evaluated case")
    labels = list(per_case[0].metrics)
    for case in per_case:
        if list(case.metrics) != labels:
            raise DataError(f"{case.prediction_file} has labels {list(case.metrics)}, but the first case {labels}")
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


def collect_scores(summary: Summary, label: str, metric: str) -> np.ndarray:
    """Return a metric of a label in every case: infinite if only one label map has the label, NaN if neither has it."""
    return np.array([case["metrics"][label][metric] for case in summary["metric_per_case"]], dtype=np.float64)


def count_undefined(summary: Summary) -> dict[str, dict[str, int]]:
    """Return, for each label and distance, the number of cases with an infinite one, which its mean leaves out."""
    return {
        label: {name: int(np.isinf(collect_scores(summary, label, name)).sum()) for name in DISTANCES if name in mean}
        for label, mean in summary["mean"].items()
    }


def complete_summary(
    summary: Summary, scoring: Scoring | None = None, names: Mapping[Any, str] | None = None
) -> Summary:
    """Return a summary with the median, the undefined cases, and the interval of each mean, per label.

    In ``median``, an infinite distance is the largest. ``intervals`` contains ``[low, high]`` of the means of `JUDGED`,
    by `mean_intervals` over the cases of the mean. ``settings`` contains the rules of ``scoring``, ``labels`` the names
    of the keys.
    """
    means = summary["mean"]
    measured = [name for name in next(iter(means.values()), ()) if name not in METRICS or name in JUDGED]
    scores = {name: np.stack([collect_scores(summary, label, name) for label in means], axis=1) for name in measured}
    intervals = {name: _find_intervals(scores[name]) for name in measured if name in JUDGED}
    return {
        **summary,
        "median": {
            label: {name: compute_median(scores[name][:, column]) for name in measured}
            for column, label in enumerate(means)
        },
        "undefined": count_undefined(summary),
        "intervals": {
            "kind": "percentile bootstrap over cases",
            "confidence": CONFIDENCE,
            "resamples": NUM_RESAMPLES,
            "mean": {label: {name: of[column] for name, of in intervals.items()} for column, label in enumerate(means)},
        },
        **({} if scoring is None else {"settings": scoring.describe()}),
        **({} if names is None else {"labels": {str(key): name for key, name in names.items()}}),
    }


def compute_median(scores: np.ndarray) -> float:
    """Return the median of the values that are not NaN, infinite ones included; NaN if there are none."""
    known = np.sort(scores[~np.isnan(scores)])
    if not known.size:
        return math.nan
    # Not numpy's median, which warns of NaN if a middle value is infinite.
    low, high = known[(known.size - 1) // 2], known[known.size // 2]
    return float(low) if low == high or (math.isinf(low) and math.isinf(high)) else float((low + high) / 2)


def _find_intervals(scores: np.ndarray) -> list[list[float]]:
    labels, _ = mean_intervals(np.where(np.isfinite(scores), scores, math.nan))
    return [[label.low, label.high] for label in labels]


def write_summary(summary: Summary, path: str | os.PathLike[str]) -> Path:
    """Write ``summary`` as JSON, atomically; values that are not finite become null. Return the path."""
    path = Path(path)
    with replacing(path) as partial:
        partial.write_text(format_summary(summary) + "\n", encoding="utf-8")
    return path


def format_summary(summary: Summary) -> str:
    """Return ``summary`` as JSON; values that are not finite become null."""
    return json.dumps(replace_nan(summary), indent=2, allow_nan=False)


def read_structure(key: str) -> Structure:
    """Return the label value, or the values of a region, that a key of a summary denotes.

    Raises
    ------
    DataError
        If the key denotes neither.

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
        raise DataError(f"a summary's keys must be label values or regions such as '(1, 2)', got {key!r}") from None


def read_summary(path: str | os.PathLike[str]) -> Summary:
    """Read a ``summary.json`` of volseg or nnU-Net; null and NaN become NaN, or the original infinite distance.

    Values that follow from the cases are left out: `complete_summary` computes them. ``labels`` and ``settings`` are
    empty if the file has none, as in nnU-Net.

    Raises
    ------
    DataError
        If the file is not a summary, or a case lacks a label or a metric of the means.
    """
    summary = read_json(Path(path), "a summary", has_nan=True)
    try:
        means = [summary["foreground_mean"], *summary["mean"].values()]
        cases = [metrics for case in summary["metric_per_case"] for metrics in case["metrics"].values()]
        for metrics in means + cases:
            metrics.update({name: math.nan for name, value in metrics.items() if value is None})
        for label, mean in summary["mean"].items():
            for metrics in [mean, *(case["metrics"][label] for case in summary["metric_per_case"])]:
                if missing := {"Dice", *mean} - metrics.keys():
                    raise KeyError(*missing)
    except (KeyError, TypeError, AttributeError) as fault:
        raise DataError(f"{path} is not a summary.json of volseg or nnU-Net: {fault!r}") from fault
    for metrics in cases:
        if (metrics.get("n_pred") == 0) != (metrics.get("n_ref") == 0):  # in only one of the two
            metrics.update({name: math.inf for name in DISTANCES if math.isnan(metrics.get(name, 0))})
    read = {key: summary[key] for key in ("foreground_mean", "mean", "metric_per_case")}
    names, settings = (of if isinstance(of := summary.get(key), dict) else {} for key in ("labels", "settings"))
    return {**read, "labels": {key: str(name) for key, name in names.items()}, "settings": settings}


def _average(several: Iterable[Mapping[str, float]]) -> Metrics:
    """Return the mean of each metric over its finite values; NaN if there are none."""
    rows = list(several)
    means = {}
    for name in rows[0] if rows else METRICS:
        values = [row[name] for row in rows if math.isfinite(row[name])]
        means[name] = math.fsum(values) / len(values) if values else math.nan
    return means


# Tabulate scores: means, medians and intervals in Markdown, and every case and label in CSV.


TABULATED = ("Dice", "NSD", "HD95", "ASSD", "lesion_F1", "volume_diff_ml")


def name_cases(summary: Summary) -> list[str]:
    """Return the id of each case: the name of its reference, or of its prediction if references have equal names."""
    files = [(case.get("reference_file"), case.get("prediction_file")) for case in summary["metric_per_case"]]
    true, predicted = (
        [stem(pair[side] or pair[1 - side] or f"case {number}") for number, pair in enumerate(files, 1)]
        for side in (0, 1)
    )
    return predicted if list_duplicates(true) else true


def scores_table(summary: Summary, names: Mapping[str, str], metrics: Collection[str] = TABULATED) -> str:
    """Return a Markdown table: for each metric and label the mean with its interval, the median, and undefined cases.

    Parameters
    ----------
    summary : Summary
        Result of `summarise`, `complete_summary` or `read_summary`.
    names : mapping
        Names of labels by key of the summary.
    metrics : collection of str
        Metrics to show; those that were not measured are left out.
    """
    full = summary if "intervals" in summary else complete_summary(summary)
    rows = [("metric", "label", "mean", "95 % interval", "median", "undefined")]
    for metric in metrics:
        for key, mean in summary["mean"].items():
            if key == "0" or metric not in mean:
                continue
            low, high = full["intervals"]["mean"][key].get(metric, (math.nan, math.nan))
            undefined = full["undefined"][key].get(metric)
            rows.append(
                (
                    f"{metric} ({UNITS[metric]})" if metric in UNITS and not metric.endswith("_ml") else metric,
                    names.get(key, key),
                    format_value(mean[metric], metric),
                    "" if metric not in JUDGED else f"{format_value(low, metric)} to {format_value(high, metric)}",
                    format_value(full["median"][key][metric], metric) if metric in full["median"][key] else "",
                    "" if undefined is None else str(undefined),
                )
            )
        labels = [key for key in summary["mean"] if key != "0" and metric in summary["mean"][key]]
        if metric in JUDGED and len(labels) > 1:
            mean = format_value(summary["foreground_mean"][metric], metric)
            rows.append((rows[-1][0], "mean of labels", mean, "", "", ""))
    return format_table(rows)


def explain_scores(scoring: Scoring) -> list[str]:
    """Return explanations of the table."""
    lines = []
    if mm := sorted(set(scoring.tolerances.values())):
        lines.append(f"NSD: within {', '.join(f'{each:g}' for each in mm)} mm.")
    elif scoring.distances:
        lines.append("NSD: not measured, since no tolerance (mm) is set or known for this task.")
    if scoring.distances:
        lines.append("Undefined: cases in which only one of the two has the label; means of distances leave them out.")
    return lines


def write_cases(summary: Summary, names: Mapping[str, str], path: str | os.PathLike[str]) -> Path:
    """Write a CSV with a row for each case and label, atomically; return the path.

    An undefined distance is ``inf``; NaN is an empty cell.
    """
    path = Path(path)
    first = next(iter(summary["metric_per_case"][0]["metrics"].values()))
    with replacing(path) as partial, partial.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(["case", "label", "name", *first, "prediction_file", "reference_file"])
        for case_id, case in zip(name_cases(summary), summary["metric_per_case"], strict=True):
            files = [case.get("prediction_file") or "", case.get("reference_file") or ""]
            for key, metrics in case["metrics"].items():
                values = ["" if math.isnan(metrics[name]) else metrics[name] for name in first]
                table.writerow([case_id, str(read_structure(key)), names.get(key, key), *values, *files])
    return path
