"""Describe a run in a report."""

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from shlex import quote
from typing import Any

from volseg.commands import spell
from volseg.formatting import format_duration, format_moment, format_value
from volseg.reporting import content
from volseg.reporting.reading import RunRecord, Scores
from volseg.reporting.sections import (
    choose_extremes,
    describe_memory,
    describe_scores,
    describe_time_of_run,
    name_metric,
    tabulate_published,
)

GIB = 2**30

CURVES = (
    ("Loss", "", ("train/loss", "train/*")),
    ("Dice", "", ("train/soft_dice", "val/dice_mean", "val/dice/*")),
    ("Learning rate", "", ("lr",)),
    ("Gradient norm", "", ("train/gradient_norm",)),
    ("A step", "s", ("time/step_*",)),
    ("An epoch", "s", ("time/*",)),
    ("Speed", "voxels/s", ("voxels_per_second",)),
    ("GPU memory", "GiB", ("gpu/*_gib", "memory/*_gib")),
)
"""Charts and the tags drawn in them. Each tag is drawn once; a chart that names it precedes one with a pattern."""


def describe_run(record: RunRecord, state: str | None = None) -> content.ReportContent:
    """Return the report of a run.

    Parameters
    ----------
    record : RunRecord
        Record of its folder.
    state : str, optional
        State of the run, if the caller knows more than the files.
    """
    compose = content.Composer(record.missing)
    state = state or describe_run_state(record)
    scores = record.scores
    sections = [
        compose.section("Look at this", lambda: _list_warnings(record, state), warns=True),
        compose.section(
            "Best and worst cases", lambda: [] if scores is None else show_cases(scores, record.overlays, record.folder)
        ),
        compose.section(
            "Out of memory", lambda: [content.Text(record.told.replanned)] if record.told.replanned else [], brief=True
        ),
        compose.section("Cases left out", lambda: _list_findings(record.told.problems), brief=True),
        compose.section("Cases to check", lambda: _list_findings(record.told.remarks), brief=True),
        compose.section("Curves", lambda: _draw_curves(record)),
        *describe_scores(scores, compose),
        compose.section("Published results", lambda: _compare(record), brief=True),
        compose.section("Time", lambda: describe_time_of_run(record), brief=True),
        compose.section("GPU memory", lambda: describe_memory(record), brief=True),
        compose.section("Data", lambda: _tell_data(record)),
        compose.section("Config", lambda: [content.Code("config.yaml, every value", record.config_text)]),
        compose.section("Environment", lambda: describe_environment(record.environment)),
    ]
    subtitle = compose.attempt("the subtitle", lambda: _name_training(record), "A training")
    headline = compose.attempt("the headline", lambda: _make_headline(record), list[tuple[str, str]]())
    return compose.finish(
        record.folder,
        title=str(record.config.get("name", record.folder.name)),
        subtitle=subtitle,
        state=state,
        headline=headline,
        sections=sections,
        commands=_list_commands(record, state),
    )


def _name_training(record: RunRecord) -> str:
    network = record.config.get("network") or {}
    fold = (record.config.get("split") or {}).get("fold")
    told = f"{network.get('name', 'a network')} on {record.task.get('name', 'a task')}"
    return told if fold is None else f"{told}, fold {fold}"


def describe_environment(environment: Mapping[str, Any]) -> list[content.Block]:
    """Return versions and devices."""
    if not environment:
        return []
    gpus = environment.get("gpus") or []
    named = [f"{gpu.get('name')}, {gpu.get('memory_bytes', 0) / GIB:.0f} GiB" for gpu in gpus]
    facts = {
        "volseg": _join(environment.get("volseg"), environment.get("git_commit")),
        "Python": environment.get("python"),
        **{str(name): version for name, version in (environment.get("libraries") or {}).items()},
        "GPUs": "; ".join(f"{named.count(name)} x {name}" for name in dict.fromkeys(named)) or "none",
        "CUDA, cuDNN, driver": _join(environment.get("cuda"), environment.get("cudnn"), environment.get("driver")),
        "CPU cores": environment.get("cpu_cores"),
        "System": environment.get("platform"),
    }
    return [content.NamedValues({name: str(value) for name, value in facts.items() if value})]


def describe_run_state(record: RunRecord) -> str:
    """Return the final or last known state of a run."""
    if record.status is None:
        return "finished" if (record.folder / "report.md").exists() else "state unknown"
    if record.status.has_ended:
        return record.status.state
    return f"{record.status.state}, as of {format_moment(record.status.time)}"


