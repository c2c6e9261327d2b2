"""Read the files of a run folder for a report, and state what is missing.

A missing or damaged file does not prevent a report: reports are needed most after a failure.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from volseg.config.yaml_values import parse_yaml
from volseg.errors import ConfigError, DataError
from volseg.monitoring import run_files

TOLD = "told.json"
"""File of a training for information that no other file contains: cases left out, remarks, published results."""

OVERLAYS = Path("validation", "overlays")
"""Pictures of the best and the worst cases."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportedCase:
    """Metrics of one case."""

    name: str
    metrics: Mapping[str, Mapping[str, float]]
    """Values by label and metric; infinite if only one label map has the label, NaN if neither has it."""

    @property
    def dice(self) -> float:
        """Mean Dice over the labels that the case has."""
        return mean(of.get("Dice", math.nan) for key, of in self.metrics.items() if key != "0")


@dataclass(frozen=True, kw_only=True)
class Scores:
    """A ``summary.json``."""

    labels: Mapping[str, str]
    """Names of the labels by key, without the background."""
    cases: Sequence[ReportedCase]
    dice: float
    """Mean over the labels of the means over the cases."""
    summary: Mapping[str, Any]

    def of(self, part: str, key: str, metric: str) -> float:
        """Return a value of a label, such as ``mean`` or ``median``; NaN if the file has none.

        A null median is infinite if distances are infinite: JSON has no infinite number.
        """
        value = self.summary.get(part, {}).get(key, {}).get(metric)
        if value is None and part == "median" and self.of("undefined", key, metric) > 0:
            return math.inf
        return read_number(value)

    def interval(self, key: str, metric: str) -> tuple[float, float] | None:
        """Return the confidence interval of a mean over at least `FEWEST` cases, if the file has one."""
        if sum(math.isfinite(case.metrics[key].get(metric, math.nan)) for case in self.cases) < FEWEST:
            return None
        found = self.summary.get("intervals", {}).get("mean", {}).get(key, {}).get(metric)
        return None if not found or None in found else (float(found[0]), float(found[1]))

    @property
    def metrics(self) -> list[str]:
        """Names of the measured metrics, without counts."""
        return [name for name in SHOWN if any(name in of for case in self.cases for of in case.metrics.values())]


FEWEST = 10
"""Minimum number of cases for an interval: resamples of fewer cases repeat the same means."""

SHOWN = ("Dice", "NSD", "HD95", "ASSD", "lesion_F1", "volume_diff_ml")
DISTANCES = ("HD", "HD95", "ASSD")


@dataclass(frozen=True, kw_only=True)
class Told:
    """A ``told.json``."""

    problems: Sequence[str] = ()
    remarks: Sequence[str] = ()
    published: Sequence[Mapping[str, Any]] = ()
    """Result of `volseg.evaluation.scoring.published_results`."""
    memory: str | None = None
    replanned: str | None = None
    patients: Mapping[str, str] = field(default_factory=dict)
    """Texts ``summary`` and ``warning``, which may be empty."""


MAPPING = TypeAdapter(dict[str, Any])
_TOLD = TypeAdapter(Told)
_COMPONENTS = TypeAdapter(list[dict[str, Any]])
_SPLIT = TypeAdapter(list[dict[str, list[str]]])


@dataclass(kw_only=True)
class RunRecord:
    """Files of a run."""

    folder: Path
    config: Mapping[str, Any]
    config_text: str
    environment: Mapping[str, Any]
    task: Mapping[str, Any]
    split: Mapping[str, Sequence[str]]
    history: Sequence[run_files.EpochLine]
    parts: Sequence[run_files.RunPart]
    status: run_files.RunStatus | None
    memory: Mapping[str, Any] | None
    replanned: Mapping[str, Any] | None
    told: Told
    scores: Scores | None
    overlays: Mapping[str, Path]
    components: Sequence[str] = ()
    """Python files with the user's components, which each command needs again."""
    missing: list[str] = field(default_factory=list)
    """Sentences about missing parts of the report, with the reason."""


def read_run(folder: str | Path) -> RunRecord:
    """Read a run folder.

    Raises
    ------
    ConfigError
        The folder is not a run folder.
    """
    folder = Path(folder)
    if not (folder / "config.yaml").is_file():
        raise ConfigError(
            f"{folder} is not a run folder: it has no config.yaml; name a folder that `volseg train` wrote, or a fold "
            "of `volseg cross-validate`"
        )
    missing: list[str] = []
    text = (folder / "config.yaml").read_text(encoding="utf-8", errors="replace")
    config = _read_config(text, missing)
    task = read_json(folder / "task.json", missing, "the names of the labels")
    try:
        history: Sequence[run_files.EpochLine] = run_files.read_history(folder / run_files.HISTORY)
    except (DataError, OSError) as fault:
        missing.append(f"{fault}.")
        history = ()
    if len(history) < 2:
        missing.append(f"No curves: {run_files.HISTORY} has only {len(history)} epoch(s).")
    parts = run_files.read_times(folder / run_files.TIMES)
    if not parts:
        missing.append(f"No time budget: {_find_reason(folder / run_files.TIMES)}.")
    status = run_files.read_status(folder / run_files.STATUS)
    if status is None:
        missing.append(f"No state: {_find_reason(folder / run_files.STATUS)}.")
    scores = read_scores(folder / "validation" / "summary.json", task, missing)
    overlays = {file.stem: file for file in sorted((folder / OVERLAYS).glob("*.png"))}
    if scores is not None and not overlays:
        missing.append(f"No pictures of cases: {OVERLAYS.as_posix()} is missing; a training writes it at its end.")
    return RunRecord(
        folder=folder,
        config=config,
        config_text=text,
        environment=read_json(folder / "environment.json", missing, "the machine and the versions") or {},
        task=task or {},
        split=_read_split(folder / "split.json", missing),
        history=history,
        parts=parts,
        status=status,
        memory=read_json(folder / "memory.json", missing, "the memory of the GPUs", optional=True),
        replanned=read_json(folder / "replanned.json", missing, "the changed settings", optional=True),
        told=read_json(folder / TOLD, missing, "cases left out and published results", kind=_TOLD, optional=True)
        or Told(),
        scores=scores,
        overlays=overlays,
        components=list_component_files(folder, missing),
        missing=missing,
    )


