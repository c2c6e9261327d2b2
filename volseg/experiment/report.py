"""Collect the results of a training, as text and as values for its report (`volseg.reporting`)."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
from PIL import Image

from volseg.checkpointing.folder import RunFolder
from volseg.checkpointing.state import EpochRecord
from volseg.commands import spell
from volseg.config.schema import ExperimentConfig
from volseg.data.cases import Case, Task, list_values
from volseg.data.checks.kinds import Problem, Remark
from volseg.data.checks.reading import read_case, summarise_remarks
from volseg.data.readers import read_volume
from volseg.data.threads import map_in_threads
from volseg.evaluation.scoring import published_results
from volseg.evaluation.summary import Summary, read_structure
from volseg.experiment.cases import PatientReport
from volseg.experiment.placement.placed_network import build_plain_network
from volseg.files import replacing
from volseg.formatting import format_duration, format_table
from volseg.monitoring.pictures import draw_example
from volseg.monitoring.run_files import read_times
from volseg.parallel.state.random import own_random_numbers
from volseg.reporting import NAME, write_brief, write_report
from volseg.reporting.reading import OVERLAYS, TOLD, list_component_files, read_scores
from volseg.reporting.run import name_components
from volseg.reporting.sections import choose_extremes
from volseg.workflow.checks import StopRequested
from volseg.workflow.validation import Example, Validated, make_example

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Results of a training."""

    folder: RunFolder
    task: Task
    history: Sequence[EpochRecord]
    validated: Validated | None
    """Scores of the last epoch's weights, with all settings of ``inference``; None without validation cases."""
    problems: Sequence[Problem]
    """Problems of the cases that were left out."""
    seconds: float
    """Duration from the start of `train` to the last prediction."""
    remarks: Sequence[Remark] = ()
    """Remarks on cases to check."""
    patients: PatientReport = field(default_factory=PatientReport)
    """Number of patients, and whether a patient both trains and validates."""
    memory: str | None = None
    """GPU memory of the first steps, and its estimate; None without GPUs."""
    replanned: str | None = None
    """Out-of-memory failure, and the settings of the training since then."""


def list_findings(
    task: Task, problems: Sequence[Problem], remarks: Sequence[Remark], patients: PatientReport
) -> dict[str, Any]:
    """Return the findings that are in no other file of the run folder, as plain values."""
    return {
        "problems": [str(problem) for problem in problems],
        "remarks": summarise_remarks(remarks),
        "published": published_results(task),
        "patients": asdict(patients),
    }


def write_outcome(outcome: Outcome, cases: Sequence[Case], channel: int) -> None:
    """Write the report of a finished training: findings, pictures of the best and the worst cases, `report.md`.

    Parameters
    ----------
    outcome : Outcome
        Results of the training.
    cases : sequence of Case
        The cases that were validated; see `draw_overlays`.
    channel : int
        Channel of the images that the pictures show.
    """
    folder = outcome.folder
    findings = list_findings(outcome.task, outcome.problems, outcome.remarks, outcome.patients)
    folder.write_json(TOLD, {**findings, "memory": outcome.memory, "replanned": outcome.replanned})
    if outcome.validated is not None:
        attempt("no pictures of cases were drawn", lambda: draw_overlays(folder, outcome.task, cases, channel=channel))
    attempt(
        "report.md was not written", lambda: folder.write_text("report.md", write_brief(folder.path, state="finished"))
    )


def write_page(folder: RunFolder, kind: type[BaseException] | None) -> None:
    """Write the page about a run that ended with an exception of a ``kind``, or without an exception."""
    stopped = kind is not None and issubclass(kind, KeyboardInterrupt | SystemExit | StopRequested)
    state = "finished" if kind is None else "interrupted" if stopped else "failed"
    again = f"{NAME} was not written; try `volseg report {quote(str(folder.path))}`"
    attempt(again, lambda: write_report(folder.path, state=state))


def attempt(otherwise: str, write: Callable[[], object]) -> None:
    """Write an optional file, or log the error: it must not fail a finished training."""
    try:
        write()
    except Exception as fault:  # any error: the weights are saved, and the caller has them
        logger.warning("%s: %s: %s", otherwise, type(fault).__name__, fault)


