"""A training from its config to its summary: begin, fit, finish."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from torch import nn

from volseg.checkpointing import compatible
from volseg.checkpointing.components import require_components
from volseg.checkpointing.folder import CASES, MEMORY, NETWORK
from volseg.checkpointing.ranks import JobFolder
from volseg.config.loading import format_config, require_config
from volseg.config.schema import ExperimentConfig
from volseg.data.cases import Task
from volseg.data.growing import GrowingBatches
from volseg.data.preparing import PreparedCases
from volseg.experiment.alternatives import find_candidate
from volseg.experiment.building import build_hooks, build_objective, build_training, check_components, choose_channel
from volseg.experiment.cases import ChosenCases, choose_cases
from volseg.experiment.kernel_worker import compile_for_training
from volseg.experiment.measured_kernels import KERNELS, settle_kernels
from volseg.experiment.network_plan import plan_network
from volseg.experiment.network_text import describe_network
from volseg.experiment.out_of_memory import explaining_memory, require_plausible_sizes
from volseg.experiment.patients import PatientWords
from volseg.experiment.placed_network import build_model, choose_device, count_devices
from volseg.experiment.reading import Follower, choose_reading
from volseg.experiment.replanning import BeginAgain, Replanning, free_memory
from volseg.experiment.report import Outcome, tell_findings, write_outcome, write_page
from volseg.experiment.settling import join_processes, settle_mesh
from volseg.experiment.starting import START, Start
from volseg.monitoring.advice import DurationWarning, WaitingAdvice
from volseg.monitoring.heartbeat import Heartbeat
from volseg.monitoring.loggers import History, LoggedRun, Logger, build_logger
from volseg.monitoring.memory import FirstSteps, GpuMeter
from volseg.monitoring.progress import Progress
from volseg.monitoring.spot_notices import heeding_spot_notices
from volseg.monitoring.stage_times import StageTimes
from volseg.monitoring.training_log import TrainingLog, list_final
from volseg.parallel.devices import count_restarts, is_main_process
from volseg.parallel.processes.group import gather_over_processes
from volseg.parallel.processes.progress import report_progress
from volseg.reporting.reading import TOLD
from volseg.workflow.checkpoints import Checkpoints
from volseg.workflow.growing import ForgetOldSizes
from volseg.workflow.hooks import Hook, Patience
from volseg.workflow.randomness import deterministic, seed_everything
from volseg.workflow.training import Score, Training
from volseg.workflow.validation import Validated

__all__ = ["train"]

logger = logging.getLogger(__name__)


def train(
    config: ExperimentConfig | str | Path,
    *,
    resume: bool = False,
    hooks: Sequence[Hook] = (),
) -> Outcome:
    """Train, validate, and leave a run folder.

    Parameters
    ----------
    config : ExperimentConfig or path
        What to do, as `volseg.load_config` reads it from a YAML file, or that file.
    resume : bool
        Go on from the run folder's newest checkpoint; without one, begin. Processes that their launcher has started
        again do so by themselves.
    hooks : sequence of Hook
        Called after the framework's own.

    Raises
    ------
    ConfigError, DataError
        Before anything is trained, if the config cannot be run, a case is bad, or another process trains in the folder.
    NonFiniteLossError
        If the training diverges.
    OutOfMemoryError
        If a batch or a volume does not fit its device.
    """
    signs = Heartbeat()
    config = require_config(config)
    if resume:
        require_components(config.folder, resumes=True)
    with deterministic(config.training.deterministic):
        with signs.span("start"):
            check_components(config)
            # Now: cases of a large task are prepared for hours before there is something to log. In the leader alone.
            named = config.logging.loggers if is_main_process() else ()
            loggers = [build_logger(logger.spec()) for logger in named]
        replanning = Replanning(config)
        with suppress(BeginAgain):
            return _train(config, resume, hooks, loggers, replanning, signs)
        free_memory()  # here, where no traceback holds the model
        return _train(config, True, hooks, loggers, replanning, signs)


def _train(
    config: ExperimentConfig,
    resume: bool,
    hooks: Sequence[Hook],
    loggers: Sequence[Logger],
    replanning: Replanning,
    signs: Heartbeat,
) -> Outcome:
    """Begin or go on, as far as that goes."""
    report_progress("start")  # what an attempt before did last is no step of this one
    with (
        replanning.heeding(),
        ExitStack() as held,
        explaining_memory(config),  # before the run's folder says how it ended
    ):
        held.enter_context(heeding_spot_notices(config.training.spot))
        with signs.span("start"):
            join_processes(config)
            job = JobFolder(config, held)
            resume = job.claim(resume or count_restarts() > 0)
            held.push(partial(_write_page, job))  # after the heartbeat, which tells how the run ended
            job.write_status(signs, BeginAgain)
        with signs.span("building"):
            run = _begin(job, resume, hooks, loggers, replanning, signs, held)
        _fit(run)
        return _finish(run)


@dataclass(frozen=True, kw_only=True)
class _Run:
    """A training that has begun, and what its end needs."""

    job: JobFolder
    reading: Follower
    chosen: ChosenCases
    model: nn.Module
    held_out: PreparedCases
    """Cases that validate; those that train are the batches' now."""
    training: Training
    replanning: Replanning
    memory: FirstSteps
    log: TrainingLog
    signs: Heartbeat