def read_json(
    file: Path, missing: list[str], what: str, *, kind: TypeAdapter[Any] = MAPPING, optional: bool = False
) -> Any:
    """Return the content of a JSON file; None if it is absent or damaged.

    Parameters
    ----------
    file : Path
        Path of the file.
    missing : list of str
        Receives a sentence if the file is damaged, or absent and not ``optional``.
    what : str
        Part that the report then lacks.
    kind : TypeAdapter
        Type of the content.
    optional : bool
        Whether only some trainings write the file.
    """
    try:
        return kind.validate_json(file.read_bytes())
    except FileNotFoundError:
        if not optional:
            missing.append(f"{file.name} is missing: the report lacks {what}.")
    except ValidationError as fault:
        first = fault.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        missing.append(
            f"{file.name} cannot be read ({place}{': ' * bool(place)}{first['msg']}): the report lacks {what}."
        )
    except OSError as fault:
        missing.append(f"{file.name} cannot be read ({fault}): the report lacks {what}.")
    return None


def read_scores(file: Path, task: Mapping[str, Any] | None, missing: list[str] | None = None) -> Scores | None:
    """Return the scores of a ``summary.json``; None if they cannot be read."""
    missing = [] if missing is None else missing
    content = read_json(file, missing, "the scores")
    if content is None:
        return None
    try:
        named = content.get("labels") or {**(task or {}).get("labels", {}), **_list_regions(task)}
        labels = {key: str(named.get(key, f"label {key}")) for key in content["mean"] if key != "0"}
        return Scores(
            labels=labels,
            cases=[_read_case(case, number) for number, case in enumerate(content["metric_per_case"], start=1)],
            dice=read_number(content["foreground_mean"].get("Dice")),
            summary=content,
        )
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as fault:
        missing.append(f"No scores: {file} is not a summary that volseg wrote ({fault!r}).")
        return None


def _find_reason(file: Path) -> str:
    """Return why a file that trainings rewrite continually could not be read."""
    if file.exists():
        return f"{file.name} is damaged: its content differs from what volseg writes"
    return f"{file.name} is missing"


def mean(values: Any) -> float:
    """Return the mean of the finite values; NaN if there are none."""
    known = [value for value in values if math.isfinite(value)]
    return math.fsum(known) / len(known) if known else math.nan


def _read_case(case: Mapping[str, Any], number: int) -> ReportedCase:
    file = case.get("prediction_file") or case.get("reference_file") or f"case {number}"
    name = Path(file).name
    for suffix in (".gz", ".nii"):
        name = name.removesuffix(suffix)
    return ReportedCase(name=name, metrics={key: _read_metrics(of) for key, of in case["metrics"].items()})


def _read_metrics(of: Mapping[str, Any]) -> dict[str, float]:
    """Return a label's metrics; a null distance is infinite if only one of the two label maps has the label."""
    in_one = (of.get("n_pred") == 0) != (of.get("n_ref") == 0)
    return {
        name: math.inf if value is None and in_one and name in DISTANCES else read_number(value)
        for name, value in of.items()
    }


def read_number(value: Any) -> float:
    """Return a number of a file; NaN for null."""
    return math.nan if value is None else float(value)


def _list_regions(task: Mapping[str, Any] | None) -> dict[str, str]:
    regions = (task or {}).get("regions") or {}
    return {str(tuple(values)): name for name, values in regions.items()}


def _read_config(text: str, missing: list[str]) -> Mapping[str, Any]:
    try:
        config = parse_yaml(text, "config.yaml")
        if not isinstance(config, dict):
            raise ConfigError(f"it contains a {type(config).__name__} instead of a mapping")
    except ConfigError as fault:
        missing.append(f"config.yaml cannot be read ({str(fault).partition(chr(10))[0]}).")
        return {}
    return config


def list_component_files(folder: Path, missing: list[str]) -> list[str]:
    """Return the Python files that define a run's own components; see `read_json` for ``missing``."""
    file, what = folder / "components.json", "the run's own components"
    content = read_json(file, missing, what, kind=_COMPONENTS, optional=True) or ()
    sources = [one.get("from") for one in content]
    files = [source.get("file") for source in sources if isinstance(source, dict)]
    return list(dict.fromkeys(file for file in files if isinstance(file, str)))


def _read_split(file: Path, missing: list[str]) -> dict[str, Sequence[str]]:
    content = read_json(file, missing, "the cases for training and validation", kind=_SPLIT)
    first = content[0] if content else {}
    return {kind: first.get(key, ()) for kind, key in (("training", "train"), ("validation", "val"))}
