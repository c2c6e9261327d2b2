"""Tabulate scores: means, medians and intervals in Markdown, and every case and label in CSV."""

import csv
import math
import os
from collections.abc import Collection, Mapping
from pathlib import Path

from volseg.data.readers import stem
from volseg.evaluation.scoring import Scoring
from volseg.evaluation.summary import JUDGED, Summary, complete_summary, read_structure
from volseg.files import replacing
from volseg.formatting import UNITS, format_table, format_value, list_duplicates

__all__ = ["explain_scores", "name_cases", "scores_table", "write_cases"]

TABULATED = ("Dice", "NSD", "HD95", "ASSD", "lesion_F1", "volume_diff_ml")


def name_cases(summary: Summary) -> list[str]:
    """Return the id of each case: the name of its reference, or of its prediction where references do not differ."""
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
        Result of `summarise` or `read_summary`.
    names : mapping
        Key of the summary to the label's name.
    metrics : collection of str
        Metrics to show; those that were not measured are left out.
    """
    full = complete_summary(summary)
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
        lines.append("NSD: not measured, for no tolerance (mm) was given, and none is known of this task.")
    if scoring.distances:
        lines.append("Undefined: cases in which only one of the two has the label; no mean of a distance has them.")
    return lines


def write_cases(summary: Summary, names: Mapping[str, str], path: str | os.PathLike[str]) -> Path:
    """Write a CSV with a row for each case and label, in one step or not at all; return the path.

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