def _write_page(job: JobFolder, kind: type[BaseException] | None, *ended: object) -> None:
    """Write the page about the run, however it ended, if this process has described it."""
    del ended
    if job.is_described and job.folder.exists:
        write_page(job.folder, kind)


def _tell_patients(patients: PatientWords) -> None:
    if patients.warning:
        logger.warning("%s", patients.warning)
    elif patients.summary:
        logger.info("%s", patients.summary)


def _begin(
    job: JobFolder,
    resume: bool,
    hooks: Sequence[Hook],
    loggers: Sequence[Logger],
    replanning: Replanning,
    signs: Heartbeat,
    held: ExitStack,
) -> _Run:
    """Build everything, then describe the run: a config that cannot be run leaves no folder behind."""
    given, folder, device = job.config, job.folder, choose_device(job.config)
    with signs.span("reading"):
        chosen = choose_cases(job.config)
    if is_main_process():
        _tell_patients(chosen.patients)
    require_plausible_sizes(job.config, chosen.task, device)
    build_objective(job.config, chosen.task)  # a loss that cannot be of this task is refused before cases are read
    choose_channel(job.config, chosen.task)
    plan = folder.plan() if resume else plan_network(job.config, chosen.task)
    config = replanning.settle(job, plan.complete(job.config), resume)
    config, mesh = settle_mesh(config, chosen.task, device)
    replanning.tried = find_candidate(config, mesh.plan, count_devices(config, device))
    job.keep_mesh(config)
    seed_everything(config.seed)
    if resume:
        compatible.require_same_task(folder, chosen.task)
        compatible.require_same_split(folder, chosen.split)
        compatible.require_same_mesh(folder, config)
    start = None if resume or config.training.start_from is None else Start(config, chosen)
    reading = choose_reading(config, mesh, plan.spacing)
    prepared = None
    compiling = held.enter_context(closing(compile_for_training(given, replanning.tried, device)))
    # The cases first, meanwhile: a network that is built is run once, with its kernels.
    if gather_over_processes(["compiling"] if compiling.is_compiling else []):
        with signs.span("preparing"):
            prepared = reading.prepare(chosen)
        with signs.span("compiling"):
            compiling.wait()
            gather_over_processes([])  # a process with a worker waits for that, and the others for the process
    with signs.span("measuring") if config.training.kernels == "measured" else nullcontext():
        config, measured = settle_kernels(folder, config, mesh, chosen.task, device, resume=resume)
    if measured is not None:
        replanning.tried = find_candidate(config, mesh.plan, count_devices(config, device))
    described = {**replanning.files(), **({} if measured is None else {KERNELS: measured.as_json()})}
    model = build_model(config, chosen.task, device, mesh=mesh, begin=start)
    if prepared is None:
        with signs.span("preparing"):
            prepared = reading.prepare(chosen)
    meter = GpuMeter()
    before = meter.count()
    batches = reading.make_batches(prepared, chosen.task, model, device)
    beside = meter.count() - before
    first = config.patch.first_whole(config.training.epochs)
    memory = FirstSteps(meter, mesh.estimate, beside=beside, write=partial(job.write_json, MEMORY), first_epoch=first)
    held_out = replace(prepared, training=())
    if resume:
        compatible.require_same_cases(folder, prepared.fingerprints)
    del prepared  # its training cases: on a GPU the batches have copied them
    validate = partial(reading.make_validation, model, chosen.task, held_out)
    log = _open_log(config, job, loggers, signs, memory, chosen.task)
    held.callback(log.end)  # without scores, where the training does not reach its end
    training = build_training(
        config,
        model,
        batches,
        validation=validate(mirror=False) if chosen.validation else None,
        hooks=[
            *([ForgetOldSizes(batches)] if isinstance(batches, GrowingBatches) else []),
            *_own_hooks(config, job, memory, log, signs),
            *build_hooks(config),
            *hooks,
        ],
        task=chosen.task,
    )
    told = {TOLD: tell_findings(chosen.task, held_out.problems, held_out.remarks, chosen.patients)}
    if resume:
        state = folder.newest_checkpoint()
        compatible.require_epochs(folder, state, config.training.epochs)
        training.load_state_dict(state)
        if is_main_process():
            logger.info("%s goes on after epoch %d and batch %d", folder.path, *state.progress)
        job.go_on({**told, **described}, finished=training.finished)
    else:
        begun = {CASES: held_out.fingerprints, NETWORK: plan.as_json()}
        begun |= {} if start is None else {START: start.as_json()}
        job.begin(chosen, {**begun, **told, **described})
    return _Run(
        job=job,
        reading=reading,
        chosen=chosen,
        model=model,
        held_out=held_out,
        training=training,
        replanning=replanning,
        memory=memory,
        log=log,
        signs=signs,
    )


