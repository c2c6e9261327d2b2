"""Write sections of reports: scores by label and by case, comparison with published results, time and memory."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from volseg.formatting import UNITS, format_duration, format_moment, format_value
from volseg.monitoring import run_files
from volseg.reporting import content
from volseg.reporting.reading import FEWEST, ReportedCase, RunRecord, Scores, mean

NUM_EXTREME = 5
"""Number of cases shown at either end."""


def choose_extremes(cases: Sequence[ReportedCase]) -> tuple[list[ReportedCase], list[ReportedCase]]:
    """Return the cases with the lowest and with the highest mean Dice, the most extreme first; no case is in both."""
    known = sorted((case for case in cases if math.isfinite(case.dice)), key=lambda case: (case.dice, case.name))
    lowest = min(NUM_EXTREME, -(-len(known) // 2))
    highest = min(NUM_EXTREME, len(known) - lowest)
    return known[:lowest], known[::-1][:highest]


def describe_scores(scores: Scores | None, compose: content.Composer) -> list[content.Section]:
    """Return the sections on scores: by label, spread over the cases, and case by case; none without scores."""
    if scores is None:
        return []
    return [
        compose.section(
            "Validation", lambda: [_tabulate_dice(scores), *_list_lowest(scores)], brief=True, only_brief=True
        ),
        compose.section("Scores", lambda: _tabulate_labels(scores), brief=True),
        compose.section("Spread over the cases", lambda: _draw_boxes(scores)),
        compose.section("Cases", lambda: _tabulate_cases(scores)),
    ]


def name_metric(metric: str) -> str:
    """Return the title of a metric for tables and curves, given its name (``HD95``) or its tag (``hd95``)."""
    metric = {one.lower(): one for one in (*UNITS, "NSD", "lesion_F1")}.get(metric.lower(), metric)
    return {"volume_diff_ml": "volume difference (ml)", "lesion_F1": "lesion F1"}.get(
        metric, f"{metric} ({UNITS[metric]})" if metric in UNITS else metric
    )


def _tabulate_dice(scores: Scores) -> content.TextTable:
    rows = [[name, format_value(scores.of("mean", key, "Dice"), "Dice")] for key, name in scores.labels.items()]
    rows.append(["mean", format_value(scores.dice, "Dice")])
    return content.TextTable(caption="Mean Dice", header=("label", "Dice"), rows=rows, bold=frozenset([len(rows) - 1]))


def _list_lowest(scores: Scores) -> list[content.Block]:
    worst, _ = choose_extremes(scores.cases)
    lowest = [f"{case.name}: {format_value(case.dice, 'Dice')}" for case in worst]
    return [content.Text("Lowest:"), content.Items(lowest)] if worst else []


def _tabulate_labels(scores: Scores) -> list[content.Block]:
    rows = []
    for metric in scores.metrics:
        for key, name in scores.labels.items():
            interval = scores.interval(key, metric)
            absent = scores.of("undefined", key, metric)
            rows.append(
                [
                    name,
                    name_metric(metric),
                    format_value(scores.of("mean", key, metric), metric),
                    "" if interval is None else " to ".join(format_value(end, metric) for end in interval),
                    format_value(scores.of("median", key, metric), metric),
                    "" if math.isnan(absent) else f"{absent:.0f}",
                ]
            )
    told = []
    if any(metric in UNITS for metric in scores.metrics):
        told.append(
            content.Text("Undefined: only one of label map and prediction has the label; means omit these cases.")
        )
    tolerances = sorted(set(((scores.summary.get("settings") or {}).get("tolerance_mm") or {}).values()))
    if tolerances:
        told.append(content.Text(f"NSD tolerance: {', '.join(f'{each:g}' for each in tolerances)} mm."))
    header = ("label", "metric", "mean", "95 % interval", "median", "undefined")
    shown = [column for column in range(len(header)) if column != 3 or any(row[column] for row in rows)]
    return [
        content.TextTable(
            caption=f"Means over {len(scores.cases)} cases; bootstrap intervals for {FEWEST} cases or more",
            header=[header[column] for column in shown],
            rows=[[row[column] for column in shown] for row in rows],
        ),
        *told,
    ]


def _draw_boxes(scores: Scores) -> list[content.Block]:
    return content.select_charts(
        [
            content.Boxes(
                title=metric.replace("_", " ") if metric not in UNITS else name_metric(metric).partition(" (")[0],
                unit=UNITS.get(metric, ""),
                groups=[
                    (name, [(case.name, case.metrics[key].get(metric, math.nan)) for case in scores.cases])
                    for key, name in scores.labels.items()
                ],
            )
            for metric in scores.metrics
        ],
        "Each dot is a case.",
    )


def _tabulate_cases(scores: Scores) -> list[content.Block]:
    columns = [(metric, key, name) for metric in scores.metrics for key, name in scores.labels.items()]
    header = ["case", "mean Dice", *(f"{name}: {name_metric(metric)}" for metric, _, name in columns)]
    rows = [
        [
            case.name,
            format_value(case.dice, "Dice"),
            *(format_value(case.metrics[key].get(metric, math.nan), metric) for metric, key, _ in columns),
        ]
        for case in sorted(scores.cases, key=lambda case: (math.isnan(case.dice), case.dice, case.name))
    ]
    return [
        content.TextTable(
            caption="All cases, lowest Dice first; click a column to sort", header=header, rows=rows, sortable=True
        )
    ]


def tabulate_published(
    published: Sequence[Mapping[str, Any]], names: Sequence[str], own: tuple[str, str, int, Sequence[float], float]
) -> list[content.Block]:
    """Return a table of the own and the published results, and a note on their comparison.

    Parameters
    ----------
    published : sequence of mapping
        Result of `volseg.evaluation.scoring.published_results`.
    names : sequence of str
        Names of the labels.
    own : tuple
        Method, evaluation, number of cases, Dice of each label, and their mean.
    """
    method, evaluation, cases, dice, overall = own
    first = [method, evaluation, str(cases), *(format_value(value, "Dice") for value in (*dice, overall)), ""]
    rows = [
        [
            str(row["method"]),
            str(row["evaluation"]),
            str(row["num_cases"]),
            *_format_dice([float(value) for _, value in sorted(row["dice"].items(), key=lambda item: int(item[0]))]),
            str(row["source"]),
        ]
        for row in published
    ]
    header = ("method", "evaluation", "cases", *names, "mean", "source")
    caption = "Dice and published results; for cross-validations, the mean over the folds"
    table = content.TextTable(caption=caption, header=header, rows=[first, *rows], bold=frozenset([0]))
    told = "Other cases, such as a challenge's test set, may be easier or harder: results compare only roughly."
    return [table, content.Text(told)]


def _format_dice(dice: Sequence[float]) -> list[str]:
    """Return Dice values with as many digits as the source has, and their mean with one more."""
    digits = max(2, *(len(repr(value).partition(".")[2]) for value in dice))
    return [*(f"{value:.{digits}f}" for value in dice), f"{mean(dice):.{min(digits + 1, 4)}f}"]


GIB = 2**30


def add_spans(parts: Sequence[run_files.RunPart]) -> dict[str, float]:
    """Return the seconds of all parts by activity, and the seconds that no span covers."""
    spans: dict[str, float] = {}
    for part in parts:
        for name, seconds in part.spans.items():
            spans[name] = spans.get(name, 0.0) + seconds
    told = spans.pop(run_files.THE_REST, 0.0)  # of finished parts
    # Spans are measured separately: the rest may be slightly negative.
    left = max(sum(part.seconds for part in parts) - math.fsum(spans.values()), told)
    return {**spans, run_files.THE_REST: left}


def describe_time(parts: Sequence[run_files.RunPart], said: str, caption: str) -> list[content.Block]:
    """Return the time of several processes by activity; ``said`` follows their sum."""
    if not parts:
        return []
    whole = sum(part.seconds for part in parts)
    spans = add_spans(parts)
    rows = [[name, format_duration(part), f"{100 * part / (whole or 1):.0f} %"] for name, part in spans.items()]
    rows.append(["total", format_duration(whole), "100 %"])
    bold = frozenset([len(rows) - 1])
    table = content.TextTable(caption=caption, header=("", "time", "share"), rows=rows, bold=bold)
    return [content.Text(f"{format_duration(whole)} {said}."), table]


def describe_time_of_run(record: RunRecord) -> list[content.Block]:
    """Return the use of time over all parts of the run."""
    parts = record.parts
    how = "without interruption" if len(parts) == 1 else f"in {len(parts)} parts, as the training was resumed"
    said = f"{how}; started {format_moment(parts[0].begun)}" if parts else ""
    return describe_time(parts, said, "Time by activity")


def describe_memory(record: RunRecord) -> list[content.Block]:
    """Return the memory of the first steps on each GPU, and the forecast."""
    memory = record.memory
    if not memory or not memory.get("measured"):
        return []
    reading = memory["measured"][-1]
    forecast = memory.get("forecast") or {}
    rows = [
        [f"process {device.get('process', 0)}, {device['device']}", *_list_gib(device), "", ""]
        for device in reading["devices"]
    ]
    if forecast.get("reserved"):
        rows.append(["the fullest GPU", "", "", *_list_gib(forecast)])
    table = content.TextTable(
        caption=f"Peaks after {reading['steps']} steps, in GiB; the forecast is for a step, without cases on the GPU",
        header=("GPU", "used", "reserved", "forecast used", "forecast reserved"),
        rows=rows,
    )
    told = record.told.memory
    return [*([content.Text(f"{told[0].upper()}{told[1:]}.")] if told else []), table]


def _list_gib(memory: Mapping[str, Any]) -> list[str]:
    return [f"{memory[key] / GIB:.2f}" if key in memory else "" for key in ("used", "reserved")]
