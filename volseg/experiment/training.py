"""A training from its config to its summary."""

import time
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
from volseg.data.preparing import prepare_all
from volseg.experiment.building import (
    build_batches,
    build_metrics,
    build_model,
    build_predictor,
    build_training,
    check_components,
    choose_device,
    join_processes,
    preprocessing_of,
)
from volseg.experiment.cases import ChosenCases, choose_cases, sound_cases
from volseg.experiment.folder_lock import only_process_in
from volseg.experiment.report import Outcome, training_report
from volseg.experiment.run_folder import RunFolder
from volseg.monitoring.environment import environment
from volseg.monitoring.progress import Progress, progress
from volseg.monitoring.tensorboard import TensorBoard
from volseg.monitoring.waiting import WaitingAdvice
from volseg.parallel.devices import is_main_process
from volseg.workflow.checkpoints import Checkpoints
from volseg.workflow.hooks import Hook, Patience
from volseg.workflow.processes import largest_over_processes
from volseg.workflow.randomness import deterministic, seed_everything
from volseg.workflow.spatial_group import FollowedModel, GroupBatches, GroupValidation, is_cut_over_processes
from volseg.workflow.validation import Validated, Validation

__all__ = ["train"]


def train(config: ExperimentConfig, *, resume: bool = False, hooks: Sequence[Hook] = ()) -> Outcome:
    """Train, validate, and leave a run folder.

    Parameters
    ----------
    config : ExperimentConfig
        What to do; see `volseg.config.load_config`.
    resume : bool
        Go on from the run folder's newest checkpoint; without one, begin.
    hooks : sequence of Hook
        Called after the framework's own.

    Raises
    ------
    ConfigError, DataError
        Before anything is trained, if the config cannot be run, a case is bad, or another process trains in the folder.
    NonFiniteLossError
        If the training diverges.
    """
    with ExitStack() as held:
        return _train(config, resume, hooks, held)


def _train(config: ExperimentConfig, resume: bool, hooks: Sequence[Hook], held: ExitStack) -> Outcome:
    started = time.perf_counter()
    check_components(config)
    held.enter_context(deterministic(config.training.deterministic))
    join_processes(config)
    folder = RunFolder(config.folder)
    existed = folder.path.is_dir()
    if existed and is_main_process():
        held.enter_context(only_process_in(folder.path))
    resume = _may_begin(folder, config, resume)
    seed_everything(config.seed)
    chosen = choose_cases(config)
    if resume:
        folder.require_same_split(chosen.split)
    device = choose_device(config)
    model = build_model(config, chosen.task, device)
    if is_main_process():
        chosen = sound_cases(chosen, skip_bad=config.data.skip_bad)
    held_out = _prepared(config, chosen.validation, "preparing validation", keep_reference=True)
    validating = partial(_validation, config, chosen.task, model, held_out)
    training = build_training(
        config,
        model,
        _batches(config, chosen, model, device),
        validation=validating(mirror=False) if chosen.validation else None,
        hooks=[*_own_hooks(config, folder), *hooks],
    )
    if resume:
        state = folder.newest_checkpoint()
        folder.require_epochs(state, config.training.epochs)
        training.load_state_dict(state)
        if is_main_process():
            folder.go_on(config)
            if not training.finished:
                folder.forget_validation()
    elif is_main_process():  # now that everything could be built: a config that cannot be run leaves no folder behind
        if not existed:
            held.enter_context(only_process_in(folder.path))
        folder.begin(config, chosen.task, chosen.split, environment())
    is_begun = not training.finished
    training.run()
    if is_begun and is_main_process():
        folder.forget_validation()  # of weights on the way, by somebody who looked in
    final = None
    if chosen.validation:
        final = training.validate(validating(mirror=config.inference.mirror, folder=folder.validation, show=True))
    outcome = Outcome(
        folder=folder,
        task=chosen.task,
        history=tuple(training.history),
        validated=final if isinstance(final, Validated) else None,
        problems=chosen.problems,
        seconds=time.perf_counter() - started,
        iterations=config.training.iterations,
    )
    if is_main_process():
        folder.write_text("report.md", training_report(outcome, config))
    return outcome


def _may_begin(folder: RunFolder, config: ExperimentConfig, resume: bool) -> bool:
    """Return whether the training goes on from a checkpoint; raise if it may neither go on nor begin."""
    # The main process looks, and tells: the others may come when it has begun the folder already.
    goes_on = is_main_process() and resume and folder.may_go_on()
    resume = bool(largest_over_processes(int(goes_on), choose_device(config)))
    if resume:
        folder.require_same(config)
    elif is_main_process():
        folder.require_free()
    return resume


def _prepared(
    config: ExperimentConfig, cases: Sequence[Case], title: str, *, keep_reference: bool = False
) -> list[Case]:
    """Return prepared cases on the main process, none on those that it sends its batches to."""
    if not is_main_process():
        return []
    return prepare_all(cases, preprocessing_of(config), keep_reference=keep_reference, show=_bar(cases, title))


def _batches(
    config: ExperimentConfig, chosen: ChosenCases, model: nn.Module, device: torch.device
) -> AugmentedBatches | GroupBatches:
    cases = _prepared(config, chosen.training, "preparing training")
    batches = build_batches(config, chosen.task, cases, device) if cases else None
    if is_cut_over_processes(model):
        return GroupBatches(model, batches, config.training.iterations)
    assert batches is not None
    return batches


def _validation(
    config: ExperimentConfig,
    task: Task,
    model: nn.Module,
    cases: Sequence[Case],
    *,
    mirror: bool,
    folder: Path | None = None,
    show: bool = False,
) -> Validation | GroupValidation:
    """Return a validation of prepared cases; the one after the training writes its predictions."""
    called = FollowedModel(model) if is_cut_over_processes(model) else model
    predictor = build_predictor(config, task, called, mirror=mirror)
    validation = Validation(
        predictor,
        cases,
        task.labels,
        metrics=build_metrics(config, task),
        folder=folder,
        batch_size=config.inference.batch,
        show=_bar(cases, "validating") if show else iter,
    )
    if not is_cut_over_processes(model):
        return validation
    return GroupValidation(model, validation if is_main_process() else None, predictor.autocast)


def _bar(cases: Sequence[Case], title: str) -> Callable[[Iterable[Any]], Iterable[Any]]:
    return partial(progress, title=title, total=len(cases))


def _own_hooks(config: ExperimentConfig, folder: RunFolder) -> list[Hook]:
    settings = config.training
    checkpoints = Checkpoints(
        folder.checkpoints,
        every_minutes=settings.checkpoint_minutes,
        metadata=lambda: {"config": config.model_dump(mode="json")},
    )
    # Before the checkpoints, which write the latest state when they find the training finished.
    stopping = [Patience(settings.patience)] if settings.patience else []
    return [Progress(), TensorBoard(folder.tensorboard), WaitingAdvice(), *stopping, checkpoints]
