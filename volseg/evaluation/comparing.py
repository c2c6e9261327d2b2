"""Compare methods on the same cases: paired differences, their interval, and Wilcoxon's test.

Cases differ more than methods do, so two means with their spreads show little: the methods are compared on each case.
All pairs of methods are compared. The p values of one metric, over all labels and pairs, are corrected together by
Holm's method. They apply to these cases and these trained networks, and do not cover the variation between training
seeds.
"""

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import wilcoxon

from volseg.errors import DataError
from volseg.evaluation.intervals import mean_intervals
from volseg.evaluation.summary import JUDGED, Summary, collect_scores, compute_median, name_cases, read_summary
from volseg.evaluation.surfaces import DISTANCES
from volseg.files import replace_nan, replacing, require_new
from volseg.formatting import format_table, list_duplicates, list_some

PLACES = ("summary.json", "validation/summary.json")
"""Path of the summary of a cross-validation or a folder of predictions, and of a run."""


COMPARED = tuple(name for name in JUDGED if name != "IoU")
"""Compared metrics. IoU is left out: it is a function of Dice and ranks cases equally."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """One method's scores of each case."""

    name: str
    summary: Summary

    @property
    def labels(self) -> Mapping[str, str]:
        """Known names of labels by key of the summary."""
        return self.summary.get("labels", {})

    @property
    def settings(self) -> Mapping[str, object]:
        """Known settings of the measurement of surfaces and lesions."""
        return self.summary.get("settings", {})


PairedResult = dict[str, Any]
"""One metric of one label, by two methods on the same cases. Differences are the second minus the first. ``metric``,
``label``, ``first`` and ``second`` are names. ``num_cases`` counts the cases in which both methods have a finite value;
all means, ``median_difference``, ``low`` and ``high`` (the percentile bootstrap interval of the mean difference) and
the numbers of cases in which the second is better, worse and equal are over these cases. ``num_undefined`` counts the
other cases, with an infinite distance: at least one method found nothing. ``p_value`` is that of the two-sided Wilcoxon
signed-rank test, ``p_holm`` is corrected for the other labels and pairs. ``differences`` are per case, in the order of
the ids: infinite if one distance is infinite, NaN if both are or one has no value.
"""


def read_method(source: str | Path, name: str | None = None) -> Method:
    """Read the scores of a run, a cross-validation, a folder of predictions, or a ``summary.json``.

    Raises
    ------
    DataError
        If there is no summary, or it contains a case twice.
    """
    source = Path(source)
    files = [source] if source.is_file() else [source / place for place in PLACES if (source / place).is_file()]
    if not files:
        raise DataError(
            f"{source} has no {' or '.join(PLACES)}; name a run, a cross-validation, or predictions that "
            "`volseg evaluate` has scored"
        )
    summary = read_summary(files[0])
    if doubled := list_duplicates(name_cases(summary)):
        raise DataError(f"{files[0]} contains {list_some(doubled)} more than once; score each case once")
    return Method(name=name or source.name or str(source), summary=summary)


def compare_methods(methods: Sequence[Method]) -> list[PairedResult]:
    """Compare every two methods case by case, in the metrics of `COMPARED` that all methods have.

    Parameters
    ----------
    methods : sequence of Method
        At least two, with the same cases and labels.

    Raises
    ------
    DataError
        For a single method, or methods with different cases or labels.

    References
    ----------
    .. [1] Wilcoxon, Individual comparisons by ranking methods, Biometrics Bull. 1 (1945), 80-83, doi:10.2307/3001968.
    .. [2] Holm, A simple sequentially rejective multiple test procedure, Scand. J. Statist. 6 (1979), 65-70.
    """
    _require_same(methods)
    labels = [label for label in methods[0].summary["mean"] if label != "0"]
    shared = [metric for metric in COMPARED if all(_has(method, metric) for method in methods)]
    results = []
    for metric in shared:
        of_metric = [_compare(metric, label, one, other) for label in labels for one, other in combinations(methods, 2)]
        corrected = _correct([result["p_value"] for result in of_metric])
        results += [{**result, "p_holm": p} for result, p in zip(of_metric, corrected, strict=True)]
    return results


