"""Train several runs of one config, each in its own folder: the folds of a cross-validation, the trials of a search.

Each process that trains is a plain ``volseg train`` that sees one GPU and knows nothing of the others. A failed run
does not affect the rest. Torch's launcher would not do: its processes are one job, which ends when one of them fails.

Only the folders of the runs record progress. So a cross-validation can be stopped at any time, its folds can be trained
on several machines, or one fold by `volseg train`.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from volseg.checkpointing.compatible import require_same_config, require_same_split
from volseg.checkpointing.file import LATEST, load_checkpoint
from volseg.checkpointing.folder import RunFolder
from volseg.checkpointing.state import EpochRecord, TrainingState
from volseg.commands import run_module
from volseg.config.loading import dump_config
from volseg.config.schema import ExperimentConfig
from volseg.data.cases import Split, Task
from volseg.data.readers import stem
from volseg.errors import CheckpointError, ConfigError, DataError
from volseg.evaluation.summary import Summary, read_summary
from volseg.experiment.cases import choose_split, list_given_splits
from volseg.experiment.own_components import components_arguments
from volseg.parallel.devices import is_launched
from volseg.parallel.processes.workers import Worker, WorkerPool, run_queue
from volseg.workflow.checks import catch_signals
from volseg.workflow.hooks import Patience

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, frozen=True, eq=False)
class PlannedRun:
    """A run to train or to resume."""

    name: str
    """Name in messages, such as ``fold 0``."""
    config: ExperimentConfig
    """Config with the folder of the run."""

    @property
    def folder(self) -> RunFolder:
        """The folder of the run."""
        return RunFolder(self.config.folder)


Run = TypeVar("Run", bound=PlannedRun)


def require_own_folder(config: ExperimentConfig, what: str, otherwise: str) -> None:
    """Raise if this process cannot drive several runs.

    Parameters
    ----------
    config : ExperimentConfig
        Its folder will contain the folders of the runs.
    what, otherwise : str
        Name of the work, and advice for a launched process, for messages.

    Raises
    ------
    ConfigError
        If a launcher started this process, or the folder has a single run.
    """
    if is_launched():
        raise ConfigError(f"a {what} starts its own processes (--gpus) and cannot run under torchrun; {otherwise}")
    if RunFolder(config.folder).exists:
        raise ConfigError(f"{config.folder} contains a single run; choose another folder for the {what} with --output")


def train_each(
    runs: Iterable[Run],
    gpus: Sequence[str | None],
    on_end: Callable[[Run, Worker], None],
    watch: Callable[[Run, Worker], None] | None = None,
) -> None:
    """Train runs, as many at a time as there are GPUs; resume started runs from their checkpoints.

    Ctrl-C and SIGTERM are passed on: each process stops after its batch with a checkpoint.

    Parameters
    ----------
    runs
        Runs in the order of their start; each is requested when a GPU is free.
    gpus
        See `choose_gpus`.
    on_end
        Called with a run and its worker after the worker has ended on its own, not after a signal.
    watch
        Called repeatedly with each run in training.
    """
    components_arguments()  # raises before any process starts
    with (
        catch_signals() as interruption,
        closing(run_queue(runs, gpus, _start, lambda: interruption.signal, watch)) as ended,
    ):
        for run, worker in ended:
            if worker.process.returncode == 0 or not interruption:
                on_end(run, worker)
    interruption.raise_as_signal()


def _start(pool: WorkerPool, run: PlannedRun, gpu: str | None) -> Worker:
    path = run.folder.path
    config_file = dump_config(run.config, path.with_name(f"{path.name}.yaml"))
    command = run_module("volseg", "train", str(config_file), *components_arguments())
    command += ["--resume"] if run.folder.exists else []
    log = path.with_name(f"{path.name}.log")
    worker = pool.start(run.name, command, log, gpu=gpu)
    logger.info("%s: training%s, log %s", run.name, "" if gpu is None else f" on GPU {gpu}", log)
    return worker


# Plan the folds of a cross-validation, and find the finished ones.


@dataclass(frozen=True, kw_only=True)
class FoldResult:
    """Results of a finished fold, read from its folder."""

    number: int
    split: Split
    folder: RunFolder
    summary: Summary
    """Summary of the fold's validation cases, on their original grids."""
    history: tuple[EpochRecord, ...]

    @property
    def mean_dice(self) -> float:
        """Mean over cases and foreground labels."""
        return float(self.summary["foreground_mean"]["Dice"])

    @property
    def seconds_training(self) -> float:
        """Wall-clock time of all batches, without validations and preparation."""
        return sum(record.seconds for record in self.history)