def _make_headline(record: RunRecord) -> list[tuple[str, str]]:
    headline = []
    if record.scores is not None:
        headline.append(("mean Dice", format_value(record.scores.dice, "Dice")))
        names = list(record.scores.labels.items())
        if 1 < len(names) <= 4:
            headline += [
                (f"Dice {name}", format_value(record.scores.of("mean", key, "Dice"), "Dice")) for key, name in names
            ]
        headline.append(("validation cases", str(len(record.scores.cases))))
    elif record.status is not None and record.status.best is not None:
        headline.append(("best mean Dice so far", format_value(record.status.best, "Dice")))
    done, epochs = _count_epochs(record)
    if epochs is not None:
        headline.append(("epochs", str(epochs) if done in (None, epochs) else f"{done} of {epochs}"))
    if record.parts:
        headline.append(("total time", format_duration(sum(part.seconds for part in record.parts))))
    return headline


def _count_epochs(record: RunRecord) -> tuple[int | None, int | None]:
    epochs = (record.config.get("training") or {}).get("epochs")
    if record.history:
        return record.history[-1].epoch, epochs
    return (None if record.status is None else record.status.epoch), epochs


def _list_warnings(record: RunRecord, state: str) -> list[content.Block]:
    warnings = []
    if state == "failed" and record.status is not None:
        warnings.append(f"The training failed: {record.status.message or 'no reason was recorded'}")
    if state == "interrupted":
        warnings.append(
            "The training was interrupted; the first command under Next continues it from its last checkpoint."
        )
    if cut := record.told.patients.get("warning"):
        warnings.append(f"{cut}.")
    if left := record.told.problems:
        warnings.append(f"{len(left)} unusable case(s) were left out; see below.")
    if remarks := record.told.remarks:
        warnings.append(f"{len(remarks)} remark(s) on cases to check; see below.")
    if record.replanned:
        warnings.append("A step ran out of memory, and the training continued with other settings; see below.")
    scalars = [(line.epoch, tag, value) for line in record.history for tag, value in line.scalars.items()]
    bad = [epoch for epoch, tag, value in scalars if tag.startswith("train/") and not math.isfinite(value)]
    if bad:
        warnings.append(f"Losses or gradients were not finite in {len(set(bad))} epoch(s), first in epoch {min(bad)}.")
    if record.scores is not None:
        for key, name in record.scores.labels.items():
            lost = [case.name for case in record.scores.cases if case.metrics[key].get("Dice") == 0]
            if lost:
                warnings.append(f"{name}: Dice is 0 in {len(lost)} case(s), such as {', '.join(lost[:3])}.")
    waited, spent = (
        sum(line.scalars.get(tag, 0.0) for line in record.history)
        for tag in ("time/data_wait_seconds", "time/epoch_seconds")
    )
    if spent and waited > 0.2 * spent:
        warnings.append(f"The training spent {100 * waited / spent:.0f} % of its time waiting for batches.")
    return [content.Items(warnings)] if warnings else []


def _list_findings(findings: Sequence[str]) -> list[content.Block]:
    return [content.Items(findings)] if findings else []


def _compare(record: RunRecord) -> list[content.Block]:
    published = record.told.published
    if not published or record.scores is None:
        return []
    own = [record.scores.of("mean", key, "Dice") for key in record.scores.labels]
    names = list(record.scores.labels.values())
    cases = len(record.scores.cases)
    return tabulate_published(published, names, ("this run", "one fold", cases, own, record.scores.dice))


def _draw_curves(record: RunRecord) -> list[content.Block]:
    tags = list(dict.fromkeys(tag for line in record.history for tag in line.scalars))
    names = list(record.scores.labels.values()) if record.scores is not None else []
    named = {tag for _, _, wanted in CURVES for tag in wanted}
    charts = []
    taken: set[str] = set()
    for title, unit, wanted in CURVES:
        fitting = [tag for tag in tags if tag not in taken | named and any(fnmatchcase(tag, one) for one in wanted)]
        chosen = [*(tag for tag in wanted if tag in tags), *fitting]
        taken.update(chosen)
        charts.append(content.Chart(title=title, unit=unit, lines=_list_lines(record, chosen, names)))
    further = [tag for tag in tags if tag not in taken and tag.startswith("val/")]
    for metric in dict.fromkeys(tag.split("/")[1] for tag in further):
        chosen = [tag for tag in further if tag.split("/")[1] == metric]
        charts.append(
            content.Chart(title=f"Validation: {name_metric(metric)}", lines=_list_lines(record, chosen, names))
        )
    return content.select_charts(charts, "By epoch, counted from 1.")


