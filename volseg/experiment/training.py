"""A training from its config to its summary."""

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from volseg.config.schema import ExperimentConfig
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
    preprocessing_of,
)
from volseg.experiment.cases import choose_cases
from volseg.experiment.report import Outcome, training_report
from volseg.experiment.run_folder import RunFolder
from volseg.monitoring.environment import environment
from volseg.monitoring.progress import Progress, progress
from volseg.monitoring.tensorboard import TensorBoard
from volseg.workflow.checkpoints import Checkpoints
from volseg.workflow.hooks import Hook, Patience
from volseg.workflow.randomness import seed_everything
from volseg.workflow.validation import Validation

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
        Before anything is trained, if the config cannot be run or a case is bad.
    NonFiniteLossError
        If the training diverges.
    """
    started = time.perf_counter()
    check_components(config)
    folder = RunFolder(config.folder)
    resume = resume and folder.exists
    if resume:
        folder.require_same(config)
    else:
        folder.require_free()
    seed_everything(config.seed)
    chosen = choose_cases(config)
    device = choose_device(config)
    model = build_model(config, chosen.task, device)
    preparing = partial(prepare_all, preprocessing=preprocessing_of(config))
    held_out = preparing(chosen.validation, keep_reference=True, show=_bar(chosen.validation, "preparing validation"))
    cases = preparing(chosen.training, show=_bar(chosen.training, "preparing training"))
    validate = partial(_validation, config, chosen.task, model, held_out)
    training = build_training(
        config,
        model,
        build_batches(config, chosen.task, cases, device),
        validation=validate(mirror=False) if held_out else None,
        hooks=[*_own_hooks(config, folder), *hooks],
    )
    if resume:
        training.load_state_dict(folder.newest_checkpoint())
    else:  # now that everything could be built: a config that cannot be run leaves no folder behind
        folder.begin(config, chosen.task, chosen.split, environment())
    training.run()
    final = None
    if held_out:
        final = training.validate(validate(mirror=config.inference.mirror, folder=folder.validation, show=True))
    outcome = Outcome(
        folder=folder,
        task=chosen.task,
        history=tuple(training.history),
        validated=final,
        problems=chosen.problems,
        seconds=time.perf_counter() - started,
        iterations=config.training.iterations,
    )
    folder.write_text("report.md", training_report(outcome, config))
    return outcome


def _validation(
    config: ExperimentConfig,
    task: Task,
    model: nn.Module,
    cases: Sequence[Case],
    *,
    mirror: bool,
    folder: Path | None = None,
    show: bool = False,
) -> Validation:
    """Return a validation of prepared cases; the one after the training writes its predictions."""
    return Validation(
        build_predictor(config, task, model, mirror=mirror),
        cases,
        task.labels,
        metrics=build_metrics(config, task),
        folder=folder,
        batch_size=config.inference.batch,
        show=_bar(cases, "validating") if show else iter,
    )


def _bar(cases: Sequence[Case], title: str) -> Callable[[Iterable[Any]], Iterable[Any]]:
    return partial(progress, title=title, total=len(cases))


def _own_hooks(config: ExperimentConfig, folder: RunFolder) -> list[Hook]:
    settings = config.training
    checkpoints = Checkpoints(
        folder.checkpoints,
        every_minutes=settings.checkpoint_minutes,
        metadata=lambda: {"config": config.model_dump(mode="json")},
    )
    hooks: list[Hook] = [Progress(), TensorBoard(folder.tensorboard), checkpoints]
    return [*hooks, Patience(settings.patience)] if settings.patience else hooks