@dataclass(frozen=True, kw_only=True, eq=False)
class Fold(PlannedRun):
    """One run of a cross-validation."""

    number: int
    split: Split

    def require_same(self) -> None:
        """Raise if the run was started with another config or other cases.

        Raises
        ------
        ConfigError
            If keys differ; names each of them.
        DataError
            If the task's cases have changed since the start of the run.
        """
        if not self.folder.exists:
            return
        require_same_config(self.folder, self.config, folds=True)
        require_same_split(self.folder, self.split)

    def result(self) -> FoldResult | None:
        """Return the results of the run, or None unless its training and validation are finished.

        Raises
        ------
        DataError
            If the run's summary has other cases than the fold.
        """
        if (state := load_final_state(self.folder, self.config)) is None:
            return None
        summary_file = self.folder.validation / "summary.json"
        summary = read_summary(summary_file)
        self._require_own_cases(summary, summary_file)
        return FoldResult(
            number=self.number, split=self.split, folder=self.folder, summary=summary, history=state.history
        )

    def _require_own_cases(self, summary: Summary, path: Path) -> None:
        found = {stem(Path(case["prediction_file"])) for case in summary["metric_per_case"]}
        expected = set(self.split.validation)
        missing = set() if self.config.data.skip_bad else expected - found
        if wrong := sorted(found - expected | missing):
            raise DataError(
                f"{path} has {len(found)} cases, but fold {self.number} validates {len(expected)}; the first "
                f"difference is {wrong[0]}. Write it again: volseg validate {self.folder.path} --overwrite"
            )


def plan_folds(config: ExperimentConfig, task: Task) -> list[Fold]:
    """Return every fold of a config's split, in ``fold_K`` of the config's folder.

    Raises
    ------
    ConfigError
        If the folds are not a cross-validation: one validates nothing, or two validate the same case, which would count
        twice.
    """
    wanted = config.split
    if wanted.validation == "none":
        raise ConfigError("a cross-validation needs cases to validate on, but split.validation is none; set it to fold")
    given = list_given_splits(config, task)
    count = wanted.num_folds if given is None else len(given)
    plan = []
    for number in range(count):
        # A table may have more folds than the config counts; each run's folder records its own count.
        own = config.with_values(split={"fold": number, "num_folds": max(wanted.num_folds, count)})
        own = own.model_copy(update={"output": config.folder / f"fold_{number}"})
        plan.append(Fold(name=f"fold {number}", number=number, split=choose_split(own, task), config=own))
    _require_disjoint(plan)
    return plan


def _require_disjoint(plan: Sequence[Fold]) -> None:
    validated_in: dict[str, int] = {}
    for fold in plan:
        source = fold.config.split.file or "the data set's own split"
        if not fold.split.validation:
            raise ConfigError(f"fold {fold.number} of {source} has no case to validate; add some, or remove the fold")
        for case in fold.split.validation:
            if case in validated_in:
                raise ConfigError(
                    f"{case} is a validation case of folds {validated_in[case]} and {fold.number} of {source}, but "
                    "a cross-validation predicts each case once; remove it from one"
                )
            validated_in[case] = fold.number


def load_final_state(folder: RunFolder, config: ExperimentConfig) -> TrainingState | None:
    """Return the last state of a run that was validated after all epochs or its patience; else None.

    Raises
    ------
    ConfigError
        If the run has more epochs than the config.
    """
    if not (folder.exists and (folder.validation / "summary.json").exists()):
        return None
    try:
        state = load_checkpoint(folder.checkpoints / LATEST)
    except CheckpointError:
        return None  # the rest of the run may still be resumed
    epochs, patience = config.training.epochs, config.training.patience
    if state.epoch > epochs:
        raise ConfigError(
            f"{config.folder} was trained for {state.epoch} epochs, but the cross-validation's config has {epochs}; "
            "all folds need the same number. Move this folder away, or choose another --output"
        )
    has_ended = state.epoch == epochs or (patience is not None and Patience(patience).has_run_out(state.history))
    return state if has_ended else None