def _fit(run: _Run) -> None:
    """Train to the last epoch."""
    is_begun = not run.training.finished
    try:
        with run.signs.fitting():
            run.training.run()
    except Exception:
        if run.job.leads and (run.training.epoch, run.training.position) == (0, 0):
            run.job.folder.abandon()
        raise
    if is_begun and run.job.leads:
        run.job.folder.forget_validation()


def _finish(run: _Run) -> Outcome:
    """Validate as the config asks for, and report."""
    job, config, chosen = run.job, run.job.config, run.chosen
    final = None
    scores = list_final(run.training.history[-1]) if run.training.history else {}
    job.require_folder()
    if chosen.validation:
        validation = run.reading.make_validation(
            run.model,
            chosen.task,
            run.held_out,
            mirror=config.inference.mirror,
            folder=job.folder.validation,
            show=True,
        )
        with run.signs.validating():
            final = run.training.validate(validation)
        scores = _name_final(final)
    with run.signs.span("writing"):
        return _write_end(run, final, scores)


def _write_end(run: _Run, final: Score | None, scores: Mapping[str, float]) -> Outcome:
    """Tell the loggers, and write summary and report."""
    job, config, chosen = run.job, run.job.config, run.chosen
    run.log.end(scores)
    outcome = Outcome(
        folder=job.folder,
        task=chosen.task,
        history=tuple(run.training.history),
        validated=final if isinstance(final, Validated) else None,
        problems=run.held_out.problems,
        remarks=run.held_out.remarks,
        patients=chosen.patients,
        seconds=run.signs.seconds,
        iterations=config.training.iterations,
        memory=run.memory.describe(),
        replanned=None if run.replanning.replanned is None else str(run.replanning.replanned),
    )
    if job.leads:
        job.require_folder()
        write_outcome(outcome, [*chosen.validation, *run.held_out.validation], choose_channel(config, chosen.task))
    return outcome


def _open_log(
    config: ExperimentConfig,
    job: JobFolder,
    loggers: Sequence[Logger],
    signs: Heartbeat,
    memory: FirstSteps,
    task: Task,
) -> TrainingLog:
    """Return what tells the leader's loggers of the training."""
    if not is_main_process():
        return TrainingLog([], ends=False)
    run = LoggedRun(
        # In microseconds: runs of one name that begin together, as the folds of a cross-validation do, are several.
        id=f"{config.name}-{signs.begun * 1e6:.0f}",
        name=config.name,
        folder=job.folder.path,
        config=config.model_dump(mode="json"),
    )
    texts = {"config": f"```yaml\n{format_config(config)}```", "network": describe_network(config, task)}
    channel = choose_channel(config, task)
    return TrainingLog([History(), *loggers], run, texts=texts, more=memory.scalars, channel=channel, ends=False)


def _name_final(final: Score) -> dict[str, float]:
    """Return the scores of the final validation by tag."""
    return {"final/dice_mean": final.score, **{f"final/{name}": value for name, value in final.scores.items()}}


def _own_hooks(
    config: ExperimentConfig, job: JobFolder, memory: FirstSteps, log: TrainingLog, signs: Heartbeat
) -> list[Hook]:
    settings, folder = config.training, job.folder
    checkpoints = Checkpoints(
        folder.checkpoints,
        every_minutes=settings.checkpoint_minutes,
        metadata=lambda: {"config": config.model_dump(mode="json")},
        require_folder=job.require_folder,
    )
    # Before the checkpoints, which write the latest state when they find the training finished.
    stopping = [Patience(settings.patience)] if settings.patience else []
    return [Progress(), memory, StageTimes(log), log, signs, WaitingAdvice(), DurationWarning(), *stopping, checkpoints]