def _has(method: Method, metric: str) -> bool:
    return all(metric in mean for mean in method.summary["mean"].values())


def _require_same(methods: Sequence[Method]) -> None:
    if len(methods) < 2:
        raise DataError(f"a comparison needs at least two methods, got {len(methods)}")
    if doubled := list_duplicates(method.name for method in methods):
        raise DataError(f"two methods are called {doubled[0]!r}; give each its own name")
    first, *others = methods
    for other in others:
        for kind, mine, theirs in (
            ("case", set(name_cases(first.summary)), set(name_cases(other.summary))),
            ("label", set(first.summary["mean"]) - {"0"}, set(other.summary["mean"]) - {"0"}),
        ):
            if mine != theirs:
                raise DataError(
                    f"{first.name} and {other.name} cannot be compared in pairs: {len(mine & theirs)} {kind}(s) are in "
                    f"both, {len(mine - theirs)} only in the first ({list_some(sorted(mine - theirs)) or 'none'}), "
                    f"{len(theirs - mine)} only in the second ({list_some(sorted(theirs - mine)) or 'none'})"
                )
        facts, others_facts = _list_facts(first), _list_facts(other)
        told = [
            f"{fact} ({value} and {others_facts[fact]})"
            for fact, value in facts.items()
            if fact in others_facts and value != others_facts[fact]
        ]
        if told:
            raise DataError(
                f"{first.name} and {other.name} cannot be compared, since they differ in {list_some(told)}; score both "
                "in the same way"
            )


def _list_facts(method: Method) -> dict[str, object]:
    """Return the known facts in which comparable methods must agree: names, settings, and true sizes."""
    facts: dict[str, object] = {f"the setting {key}": value for key, value in method.settings.items()}
    for key, name in method.labels.items():
        if name != f"label_{key}":  # a label without a name
            facts[f"the name of label {key}"] = name
    if _has(method, "n_ref"):
        cases = sorted(name_cases(method.summary))
        for label in method.summary["mean"]:
            for case, size in zip(cases, _scores_by_case(method, label, "n_ref").tolist(), strict=True):
                if not math.isnan(size):  # a case without annotation of the label has neither size nor score
                    facts[f"the true voxels of label {label} in case {case}"] = size
    return facts


def _scores_by_case(method: Method, label: str, metric: str) -> NDArray[np.float64]:
    order = np.argsort(np.array(name_cases(method.summary)))
    return np.asarray(collect_scores(method.summary, label, metric)[order])


def _compare(metric: str, label: str, first: Method, second: Method) -> PairedResult:
    scores = [_scores_by_case(method, label, metric) for method in (first, second)]
    with np.errstate(invalid="ignore"):  # two infinite distances
        differences = scores[1] - scores[0]
    is_finite = np.isfinite(differences)
    finite = differences[is_finite]
    better = -1 if metric in DISTANCES else 1
    interval = mean_intervals(finite[:, None])[1] if finite.size else None
    return {
        "metric": metric,
        "label": first.labels.get(label, second.labels.get(label, label)),
        "first": first.name,
        "second": second.name,
        "num_cases": finite.size,
        "mean_first": _mean(scores[0][is_finite]),
        "mean_second": _mean(scores[1][is_finite]),
        "mean_difference": _mean(finite),
        "low": interval.low if interval else math.nan,
        "high": interval.high if interval else math.nan,
        "median_difference": compute_median(finite),
        "num_better": int((better * finite > 0).sum()),
        "num_worse": int((better * finite < 0).sum()),
        "num_equal": int((finite == 0).sum()),
        "num_undefined": int((~np.isnan(scores).any(axis=0)).sum() - finite.size),
        "p_value": _test(finite),
        "differences": tuple(differences.tolist()),
    }


