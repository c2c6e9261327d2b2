"""Who does what in a training: one process leads, and where a volume is cut over several the others follow it.

The leader reads the cases, holds the run folder's lock and writes into it. A follower computes on the slabs that it is
sent, and of the folder only reads what must agree with it. A training in one process is led and has no follower.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from volseg.config.schema import ExperimentConfig
from volseg.data.augmented import AugmentedBatches
from volseg.data.cases import Case, Task
from volseg.data.preparing import PreparedCases
from volseg.experiment.building import (
    build_batches,
    build_metrics,
    build_predictor,
    choose_device,
    preprocessing_of,
)
from volseg.experiment.cases import ChosenCases, prepare_chosen
from volseg.experiment.folder_lock import only_process_in
from volseg.experiment.report import Outcome, training_report
from volseg.experiment.run_folder import RunFolder
from volseg.inference.predictor import Predictor
from volseg.monitoring.environment import environment
from volseg.monitoring.progress import progress
from volseg.parallel.devices import is_main_process
from volseg.workflow.processes import largest_over_processes
from volseg.workflow.spatial_group import FollowedModel, GroupBatches, GroupValidation, is_cut_over_processes
from volseg.workflow.validation import Validation

__all__ = ["Follower", "Leader", "choose_role"]


def choose_role(config: ExperimentConfig, held: ExitStack) -> "Follower":
    """Return what this process is in the training; the leader's lock is released with ``held``."""
    return Leader(config, held) if is_main_process() else Follower(config)


class Follower:
    """A process that computes on the slabs it is sent.

    Parameters
    ----------
    config : ExperimentConfig
        Of the training.
    """

    def __init__(self, config: ExperimentConfig) -> None:
        self.config = config
        self.folder = RunFolder(config.folder)

    def claim(self, resume: bool) -> bool:
        """Return whether the training goes on from a checkpoint, which the leader decides.

        Raises
        ------
        ConfigError
            If the run may neither go on nor begin.
        """
        # The leader looks, and tells: a follower may come when the leader has begun the folder already.
        goes_on = bool(largest_over_processes(int(self._goes_on(resume)), choose_device(self.config)))
        if goes_on:
            self.folder.require_same(self.config)
        return goes_on

    def _goes_on(self, resume: bool) -> bool:
        del resume
        return False

    def prepare(self, chosen: ChosenCases) -> PreparedCases:
        """Return prepared cases: none, as their batches and volumes are sent."""
        del chosen
        return PreparedCases()

    def make_batches(
        self, cases: Sequence[Case], task: Task, model: nn.Module, device: torch.device
    ) -> AugmentedBatches | GroupBatches:
        """Return the batches of prepared training cases, of which every process of a shared model gets its part."""
        batches = self._cut_batches(cases, task, device)
        if is_cut_over_processes(model):
            return GroupBatches(model, batches, self.config.training.iterations)
        assert batches is not None, "a follower of a model that is not shared"
        return batches

    def _cut_batches(self, cases: Sequence[Case], task: Task, device: torch.device) -> AugmentedBatches | None:
        del cases, task, device
        return None

    def make_validation(
        self,
        model: nn.Module,
        task: Task,
        cases: Sequence[Case],
        *,
        mirror: bool,
        folder: Path | None = None,
        show: bool = False,
    ) -> Validation | GroupValidation:
        """Return a validation of prepared cases, in which every process of a shared model takes part.

        Parameters
        ----------
        model : nn.Module
            The model in training.
        task : Task
            Its labels.
        cases : sequence of Case
            What `prepare` returned to validate on.
        mirror : bool
            Whether predictions are averaged over mirrorings.
        folder : Path, optional
            Where the predictions are written, after the training.
        show : bool
            Whether a bar counts the cases.
        """
        called = FollowedModel(model) if is_cut_over_processes(model) else model
        predictor = build_predictor(self.config, task, called, mirror=mirror)
        validation = self._judge(predictor, task, cases, folder, show)
        if is_cut_over_processes(model):
            return GroupValidation(model, validation, predictor.autocast)
        assert validation is not None, "a follower of a model that is not shared"
        return validation

    def _judge(
        self, predictor: Predictor, task: Task, cases: Sequence[Case], folder: Path | None, show: bool
    ) -> Validation | None:
        del predictor, task, cases, folder, show
        return None

    def begin(self, chosen: ChosenCases) -> None:
        """Describe the new run."""

    def go_on(self, *, finished: bool) -> None:
        """Describe the run as it goes on."""

    def forget_validation(self) -> None:
        """Remove what was written about weights on the way, by somebody who looked in."""

    def report(self, outcome: Outcome) -> None:
        """Write what the training came to."""


class Leader(Follower):
    """The process that reads the cases and writes the run folder, which it locks: at once where it is there.

    Parameters
    ----------
    config : ExperimentConfig
        Of the training.
    held : ExitStack
        Takes the folder's lock, and is closed when the training ends in any way.
    """

    def __init__(self, config: ExperimentConfig, held: ExitStack) -> None:
        super().__init__(config)
        self._held = held
        self._is_locked = self.folder.path.is_dir()
        if self._is_locked:
            held.enter_context(only_process_in(self.folder.path))
            self.folder.remove_partials()

    def claim(self, resume: bool) -> bool:
        """Return whether the training goes on from a checkpoint; else its folder is free."""
        goes_on = super().claim(resume)
        if not goes_on:
            self.folder.require_free()
        return goes_on

    def _goes_on(self, resume: bool) -> bool:
        return resume and self.folder.may_go_on()

    def prepare(self, chosen: ChosenCases) -> PreparedCases:
        """Return prepared cases, without bad ones if the config would rather leave these out than stop."""
        return prepare_chosen(chosen, preprocessing_of(self.config), skip_bad=self.config.data.skip_bad)

    def _cut_batches(self, cases: Sequence[Case], task: Task, device: torch.device) -> AugmentedBatches:
        return build_batches(self.config, task, cases, device)

    def _judge(
        self, predictor: Predictor, task: Task, cases: Sequence[Case], folder: Path | None, show: bool
    ) -> Validation:
        return Validation(
            predictor,
            cases,
            task.labels,
            metrics=build_metrics(self.config, task),
            folder=folder,
            batch_size=self.config.inference.batch,
            show=_bar(cases, "validating") if show else iter,
        )

    def begin(self, chosen: ChosenCases) -> None:
        """Make the run folder and describe the run in it."""
        if not self._is_locked:
            self._held.enter_context(only_process_in(self.folder.path))
        self.folder.begin(self.config, chosen.task, chosen.split, environment())

    def go_on(self, *, finished: bool) -> None:
        """Describe the run as it goes on; summaries of weights that will be replaced are removed."""
        if not finished:  # first: a report beside a config says that this has been trained
            self.folder.forget_validation()
        self.folder.go_on(self.config)

    def forget_validation(self) -> None:
        """Remove what was written about weights on the way, by somebody who looked in."""
        self.folder.forget_validation()

    def report(self, outcome: Outcome) -> None:
        """Write the report."""
        self.folder.write_text("report.md", training_report(outcome, self.config))


def _bar(cases: Sequence[Case], title: str) -> Callable[[Iterable[Any]], Iterable[Any]]:
    return partial(progress, title=title, total=len(cases))
