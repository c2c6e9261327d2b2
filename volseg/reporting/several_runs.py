"""Describe several runs in a report: the folds and all cases of a cross-validation, and the trials of a search."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import join, quote
from typing import Any

from volseg.config.yaml_values import dump_yaml
from volseg.formatting import format_duration, format_value
from volseg.monitoring.run_files import list_numbered
from volseg.reporting import content
from volseg.reporting.reading import FEWEST, RunRecord, Scores, read_json, read_number, read_run, read_scores
from volseg.reporting.run import describe_environment, describe_run_state, name_components, show_cases
from volseg.reporting.sections import describe_scores, describe_time, tabulate_published

RESULTS = "cross_validation.json"

INTERVALS = (
    "Intervals are bootstrap intervals of the mean over the cases (Efron 1979, doi:10.1214/aos/1176344552); they leave "
    "out the variation between trainings."
)


@dataclass(frozen=True, kw_only=True)
class CrossedRecord:
    """Files of a cross-validation."""

    folder: Path
    results: Mapping[str, Any]
    """Content of ``cross_validation.json``; empty before a fold is finished."""
    folds: Mapping[int, RunRecord]
    scores: Scores | None
    missing: list[str]


def list_fold_folders(folder: Path) -> dict[int, Path]:
    """Return the run folders of the started folds."""
    return {number: path for number, path in list_numbered(folder).items() if (path / "config.yaml").is_file()}


def read_crossed(folder: str | Path) -> CrossedRecord:
    """Read the folder of a cross-validation."""
    folder = Path(folder)
    missing: list[str] = []
    results = read_json(folder / RESULTS, missing, "the means over the folds")
    folds = {number: read_run(path) for number, path in list_fold_folders(folder).items()}
    task = next((record.task for record in folds.values() if record.task), {})
    scores = read_scores(folder / "summary.json", task, missing)
    missing += [f"Fold {number}: {told}" for number, record in folds.items() for told in record.missing]
    return CrossedRecord(folder=folder, results=results or {}, folds=folds, scores=scores, missing=missing)


def describe_crossed(record: CrossedRecord) -> content.ReportContent:
    """Return the report of a cross-validation."""
    compose = content.Composer(record.missing)
    first = next(iter(record.folds.values()), None)
    config = record.results.get("config") or (first.config if first else {})
    whole = compose.attempt("the number of folds", lambda: _count_folds(record, config), None)
    sections = [
        compose.section("Look at this", lambda: _list_warnings(record, whole), warns=True, brief=True),
        compose.section("Best and worst cases", lambda: _show_cases(record)),
        compose.section("Folds", lambda: _tabulate_folds(record), brief=True),
        *describe_scores(record.scores, compose),
        compose.section("Published results", lambda: _compare(record), brief=True),
        compose.section("Curves", lambda: _draw_curves(record)),
        compose.section("Time", lambda: _describe_time(record), brief=True),
        compose.section("Config", lambda: _tell_config(config, first)),
        compose.section(
            "Environment",
            lambda: describe_environment(record.results.get("environment") or (first.environment if first else {})),
        ),
    ]
    subtitle = compose.attempt("the subtitle", lambda: _name_training(record, config, first), "Cross-validation")
    state = compose.attempt("the number of finished folds", lambda: _find_state(record, whole), "state unknown")
    headline = compose.attempt("the headline", lambda: _make_headline(record, whole), list[tuple[str, str]]())
    name = compose.attempt("the name", lambda: config.get("name"), None)
    return compose.finish(
        record.folder,
        title=str(record.folder.name if name is None else name),
        subtitle=subtitle,
        state=state,
        headline=headline,
        sections=sections,
        commands=_list_commands(record),
    )


def _name_training(record: CrossedRecord, config: Mapping[str, Any], first: RunRecord | None) -> str:
    network = (config.get("network") or {}).get("name", "a network")
    task = record.results.get("task") or (first.task.get("name") if first else None) or "a task"
    return f"Cross-validation of {network} on {task}"


def _count_folds(record: CrossedRecord, config: Mapping[str, Any]) -> int | None:
    whole = record.results.get("num_folds") or (config.get("split") or {}).get("num_folds")
    return None if whole is None else int(whole)


def _find_state(record: CrossedRecord, whole: int | None) -> str:
    done = len(record.results.get("folds") or ())
    return "finished" if whole and done == whole else f"{done} of {whole or 'unknown'} folds"


def _list_warnings(record: CrossedRecord, whole: int | None) -> list[content.Block]:
    done = [str(fold["fold"]) for fold in record.results.get("folds") or ()]
    warnings = [str(told) for told in (record.results.get("failures") or {}).values()]
    if whole and 0 < len(done) < whole:
        warnings.insert(0, f"Incomplete: only fold(s) {', '.join(done)} of {whole} are finished.")
    cut = {number: fold.told.patients.get("warning") for number, fold in record.folds.items()}
    warnings += [f"Fold {number}: {told}." for number, told in cut.items() if told]
    return [content.Items(warnings)] if warnings else []


def _make_headline(record: CrossedRecord, whole: int | None) -> list[tuple[str, str]]:
    headline = []
    labels = record.results.get("labels") or {}
    if "mean" in labels:
        headline.append(("mean Dice over the cases", _format(labels["mean"].get("mean"))))
        others = [(name, told) for name, told in labels.items() if name != "mean"]
        if 1 < len(others) <= 4:
            headline += [(f"Dice {name}", _format(told.get("mean"))) for name, told in others]
        headline.append(("cases", str(record.results.get("num_cases"))))
    headline.append(("folds", f"{len(record.results.get('folds') or ())} of {whole or 'unknown'}"))
    training = (record.results.get("config") or {}).get("training") or {}
    if "epochs" in training:
        headline.append(("epochs per fold", str(training["epochs"])))
    seconds = sum(part.seconds for fold in record.folds.values() for part in fold.parts)
    return [*headline, *([("time of all folds", format_duration(seconds))] if seconds else [])]


def _tabulate_folds(record: CrossedRecord) -> list[content.Block]:
    """Return Dice by fold and label, and the state of each fold."""
    blocks: list[content.Block] = []
    finished = [str(fold["fold"]) for fold in record.results.get("folds") or ()]
    if labels := record.results.get("labels"):
        has_intervals = int(record.results.get("num_cases") or 0) >= FEWEST
        rows = [
            [
                name,
                *(_format(dice) for dice in told["of_folds"]),
                _format(told.get("mean_of_folds")),
                _format(told.get("mean")),
                _format(told.get("std")),
                *([f"{_format(told.get('low'))} to {_format(told.get('high'))}"] if has_intervals else []),
            ]
            for name, told in labels.items()
        ]
        header = ["label", *(f"fold {number}" for number in finished), "mean of folds", "mean of cases", "SD of cases"]
        header += ["95 % interval"] if has_intervals else []
        blocks.append(content.TextTable(caption="Dice", header=header, rows=rows, bold=frozenset([len(rows) - 1])))
        lines = ["Each case was predicted by the network that was not trained on it, and scored on its original grid."]
        lines += [INTERVALS] if has_intervals else []
        blocks.append(content.Text(" ".join(lines)))
    rows = []
    for number, fold in record.folds.items():
        seconds = sum(part.seconds for part in fold.parts)
        rows.append(
            [
                f"fold {number}",
                describe_run_state(fold),
                str(len(fold.split["training"])),
                str(len(fold.split["validation"])),
                str(fold.history[-1].epoch) if fold.history else "-",
                format_duration(seconds) if seconds else "-",
            ]
        )
    header = ["fold", "state", "training cases", "validation cases", "epochs", "time"]
    summaries = dict.fromkeys(fold.told.patients.get("summary", "") for fold in record.folds.values())
    blocks += [content.Text(f"Patients: {summary}.") for summary in summaries if summary]
    return [*blocks, content.TextTable(caption="Folds", header=header, rows=rows)] if rows else blocks


def _compare(record: CrossedRecord) -> list[content.Block]:
    published, labels = record.results.get("published"), record.results.get("labels")
    if not published or not labels:
        return []
    names = [name for name in labels if name != "mean"]
    own = [read_number(labels[name].get("mean_of_folds")) for name in names]
    cases = int(record.results.get("num_cases") or 0)
    evaluation = f"{record.results.get('num_folds')}-fold cross-validation"
    overall = read_number(labels["mean"].get("mean_of_folds"))
    return tabulate_published(published, names, ("this run", evaluation, cases, own, overall))


def _draw_curves(record: CrossedRecord) -> list[content.Block]:
    charts = []
    for title, tag in (("Loss", "train/loss"), ("Dice", "val/dice_mean")):
        lines = []
        for number, fold in record.folds.items():
            held = [(line.epoch, line.scalars[tag]) for line in fold.history if tag in line.scalars]
            if held:
                xs, ys = zip(*held, strict=True)
                lines.append(content.Line(name=f"fold {number}", xs=xs, ys=ys, colour=number))
        charts.append(content.Chart(title=title, lines=lines))
    return content.select_charts(charts, "By epoch, counted from 1.")


def _show_cases(record: CrossedRecord) -> list[content.Block]:
    overlays = {case: file for fold in record.folds.values() for case, file in fold.overlays.items()}
    return [] if record.scores is None else show_cases(record.scores, overlays, record.folder)


def _describe_time(record: CrossedRecord) -> list[content.Block]:
    parts = [part for fold in record.folds.values() for part in fold.parts]
    return describe_time(parts, f"for {len(record.folds)} folds", "Time of all folds by activity")


def _tell_config(config: Mapping[str, Any], first: RunRecord | None) -> list[content.Block]:
    text = dump_yaml(dict(config)) if config else (first.config_text if first else "")
    return [content.Code("Config of the folds, every value", text)] if text else []


def _list_commands(record: CrossedRecord) -> list[tuple[str, str]]:
    folder = quote(str(record.folder))
    own = name_components(next((fold.components for fold in record.folds.values()), ()))
    return [
        ("Predict images with all folds:", f"volseg predict {folder} IMAGES... -o predictions{own}"),
        ("Measure which postprocessing helps:", f"volseg postprocess {folder}{own}"),
        ("See the curves of all folds in a browser:", f"tensorboard --logdir {folder}"),
        ("Write this page again:", f"volseg report {folder}"),
    ]


def _format(value: float | None) -> str:
    return format_value(read_number(value), "Dice")


SEARCH = "search.json"


@dataclass(frozen=True, kw_only=True)
class SearchRecord:
    """Files of a search."""

    folder: Path
    results: Mapping[str, Any]
    """Content of ``search.json``."""
    missing: list[str]

    @property
    def trials(self) -> Sequence[Mapping[str, Any]]:
        """Trials with their number, state, value, epochs, seconds, values of keys and error."""
        return self.results.get("trials") or ()

    @property
    def wanted(self) -> int:
        """Number of trials to run; at least the number of trials so far, as a later call may have asked for fewer."""
        return max(int(self.results.get("wanted") or 0), len(self.trials))

    @property
    def best(self) -> Mapping[str, Any] | None:
        """The finished trial with the best value."""
        sign = 1.0 if self.results.get("minimize") else -1.0
        finished = [trial for trial in self.trials if trial["state"] == "finished"]
        return min(finished, key=lambda trial: sign * trial["value"], default=None)


def read_search(folder: str | Path) -> SearchRecord:
    """Read the folder of a search."""
    missing: list[str] = []
    results = read_json(Path(folder) / SEARCH, missing, "the trials")
    return SearchRecord(folder=Path(folder), results=results or {}, missing=missing)


def describe_search(record: SearchRecord) -> content.ReportContent:
    """Return the report of a search."""
    compose, results = content.Composer(record.missing), record.results
    best = compose.attempt("the best trial", lambda: record.best, None)
    sections = [
        compose.section("Trials", lambda: _tabulate_trials(record, best), brief=True),
        compose.section("Failed trials", lambda: _list_failures(record), brief=True, warns=True),
        compose.section("Values", lambda: _draw_slices(record)),
        compose.section("Config", lambda: [content.Code("Config", dump_yaml(dict(results.get("config") or {})))]),
        compose.section("Environment", lambda: describe_environment(results.get("environment") or {})),
    ]
    states = [trial.get("state") for trial in record.trials]
    done = sum(state not in ("running", "interrupted") for state in states)
    return compose.finish(
        record.folder,
        title=str(results.get("name", record.folder.name)),
        subtitle=f"Search over {', '.join(results.get('space') or {})} on {results.get('task', 'a task')}",
        state="finished" if done == record.wanted else f"{done} of {record.wanted} trials",
        headline=compose.attempt("the headline", lambda: _head_search(record, best), list[tuple[str, str]]()),
        sections=sections,
        commands=compose.attempt("the next commands", lambda: _suggest_after(record, best), list[tuple[str, str]]()),
    )


def _head_search(record: SearchRecord, best: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    states = [str(trial["state"]) for trial in record.trials]
    headline = [(f"trials {state}", str(states.count(state))) for state in dict.fromkeys(states)]
    if best is None:
        return headline
    values = ", ".join(f"{key}={_format_choice(value)}" for key, value in best["values"].items())
    metric = str(record.results.get("metric"))
    return [(f"best {metric}", _format_choice(best["value"])), (f"values of trial {best['number']}", values), *headline]


def _tabulate_trials(record: SearchRecord, best: Mapping[str, Any] | None) -> list[content.Block]:
    keys = list(record.results.get("space") or ())
    rows = [
        [
            str(trial["number"]),
            str(trial["state"]),
            "-" if trial["value"] is None else _format_choice(trial["value"]),
            str(trial["epochs"] or "-"),
            format_duration(trial["seconds"]) if trial["seconds"] else "-",
            *(_format_choice(trial["values"].get(key, "-")) for key in keys),
        ]
        for trial in record.trials
    ]
    header = ["trial", "state", str(record.results.get("metric")), "epochs", "time", *keys]
    bold = frozenset(number for number, trial in enumerate(record.trials) if trial is best)
    return [content.TextTable(caption="Trials", header=header, rows=rows, sortable=True, bold=bold)] if rows else []


def _list_failures(record: SearchRecord) -> list[content.Block]:
    told = [f"Trial {trial['number']}: {trial['error']}" for trial in record.trials if trial["state"] == "failed"]
    return [content.Items(told)] if told else []


def _draw_slices(record: SearchRecord) -> list[content.Block]:
    """Return charts of the metric: over the trials in starting order, over each range, and for each choice."""
    finished = [trial for trial in record.trials if trial["state"] == "finished"]
    ys = [read_number(trial["value"]) for trial in finished]
    numbers = [float(trial["number"]) for trial in finished]
    charts: list[content.Chart | content.Boxes] = [_draw_slice("trial", numbers, ys, log=False)]
    for key, values in (record.results.get("space") or {}).items():
        chosen = [trial["values"][key] for trial in finished]
        if isinstance(values, dict):
            charts.append(_draw_slice(key, list(map(float, chosen)), ys, log=bool(values["log"])))
        else:
            named = list(zip(map(str, chosen), (f"trial {number:g}" for number in numbers), ys, strict=True))
            groups = [(choice, [(name, y) for one, name, y in named if one == choice]) for choice in values]
            charts.append(content.Boxes(title=key, groups=groups))
    return content.select_charts(charts, f"{record.results.get('metric')} of the finished trials.")


def _draw_slice(key: str, xs: Sequence[float], ys: Sequence[float], *, log: bool) -> content.Chart:
    line = content.Line(name="trials", xs=xs, ys=ys, dots=True)
    return content.Chart(title=key, lines=[line], over=key, log=log, counts=log or all(x == int(x) for x in xs))


def _suggest_after(record: SearchRecord, best: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    command = join(["volseg", *map(str, record.results.get("command") or ()), "--trials", str(2 * record.wanted)])
    commands = [("Run more trials:", command), ("Write this page again:", f"volseg report {quote(str(record.folder))}")]
    if best is None:
        return commands
    run = record.folder / f"trial_{best['number']}"
    folds = quote(f"{record.folder}_folds")
    return [
        ("Predict images with the best trial:", f"volseg predict {quote(str(run))} IMAGES... -o predictions"),
        ("Cross-validate the best trial:", f"volseg cross-validate {quote(f'{run}.yaml')} --output {folds}"),
        *commands,
    ]


def _format_choice(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
