"""Implement ``volseg evaluate``: score folders, write the results, and format them."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from volseg.config.nearest import did_you_mean
from volseg.errors import ConfigError
from volseg.evaluation.folders import EvaluatedFolders, evaluate_folders
from volseg.evaluation.summary import (
    JUDGED,
    TABULATED,
    explain_scores,
    format_summary,
    scores_table,
    write_cases,
    write_summary,
)
from volseg.evaluation.surfaces import DISTANCES
from volseg.files import require_new
from volseg.formatting import list_some

KNOWN = {name.casefold(): name for name in (*JUDGED, *DISTANCES, *TABULATED)}
MEASURED = {*DISTANCES, "NSD"}


def score_folders(
    predictions: str | Path,
    labels: str | Path,
    *,
    output: str | Path,
    metrics: Collection[str] | None = None,
    overwrite: bool = False,
    **settings: Any,
) -> EvaluatedFolders:
    """Score two folders and write ``summary.json`` and ``cases.csv``.

    Parameters
    ----------
    predictions, labels : path
        See `evaluate_folders`.
    output : path
        Folder for the two files.
    metrics : collection of str, optional
        Names of the metrics, in any case; distances are measured only if one of them is included.
    overwrite : bool
        Whether to replace existing files.
    **settings
        Settings of `evaluate_folders`.

    Raises
    ------
    DataError, ConfigError
        See `evaluate_folders`; also for an unknown metric, NSD without a tolerance, or an existing file.
    """
    files = [Path(output) / name for name in ("summary.json", "cases.csv")]
    require_new(*files, overwrite=overwrite)
    wanted = _choose_metrics(metrics)
    evaluated = evaluate_folders(
        predictions,
        labels,
        distances=bool(MEASURED & set(wanted)),
        needs_tolerance=metrics is not None and "NSD" in wanted,
        **settings,
    )
    if evaluated.summary is not None:
        write_summary(evaluated.summary, files[0])
        write_cases(evaluated.summary, evaluated.names, files[1])
    return evaluated


def format_json(evaluated: EvaluatedFolders) -> str:
    """Return the content of ``summary.json``; null if no case could be scored."""
    return "null" if evaluated.summary is None else format_summary(evaluated.summary)


def format_report(evaluated: EvaluatedFolders, metrics: Collection[str] | None = None) -> str:
    """Return the report of an evaluation: the table, and the cases that it lacks."""
    pairs = evaluated.pairs
    lines = (
        []
        if evaluated.summary is None
        else [scores_table(evaluated.summary, evaluated.names, _choose_metrics(metrics))]
    )
    lines += ["", f"{len(pairs.matched) - len(evaluated.faults)} of {len(pairs.matched) + len(pairs.missing)} case(s)"]
    lines += explain_scores(evaluated.scoring)
    if pairs.missing:
        lines += [f"not predicted: {list_some(pairs.missing)}"]
    if pairs.surplus:
        lines += [f"without a label, not scored: {list_some([path.name for path in pairs.surplus])}"]
    lines += [f"could not be scored: {case}: {fault}" for case, fault in evaluated.faults.items()]
    return "\n".join(lines)


def _choose_metrics(names: Collection[str] | None) -> tuple[str, ...]:
    if names is None:
        return TABULATED
    listed = [part.strip() for name in names for part in name.split(",")]
    if strange := [name for name in listed if name.casefold() not in KNOWN]:
        raise ConfigError(f"no metric is called {strange[0]!r}; {did_you_mean(strange[0], KNOWN.values())}")
    return tuple(KNOWN[name.casefold()] for name in listed)