def _list_lines(record: RunRecord, tags: Sequence[str], names: Sequence[str]) -> list[content.Line]:
    """Return a line per tag over the epochs that have it; a label has the same colour as in the pictures."""
    lines = []
    for place, tag in enumerate(tags):
        held = [(line.epoch, line.scalars[tag]) for line in record.history if tag in line.scalars]
        name = _name_line(tag)
        colour = names.index(name) if name in names else place + (len(names) if tag == "val/dice_mean" else 0)
        lines.append(content.Line(name=name, xs=[x for x, _ in held], ys=[y for _, y in held], colour=colour))
    return lines


def _name_line(tag: str) -> str:
    """Return a tag without the part that the chart's title already gives: for ``val/dice/Anterior``, the label."""
    kind, _, rest = tag.partition("/")
    if kind == "val":
        return rest.partition("/")[2] or "mean"
    name = rest.removesuffix("_seconds")
    return (name if name == "step" else name.removeprefix("step_")).replace("_", " ") or kind


def show_cases(scores: Scores, overlays: Mapping[str, Path], folder: Path) -> list[content.Block]:
    """Return the pictures of the cases with the lowest and the highest Dice, and the command that shows all slices."""
    shown: list[content.Block] = []
    worst, best = choose_extremes(scores.cases)
    for title, cases in (("Lowest Dice", worst), ("Highest Dice", best)):
        pictures = [
            content.Picture(
                title=f"{case.name}: Dice {format_value(case.dice, 'Dice')}",
                alt=f"Sagittal, coronal and axial slice of {case.name} with lines around its label and the prediction; "
                f"mean Dice {format_value(case.dice, 'Dice')}",
                file=overlays[case.name],
            )
            for case in cases
            if case.name in overlays
        ]
        if pictures:
            shown.append(
                content.Pictures(title=title, pictures=pictures, legend=() if shown else list(scores.labels.values()))
            )
    lowest = "".join(f" --case {quote(case.name)}" for case in worst)
    scroll = ("View all slices of the worst cases:", spell(f"volseg view {quote(str(folder))}{lowest}"))
    return [content.Text(EXPLAINED), *shown, content.Commands([scroll])] if shown else []


EXPLAINED = (
    "A coloured line with a faint tint marks the label, a pale line of the same hue the prediction. A tint without a "
    "pale line was missed; a pale line without a tint is a false positive. R and L, A and P are the patient's sides. "
    "Each slice is the one with the largest area of the label."
)


def _tell_data(record: RunRecord) -> list[content.Block]:
    if not any(record.split.values()) and not record.task:
        return []
    labels = {**(record.task.get("labels") or {}), **{name: name for name in record.task.get("regions") or {}}}
    facts = {
        "Task": str(record.task.get("name", "unknown")),
        "Folder": str((record.config.get("data") or {}).get("root", "unknown")),
        "Channels": ", ".join(map(str, record.task.get("modalities") or ())),
        "Structures": ", ".join(str(name) for key, name in labels.items() if str(key) != "0"),
        "Cases": f"{len(record.split['training'])} trained, {len(record.split['validation'])} validated",
        "Patients": record.told.patients.get("summary", ""),
    }
    lists = [content.Code(f"Cases: {kind}", "\n".join(cases)) for kind, cases in record.split.items() if cases]
    return [content.NamedValues({name: value for name, value in facts.items() if value}), *lists]


def _list_commands(record: RunRecord, state: str) -> list[tuple[str, str]]:
    folder, config = quote(str(record.folder)), quote(str(record.folder / "config.yaml"))
    folds, own = quote(f"{record.folder}_folds"), name_components(record.components)
    board = ("See curves and slices in a browser:", f"tensorboard --logdir {quote(str(record.folder / 'tensorboard'))}")
    if state != "finished":
        return [
            # With -o: the config names the folder in which the run started, which may have been moved since.
            ("Continue the training:", f"volseg train {config} -o {folder}{own} --resume"),
            board,
            ("Write this page again:", f"volseg report {folder}"),
        ]
    return [
        ("Predict images:", f"volseg predict {folder} IMAGES... -o predictions{own}"),
        board,
        ("Measure which postprocessing helps:", f"volseg postprocess {folder}{own}"),
        ("Train every fold of this config:", f"volseg cross-validate {config} --output {folds}{own}"),
        ("Write this page again:", f"volseg report {folder}"),
    ]


def name_components(files: Sequence[str]) -> str:
    """Return the command-line options that load a run's own components."""
    return "".join(f" --components {quote(file)}" for file in files)


def _join(*values: object) -> str:
    return ", ".join(str(value) for value in values if value not in (None, ""))
