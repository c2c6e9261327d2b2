"""What a training came to, on one page of Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass
from shlex import quote

from volseg.commands import spell
from volseg.config.schema import ExperimentConfig
from volseg.data.cases import Task
from volseg.data.checks import Problem, Remark, summarise_remarks
from volseg.evaluation.summary import Summary, read_structure
from volseg.evaluation.tables import explain_scores, scores_table
from volseg.experiment.run_folder import RunFolder
from volseg.experiment.scoring import build_scoring
from volseg.workflow.records import EpochRecord
from volseg.workflow.validation import Validated

__all__ = ["Outcome", "closing_words", "dice_table", "training_report"]

NUM_WORST = 5


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
    memory: str | None = None
    """What the first steps took of the GPUs, and what was forecast; None where there are none."""
    replanned: str | None = None
    """What ran out of memory, and how the training went on."""


def training_report(outcome: Outcome, config: ExperimentConfig) -> str:
    """Return the report of a training."""
    last = outcome.history[-1] if outcome.history else None
    lines = [
        f"# {config.name}",
        "",
        f"{config.network.name} on {outcome.task.name}, {len(outcome.history)} epochs of "
        f"{config.training.iterations} batches, {outcome.seconds:.0f} s in all.",
        "",
    ]
    if last is not None:
        waited = sum(record.seconds_waited for record in outcome.history)
        spent = sum(record.seconds for record in outcome.history)
        lines += [
            f"Last loss {last.losses['loss']:.4f}; {100 * waited / max(spent, 1e-9):.0f} % of the training time "
            "was spent waiting for batches.",
            "",
        ]
    if outcome.memory is not None:
        lines += [f"{outcome.memory[0].upper()}{outcome.memory[1:]}.", ""]
    if outcome.replanned is not None:
        lines += ["## Out of memory", "", outcome.replanned, ""]
    if outcome.validated is not None:
        summary = outcome.validated.summary
        names = {str(key): name for key, name in outcome.task.structures.items()}
        lines += ["## Validation", "", dice_table(summary, outcome.task), "", *_list_worst(summary), ""]
        lines += [
            "## Scores",
            "",
            scores_table(summary, names),
            "",
            *explain_scores(build_scoring(config, outcome.task)),
        ]
        lines += [""]
    if outcome.problems:
        lines += ["## Cases left out", "", *(f"- {problem}" for problem in outcome.problems), ""]
    if outcome.remarks:
        lines += ["## Cases to look at", "", *(f"- {line}" for line in summarise_remarks(outcome.remarks)), ""]
    return "\n".join(lines)


def closing_words(outcome: Outcome) -> str:
    """Return what a training ends by saying: Dice, folder, and the commands to type next."""
    folder = outcome.folder.path
    found = dice_table(outcome.validated.summary, outcome.task) if outcome.validated else "(no validation cases)"
    return f"""
{found}

The run is in {folder} ({outcome.seconds:.0f} s); report: {folder / "report.md"}

Next:
  {spell(f"tensorboard --logdir {quote(str(outcome.folder.tensorboard))}")}
  {spell(f"volseg predict {quote(str(folder))} IMAGES... -o predictions")}"""


def dice_table(summary: Summary, task: Task) -> str:
    """Return mean Dice per label and over the foreground as a Markdown table."""
    rows = [(task.structures[read_structure(label)], mean["Dice"]) for label, mean in summary["mean"].items()]
    rows.append(("mean", summary["foreground_mean"]["Dice"]))
    width = max(len("label"), *(len(name) for name, _ in rows))
    body = [f"| {name:<{width}} | {dice:.4f} |" for name, dice in rows]
    return "\n".join([f"| {'label':<{width}} | Dice   |", f"| {'-' * width} | ------ |", *body])


def _list_worst(summary: Summary) -> list[str]:
    """Return the cases with the lowest mean Dice, which are the first to look at."""

    def dice(case: dict) -> float:
        values = [metrics["Dice"] for metrics in case["metrics"].values() if metrics["Dice"] == metrics["Dice"]]
        return sum(values) / len(values) if values else 1.0

    worst = sorted(summary["metric_per_case"], key=dice)[:NUM_WORST]
    return ["Lowest:", *(f"- {case['reference_file']}: {dice(case):.4f}" for case in worst)]