def _test(differences: NDArray[np.float64]) -> float:
    """Return the p value of Wilcoxon's signed-rank test; cases without a difference are left out, as by Wilcoxon."""
    differences = differences[differences != 0]
    if not differences.size:
        return 1.0
    return float(wilcoxon(differences).pvalue)


def _correct(p_values: Sequence[float]) -> list[float]:
    """Return Holm's p values: the smallest times their number, the next times one less, but at least the one before.

    >>> _correct([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    corrected, highest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(np.argsort(p_values, kind="stable").tolist()):
        highest = max(highest, min(1.0, p_values[place] * (len(p_values) - rank)))
        corrected[place] = highest
    return corrected


def _mean(values: NDArray[np.float64]) -> float:
    return float(values.mean()) if values.size else math.nan


HEADER = ("metric", "label", "methods", "means", "difference", "95 % interval", "better/worse/equal", "p", "p (Holm)")

SIDES = f"above 0, in {', '.join(DISTANCES)} below 0"


def comparison_table(results: Sequence[PairedResult]) -> str:
    """Return a Markdown table with a row for each metric, label and pair of methods."""
    rows: list[tuple[str, ...]] = [HEADER]
    for of in results:
        undefined = f", {of['num_undefined']} with an infinite distance left out" if of["num_undefined"] else ""
        rows.append(
            (
                of["metric"],
                of["label"],
                f"{of['second']} - {of['first']}",
                f"{_format(of['mean_second'])} - {_format(of['mean_first'])}",
                _format(of["mean_difference"], "+"),
                f"{_format(of['low'], '+')} to {_format(of['high'], '+')}",
                f"{of['num_better']}/{of['num_worse']}/{of['num_equal']} of {of['num_cases']}{undefined}",
                f"{of['p_value']:.2g}",
                f"{of['p_holm']:.2g}",
            )
        )
    return f"{format_table(rows)}\n\nA difference is the second method minus the first. The second is better {SIDES}."


def write_comparison(results: Sequence[PairedResult], methods: Sequence[Method], folder: str | Path) -> list[Path]:
    """Write ``comparison.json`` and ``comparison.csv``, each atomically; return the paths."""
    folder = Path(folder)
    cases = sorted(name_cases(methods[0].summary))
    paths = [folder / f"comparison.{suffix}" for suffix in ("json", "csv")]
    told = {
        "methods": [method.name for method in methods],
        "cases": cases,
        "test": "Wilcoxon signed-rank, two-sided, cases without a difference left out",
        "correction": "Holm, over the labels and pairs of methods of a metric",
        "results": [replace_nan(result) for result in results],
    }
    with replacing(paths[0]) as partial:
        partial.write_text(json.dumps(told, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    names = [name for name in results[0] if name != "differences"] if results else []
    with replacing(paths[1]) as partial, partial.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow([*names, *cases])
        table.writerows([*(of[name] for name in names), *of["differences"]] for of in results)
    return paths


def _format(value: float, sign: str = "") -> str:
    return f"{value:{sign}.4f}" if math.isfinite(value) else "-"


def compare_folders(sources: Sequence[str | Path], output: str | Path, *, overwrite: bool = False) -> str:
    """Compare runs, cross-validations or scored predictions; write the comparison, and return its table.

    Raises
    ------
    DataError, ConfigError
        For sources without scores, with other cases or labels, or a comparison that already exists.
    """
    output = Path(output)
    require_new(*(output / f"comparison.{suffix}" for suffix in ("json", "csv")), overwrite=overwrite)
    paths = [Path(source) for source in sources]
    # The last part of a path is the method's name, unless two are equal.
    are_different = len({path.absolute().name for path in paths}) == len(paths)
    methods = [read_method(path, path.absolute().name if are_different else str(path)) for path in paths]
    results = compare_methods(methods)
    written = write_comparison(results, methods, output)
    return "\n".join([comparison_table(results), "", *map(str, written)])
