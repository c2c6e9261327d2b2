"""Run a training from its config to its summary: begin, fit, finish."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from volseg.checkpointing import compatible
from volseg.checkpointing.components import require_components
from volseg.checkpointing.folder import CASES, MEMORY, NETWORK
from volseg.checkpointing.job_folder import JobFolder
from volseg.config.loading import format_config, require_config
from volseg.config.schema import ExperimentConfig
from volseg.data.augmented import EpochBatches, GrowingBatches
from volseg.data.case_store.preparing import PreparedCases
from volseg.data.cases import Task
from volseg.experiment.building import build_hooks, build_objective, build_training, check_components, choose_channel
from volseg.experiment.cases import choose_cases
from volseg.experiment.network_plan import plan_network
from volseg.experiment.placement.alternatives import build_candidate, explaining_memory, free_memory
from volseg.experiment.placement.measured_kernels import KERNELS, resolve_kernels
from volseg.experiment.placement.mesh_resolution import CaseReading, TrainingMesh, join_processes, resolve_mesh
from volseg.experiment.placement.placed_network import build_model, choose_device, count_devices, require_room
from volseg.experiment.placement.replanning import BeginAgain, Replanning
from volseg.experiment.report import Outcome, describe_network, list_findings, write_outcome, write_page
from volseg.experiment.starting import START, Start
from volseg.inference.postprocessing import Postprocessing
from volseg.monitoring.heartbeat import Heartbeat
from volseg.monitoring.loggers import History, LoggedRun, Logger, build_logger
from volseg.monitoring.memory import FirstSteps, GpuMeter
from volseg.monitoring.progress import Progress
from volseg.monitoring.spot_notices import heeding_spot_notices
from volseg.monitoring.training_log import TrainingLog, list_final
from volseg.parallel.devices import count_restarts, is_main_process
from volseg.parallel.processes.progress import report_progress
from volseg.reporting.reading import TOLD
from volseg.workflow.hooks import Checkpoints, ForgetOldSizes, Hook, Patience
from volseg.workflow.precision import deterministic, seed_everything
from volseg.workflow.training import Score, Training
from volseg.workflow.validation import Validated

logger = logging.getLogger(__name__)


def train(config: ExperimentConfig | str | Path, *, resume: bool = False, hooks: Sequence[Hook] = ()) -> Outcome:
    """Train, validate, and write a run folder.

    Parameters
    ----------
    config : ExperimentConfig or path
        Config of the experiment, from `volseg.load_config`, or its YAML file.
    resume : bool
        Resume from the run folder's newest checkpoint; without one, start from the beginning. Processes that
        a launcher restarts always resume.
    hooks : sequence of Hook
        Called after the framework's own hooks.

    Raises
    ------
    ConfigError, DataError
        Before any training, if the config cannot be run, a case is bad, or another process trains in the folder.
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
            # Built first: preparing a large task takes hours before the first log entry. Only the leader has loggers.
            named = config.logging.loggers if is_main_process() else ()
            loggers = [build_logger(logger.spec()) for logger in named]
        replanning = Replanning(config)
        with suppress(BeginAgain):
            return _train(config, resume, hooks, loggers, replanning, signs)
        free_memory()  # here, where no traceback refers to the model any more
        return _train(config, True, hooks, loggers, replanning, signs)


def _train(
    config: ExperimentConfig,
    resume: bool,
    hooks: Sequence[Hook],
    loggers: Sequence[Logger],
    replanning: Replanning,
    signs: Heartbeat,
) -> Outcome:
    """Start the training, or resume it from its last checkpoint, and return its results."""
    report_progress("start")  # forget the last step of an earlier attempt
    with (
        replanning.heeding(),
        ExitStack() as held,
        explaining_memory(config),  # before the run's folder records its end
    ):
        held.enter_context(heeding_spot_notices(config.training.spot))
        with signs.span("start"):
            join_processes(config)
            job = JobFolder(config, held)
            resume = job.claim(resume or count_restarts() > 0)
            held.push(partial(_write_page, job))  # after the heartbeat, which records the end of the run
            job.write_status(signs, BeginAgain)
        run = _Run(job, resume, replanning, signs, held)
        with signs.span("building"):
            run.begin(loggers, hooks)
        run.fit()
        return run.finish()


