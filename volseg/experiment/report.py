"""What a training came to, in words, and in values for its report (`volseg.reporting`)."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from shlex import quote
from typing import Any

from volseg.checkpointing.folder import RunFolder
from volseg.checkpointing.state import EpochRecord
from volseg.commands import spell
from volseg.data.cases import Case, Task
from volseg.data.checks import Problem, Remark, summarise_remarks
from volseg.evaluation.published import published_results
from volseg.evaluation.summary import Summary, read_structure
from volseg.experiment.overlays import draw_overlays
from volseg.experiment.patients import PatientWords
from volseg.reporting import NAME, write_brief, write_report
from volseg.reporting.reading import TOLD, list_component_files
from volseg.reporting.run import name_components
from volseg.workflow.interrupts import StopRequested
from volseg.workflow.validation import Validated

__all__ = [
    "Outcome",
    "attempt",
    "closing_words",
    "dice_table",
    "tell_findings",
    "write_outcome",
    "write_page",
]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a training left."""

    folder: RunFolder
    task: Task
    history: Sequence[EpochRecord]
    validated: Validated | None
    """Of the last epoch's weights, with everything that ``inference`` asks for; None without validation cases."""
    problems: Sequence[Problem]
    """Of the cases that were left out."""
    seconds: float
    """From the first line of `train` to the last prediction."""
    iterations: int
    """Batches per epoch."""
    remarks: Sequence[Remark] = ()
    """On cases that should be looked at."""
    patients: PatientWords = field(default_factory=PatientWords)
    """How many there are, and whether one trains and validates."""
    memory: str | None = None
    """What the first steps took of the GPUs, and what was forecast; None where there are none."""
    replanned: str | None = None
    """What ran out of memory, and how the training went on."""


def tell_findings(
    task: Task, problems: Sequence[Problem], remarks: Sequence[Remark], patients: PatientWords
) -> dict[str, Any]:
    """Return what a report says that stands in no other file of the run folder, as plain values."""
    return {
        "problems": [str(problem) for problem in problems],
        "remarks": summarise_remarks(remarks),
        "published": [asdict(row) for row in published_results(task)],
        "patients": asdict(patients),
    }


def write_outcome(outcome: Outcome, cases: Sequence[Case], channel: int) -> None:
    """Write the report of a training that has ended: findings, pictures of the best and the worst cases, `report.md`.

    Parameters
    ----------
    outcome : Outcome
        Of the training.
    cases : sequence of Case
        The cases that were validated; see `draw_overlays`.
    channel : int
        Channel of the images that the pictures show.
    """
    folder = outcome.folder
    findings = tell_findings(outcome.task, outcome.problems, outcome.remarks, outcome.patients)
    folder.write_json(TOLD, {**findings, "memory": outcome.memory, "replanned": outcome.replanned})
    if outcome.validated is not None:
        attempt("no pictures of cases were drawn", lambda: draw_overlays(folder, outcome.task, cases, channel=channel))
    attempt(
        "report.md was not written",
        lambda: folder.write_text("report.md", write_brief(folder.path, state="finished")),
    )


def write_page(folder: RunFolder, kind: type[BaseException] | None) -> None:
    """Write the page about a run that ended by an exception of a ``kind``, or well."""
    stopped = kind is not None and issubclass(kind, KeyboardInterrupt | SystemExit | StopRequested)
    state = "finished" if kind is None else "interrupted" if stopped else "failed"
    again = f"{NAME} was not written, `volseg report {quote(str(folder.path))}` tries again"
    attempt(again, lambda: write_report(folder.path, state=state))


def attempt(otherwise: str, write: Callable[[], object]) -> None:
    """Write something for people to look at, or log why not: it is not worth a training that has ended."""
    try:
        write()
    except Exception as fault:  # whatever it is: the weights are saved, and the caller has them
        logger.warning("%s: %s: %s", otherwise, type(fault).__name__, fault)


def closing_words(outcome: Outcome) -> str:
    """Return what a training ends by saying: Dice, folder, and the commands to type next."""
    folder = outcome.folder.path
    own = name_components(list_component_files(folder, []))
    found = dice_table(outcome.validated.summary, outcome.task) if outcome.validated else "(no validation cases)"
    return f"""
{found}

The run is in {folder} ({outcome.seconds:.0f} s); report: {outcome.folder.report_page} and report.md

Next:
  {spell(f"tensorboard --logdir {quote(str(outcome.folder.tensorboard))}")}
  {spell(f"volseg predict {quote(str(folder))} IMAGES... -o predictions{own}")}"""


def dice_table(summary: Summary, task: Task) -> str:
    """Return mean Dice per label and over the foreground as a Markdown table."""
    rows = [(task.structures[read_structure(label)], mean["Dice"]) for label, mean in summary["mean"].items()]
    rows.append(("mean", summary["foreground_mean"]["Dice"]))
    width = max(len("label"), *(len(name) for name, _ in rows))
    body = [f"| {name:<{width}} | {dice:.4f} |" for name, dice in rows]
    return "\n".join([f"| {'label':<{width}} | Dice   |", f"| {'-' * width} | ------ |", *body])
