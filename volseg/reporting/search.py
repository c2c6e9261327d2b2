"""Report a search: its trials, the best trial, and the dependence of the metric on each value."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import join, quote
from typing import Any

from volseg.config.yaml_values import dump_yaml
from volseg.formatting import format_duration
from volseg.reporting import content
from volseg.reporting.reading import read_json, read_number
from volseg.reporting.run import describe_environment

SEARCH = "search.json"


@dataclass(frozen=True, kw_only=True)
class SearchRecord:
    """Files of a search."""

    folder: Path
    results: Mapping[str, Any]
    """Of ``search.json``."""
    missing: list[str]

    @property
    def trials(self) -> Sequence[Mapping[str, Any]]:
        """Each with its number, state, value, epochs, seconds, values of keys and error."""
        return self.results.get("trials") or ()

    @property
    def wanted(self) -> int:
        """How many trials there are to be; a later call may have asked for fewer than there are."""
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
    """Return what is said of a search."""
    compose, results = content.Composer(record.missing), record.results
    best = compose.attempt("The best trial", lambda: record.best, None)
    sections = [
        compose.section("Trials", lambda: _tabulate(record, best), brief=True),
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
        headline=compose.attempt("The headline", lambda: _make_headline(record, best), list[tuple[str, str]]()),
        sections=sections,
        commands=compose.attempt("What is next", lambda: _list_commands(record, best), list[tuple[str, str]]()),
    )


def _make_headline(record: SearchRecord, best: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    states = [str(trial["state"]) for trial in record.trials]
    headline = [(f"trials {state}", str(states.count(state))) for state in dict.fromkeys(states)]
    if best is None:
        return headline
    values = ", ".join(f"{key}={_format(value)}" for key, value in best["values"].items())
    metric = str(record.results.get("metric"))
    return [(f"best {metric}", _format(best["value"])), (f"by trial {best['number']}", values), *headline]


def _tabulate(record: SearchRecord, best: Mapping[str, Any] | None) -> list[content.Block]:
    keys = list(record.results.get("space") or ())
    rows = [
        [
            str(trial["number"]),
            str(trial["state"]),
            "-" if trial["value"] is None else _format(trial["value"]),
            str(trial["epochs"] or "-"),
            format_duration(trial["seconds"]) if trial["seconds"] else "-",
            *(_format(trial["values"].get(key, "-")) for key in keys),
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
    """Return charts of the metric: over the trials in the order of their starts, over each range, by each choice."""
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


def _list_commands(record: SearchRecord, best: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    command = join(["volseg", *map(str, record.results.get("command") or ()), "--trials", str(2 * record.wanted)])
    commands = [("Try more values:", command), ("Write this page anew:", f"volseg report {quote(str(record.folder))}")]
    if best is None:
        return commands
    run = record.folder / f"trial_{best['number']}"
    folds = quote(f"{record.folder}_folds")
    return [
        ("Predict images by the best trial:", f"volseg predict {quote(str(run))} IMAGES... -o predictions"),
        ("Cross-validate its values:", f"volseg cross-validate {quote(f'{run}.yaml')} --output {folds}"),
        *commands,
    ]


def _format(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