def _write_page(job: JobFolder, kind: type[BaseException] | None, *ended: object) -> None:
    """Write the page about the run after any end, if this process has described the run."""
    del ended
    if job.is_described and job.folder.exists:
        write_page(job.folder, kind)


class _Run:
    """A training from its config to its summary: started or resumed, trained to its end and validated."""

    model: nn.Module
    reading: CaseReading
    held_out: PreparedCases
    """Validation cases; the batches have the training cases."""
    training: Training
    memory: FirstSteps
    log: TrainingLog

    def __init__(self, job: JobFolder, resume: bool, replanning: Replanning, signs: Heartbeat, held: ExitStack) -> None:
        self.job, self.resume, self.replanning, self.signs, self.held = job, resume, replanning, signs, held
        self.device = choose_device(job.config)
        self.files: dict[str, Any] = {}
        """JSON files of the run folder with the settings of the computation."""

    def begin(self, loggers: Sequence[Logger], hooks: Sequence[Hook]) -> None:
        """Build everything, then describe the run: a config that cannot be run leaves no folder behind."""
        given, job = self.job.config, self.job
        self._choose_cases()
        self.plan = job.folder.plan() if self.resume else plan_network(given, self.chosen.task)
        config = self.replanning.settle(job, self.plan.complete(given), self.resume)
        config, mesh = resolve_mesh(config, self.device)
        self._note_candidate(config, mesh)
        job.keep_mesh(config)
        seed_everything(config.seed)
        if self.resume:
            compatible.require_same_split(job.folder, self.chosen.split)
            compatible.require_same_task(job.folder, self.chosen.task, weights=True)
            compatible.require_same_mesh(job.folder, config)
        is_new = not self.resume and config.training.start_from is not None
        start = Start(config, self.chosen) if is_new else None
        self.reading = CaseReading(config, mesh, self.plan.spacing)
        config = self._settle_kernels(config, mesh)
        self.model = build_model(config, self.chosen.task, self.device, mesh=mesh, begin=start)
        batches = self._make_batches(config, mesh)
        self._build_training(config, batches, loggers, hooks)
        self._describe(config, start)

    def _choose_cases(self) -> None:
        """Choose the cases, and refuse unsuitable settings before any case is read."""
        config = self.job.config
        with self.signs.span("reading"):
            self.chosen = choose_cases(config)
        if is_main_process() and self.chosen.patients.warning:
            logger.warning("%s", self.chosen.patients.warning)
        elif is_main_process() and self.chosen.patients.summary:
            logger.info("%s", self.chosen.patients.summary)
        require_room(config, self.chosen.task)
        build_objective(config, self.chosen.task)
        choose_channel(config, self.chosen.task)
        Postprocessing.keep_largest(self.chosen.task, config.inference.keep_largest)

    def _note_candidate(self, config: ExperimentConfig, mesh: TrainingMesh) -> None:
        self.replanning.tried = build_candidate(config, mesh.plan, count_devices(config, self.device))

    def _settle_kernels(self, config: ExperimentConfig, mesh: TrainingMesh) -> ExperimentConfig:
        """Return the config with the kernels to train with, measured if necessary."""
        folder, task = self.job.folder, self.chosen.task
        with self.signs.span("measuring") if config.training.kernels == "measured" else nullcontext():
            config, measured = resolve_kernels(folder, config, mesh, task, self.device, resume=self.resume)
        self.files |= self.replanning.files()
        if measured is not None:
            self._note_candidate(config, mesh)
            self.files[KERNELS] = asdict(measured)
        return config

    def _make_batches(self, config: ExperimentConfig, mesh: TrainingMesh) -> EpochBatches:
        """Return the batches. On a GPU they copy the training cases, which no other object keeps afterwards."""
        with self.signs.span("preparing"):
            prepared = self.reading.prepare(self.chosen)
        meter = GpuMeter()
        before = meter.count()
        batches = self.reading.make_batches(prepared, self.chosen.task, self.model, self.device)
        beside, first = meter.count() - before, config.patch.first_whole(config.training.epochs)
        write = partial(self.job.write_json, MEMORY)
        self.memory = FirstSteps(meter, mesh.estimate, beside=beside, write=write, first_epoch=first)
        self.held_out = replace(prepared, training=())
        if self.resume:
            compatible.require_same_cases(self.job.folder, prepared.fingerprints)
        return batches

    def _build_training(
        self, config: ExperimentConfig, batches: EpochBatches, loggers: Sequence[Logger], hooks: Sequence[Hook]
    ) -> None:
        task, make = self.chosen.task, self.reading.make_validation
        self.log = _open_log(config, self.job, loggers, self.signs, task)
        self.held.callback(self.log.end)  # without scores, if the training does not reach its end
        self.training = build_training(
            config,
            self.model,
            batches,
            validation=make(self.model, task, self.held_out, mirror=False) if self.chosen.validation else None,
            hooks=[
                *([ForgetOldSizes(batches)] if isinstance(batches, GrowingBatches) else []),
                *_own_hooks(config, self.job, self.memory, self.log, self.signs),
                *build_hooks(config),
                *hooks,
            ],
            task=task,
        )

    def _describe(self, config: ExperimentConfig, start: Start | None) -> None:
        """Load the state of a resumed run, and write its description into the folder."""
        job, folder, held_out = self.job, self.job.folder, self.held_out
        findings = list_findings(self.chosen.task, held_out.problems, held_out.remarks, self.chosen.patients)
        self.files[TOLD] = findings
        if self.resume:
            state = folder.newest_checkpoint()
            compatible.require_epochs(folder, state, config.training.epochs)
            self.training.load_state_dict(state)
            if is_main_process():
                logger.info("%s continues after epoch %d, batch %d", folder.path, *state.progress)
            job.go_on(self.files, finished=self.training.finished)
        else:
            begun = {CASES: held_out.fingerprints, NETWORK: self.plan.as_json()}
            begun |= {} if start is None else {START: start.as_json()}
            job.begin(self.chosen, {**begun, **self.files})

    def fit(self) -> None:
        """Train to the last epoch."""
        is_begun = not self.training.finished
        try:
            with self.signs.span("training"):
                self.training.run()
        except Exception:
            if self.job.leads and (self.training.epoch, self.training.position) == (0, 0):
                self.job.folder.abandon()
            raise
        if is_begun and self.job.leads:
            self.job.folder.forget_validation()

    def finish(self) -> Outcome:
        """Validate with the config's inference settings, and report."""
        job, chosen = self.job, self.chosen
        final = None
        scores = list_final(self.training.history[-1]) if self.training.history else {}
        job.require_folder()
        if chosen.validation:
            mirror, folder = job.config.inference.mirror, job.folder.validation
            validation = self.reading.make_validation(
                self.model, chosen.task, self.held_out, mirror=mirror, folder=folder, show=True
            )
            with self.signs.validating():
                final = self.training.validate(validation)
            scores = {"final/dice_mean": final.score, **{f"final/{name}": each for name, each in final.scores.items()}}
        with self.signs.span("writing"):
            return self._write_end(final, scores)

    def _write_end(self, final: Score | None, scores: Mapping[str, float]) -> Outcome:
        """End the loggers, and write summary and report."""
        job, config, chosen, held_out = self.job, self.job.config, self.chosen, self.held_out
        self.log.end(scores)
        outcome = Outcome(
            folder=job.folder,
            task=chosen.task,
            history=tuple(self.training.history),
            validated=final if isinstance(final, Validated) else None,
            problems=held_out.problems,
            remarks=held_out.remarks,
            patients=chosen.patients,
            seconds=self.signs.seconds,
            memory=self.memory.describe(),
            replanned=None if self.replanning.replanned is None else str(self.replanning.replanned),
        )
        if job.leads:
            job.require_folder()
            write_outcome(outcome, [*chosen.validation, *held_out.validation], choose_channel(config, chosen.task))
        return outcome


def _open_log(
    config: ExperimentConfig, job: JobFolder, loggers: Sequence[Logger], signs: Heartbeat, task: Task
) -> TrainingLog:
    """Return the log of the training for the leader's loggers."""
    if not is_main_process():
        return TrainingLog([], ends=False)
    run = LoggedRun(
        # In microseconds: runs of one name may start together, such as the folds of a cross-validation.
        id=f"{config.name}-{signs.begun * 1e6:.0f}",
        name=config.name,
        folder=job.folder.path,
        config=config.model_dump(mode="json"),
    )
    texts = {"config": f"```yaml\n{format_config(config)}```", "network": describe_network(config, task)}
    channel = choose_channel(config, task)
    return TrainingLog([History(), *loggers], run, texts=texts, channel=channel, ends=False)


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
    return [Progress(), memory, log, signs, *stopping, checkpoints]