def format_outcome(outcome: Outcome) -> str:
    """Return the final message of a training: Dice, folder, and the next commands."""
    folder = outcome.folder.path
    own = name_components(list_component_files(folder, []))
    found = dice_table(outcome.validated.summary, outcome.task) if outcome.validated else "(no validation cases)"
    seconds = [part.seconds for part in read_times(outcome.folder.times_file)] or [outcome.seconds]
    resumed = f" in {len(seconds)} parts" if len(seconds) > 1 else ""
    return f"""
{found}

The run is in {folder} ({format_duration(sum(seconds))}{resumed}); report: {outcome.folder.report_page} and report.md

Next:
  {spell(f"tensorboard --logdir {quote(str(outcome.folder.tensorboard))}")}
  {spell(f"volseg predict {quote(str(folder))} IMAGES... -o predictions{own}")}"""


def dice_table(summary: Summary, task: Task) -> str:
    """Return mean Dice per label and over the foreground as a Markdown table."""
    rows = [(task.structures[read_structure(label)], mean["Dice"]) for label, mean in summary["mean"].items()]
    rows.append(("mean", summary["foreground_mean"]["Dice"]))
    return format_table([("label", "Dice"), *((name, f"{dice:.4f}") for name, dice in rows)])


def describe_network(config: ExperimentConfig, task: Task) -> str:
    """Return the modules of a config's network, as torch prints them, and its number of parameters."""
    with own_random_numbers([]):
        network = build_plain_network(config, task)
    total = sum(parameter.numel() for parameter in network.parameters())
    return f"{config.network.name}: {total:,} parameters\n\n```text\n{network}\n```"


# Pictures of the best and the worst validated cases, drawn while the data are available: reports may come later.


MIN_SIDE = 384
"""Shortest side of a picture in pixels: ten pictures should make a page small enough to send."""

THREADS = 2
"""Drawing threads; each holds a case in memory."""


def draw_overlays(folder: RunFolder, task: Task, cases: Sequence[Case], *, channel: int = 0) -> list[Path]:
    """Draw the cases with the lowest and the highest Dice of a run's validation; return the files.

    Parameters
    ----------
    folder : RunFolder
        Folder with ``validation/summary.json`` and its label maps.
    task : Task
        Task of the run.
    cases : sequence of Case
        Validated cases: prepared cases of this process, or cases with the paths of image and label, which are read
        again. If an id occurs twice, the last case is used.
    channel : int
        Channel of the images to draw.
    """
    target = folder.path / OVERLAYS
    for old in target.glob("*.png"):
        old.unlink()
    scores = read_scores(folder.validation / "summary.json", None)
    if scores is None:
        return []
    by_name = {case["case"]: case for case in cases}
    worst, best = choose_extremes(scores.cases)
    draw = partial(_draw, folder, task, target, channel)
    # In two threads: compressing a picture, and most of drawing it, releases Python's lock.
    drawn = map_in_threads(draw, [by_name[judged.name] for judged in (*worst, *best)], THREADS)
    return [file for file in drawn if file is not None]


def _draw(folder: RunFolder, task: Task, target: Path, channel: int, case: Case) -> Path | None:
    """Draw one case; return the file, or None if its volumes can no longer be read."""
    example = _read_example(folder, task, case)
    if example is None:
        return None
    picture = draw_example(example, channel=channel, min_side=MIN_SIDE).permute(1, 2, 0).numpy()
    file = target / f"{case['case']}.png"
    with replacing(file) as partly:
        # Not optimize=True, which took ten times as long, 4 s for ten pictures, and saved an eighth of the bytes.
        Image.fromarray(np.ascontiguousarray(picture)).save(partly, "PNG")
    return file


def _read_example(folder: RunFolder, task: Task, case: Case) -> Example | None:
    """Return image, label and prediction of a case, or log and return None if they can no longer be read."""
    if "reference" not in case:
        checked = read_case(case, task, digests=False)
        if checked.problems:
            logger.warning("no picture of %s: %s", case["case"], checked.problems[0])
            return None
        case = {**checked.case, "reference": checked.case["label"]}
    prediction = read_volume(folder.validation / f"{case['case']}.nii.gz")
    known = {0, *task.class_values, *(value for key in task.structures for value in list_values(key))}
    return make_example(case, prediction, known, task.ignore)
