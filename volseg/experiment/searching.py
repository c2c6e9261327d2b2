"""Search for values of a config: every trial is an ordinary run, and all trials form one Optuna study.

::

    runs/NAME/
        trial_0/ trial_1/ ...    run folders
        trial_0.yaml, trial_0.log    config and log of its process
        journal.log              Optuna's journal, which several machines share
        search.json, search.html    trials, best values and charts

The trials train in processes that do not know the search. This process reads their ``history.jsonl``, reports each
validation to Optuna, and stops a trial that Optuna prunes.
"""

import logging
import math
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import getpid
from pathlib import Path
from typing import Any

import numpy as np
from pydantic_core import to_jsonable_python

from volseg.checkpointing.compatible import may_differ, refuse
from volseg.checkpointing.folder import RunFolder
from volseg.config.base import validated
from volseg.config.loading import (
    RangeConfig,
    Space,
    build_config,
    differences,
    list_samples,
    path_override,
    read_config,
    read_space,
)
from volseg.config.nearest import did_you_mean
from volseg.config.registry import explain_import
from volseg.config.schema import ExperimentConfig
from volseg.data.cases import Task
from volseg.data.layouts import load_task
from volseg.errors import ConfigError, VolsegError
from volseg.experiment.building import check_components, list_scores
from volseg.experiment.launching import choose_gpus
from volseg.experiment.own_components import components_arguments
from volseg.experiment.report import attempt
from volseg.experiment.several_runs import PlannedRun, require_own_folder, train_each
from volseg.files import replace_nan
from volseg.lifetime import is_running
from volseg.monitoring.environment import environment
from volseg.monitoring.run_files import (
    HISTORY,
    STATUS,
    TIMES,
    read_history,
    read_process_namespace,
    read_status,
    read_times,
)
from volseg.parallel.processes.workers import Worker
from volseg.reporting import write_brief, write_report
from volseg.reporting.several_runs import SEARCH, SearchRecord, read_search

logger = logging.getLogger(__name__)

JOURNAL, STUDY = "journal.log", "search"

PRUNERS = {"median": "MedianPruner", "halving": "SuccessiveHalvingPruner", "none": "NopPruner"}
"""Names of ``--pruner``, and Optuna's names."""

LOST_SECONDS = 600.0
"""Seconds without a heartbeat after which a trial of another machine is taken over."""

LOOK_SECONDS = 1.0
"""Seconds between two reads of a trial's history."""

STATES = {"COMPLETE": "finished", "PRUNED": "pruned", "FAIL": "failed", "RUNNING": "running", "WAITING": "waiting"}
"""State of a trial, by Optuna's name."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedTrial(PlannedRun):
    """A trial that this process trains."""

    trial: Any
    """Optuna's trial, which receives the validations."""


def search(
    config: str | Path,
    over: str | Path,
    overrides: Sequence[str] = (),
    *,
    trials: int = 20,
    gpus: int = 1,
    metric: str = "dice_mean",
    minimize: bool = False,
    pruner: str = "median",
) -> SearchRecord:
    """Train a config repeatedly with different values to find the best ones; return all trials.

    An existing search is continued: unfinished trials are resumed. Machines that share the folder share the trials.

    Parameters
    ----------
    config : path
        YAML file, read once; its ``output``, by default ``runs/NAME``, contains the trials.
    over : path
        YAML file of the values to try; see `read_space`.
    overrides : sequence of str
        Such as ``training.epochs=20``, for all trials.
    trials : int
        Trials in total, including those of earlier calls and of other machines.
    gpus : int
        Trials that train at a time, each on its own GPU. With 1, one by one, each as with ``volseg train``.
    metric : str
        Name of the metric in each validation, as TensorBoard shows it below ``val/``.
    minimize : bool
        Whether smaller values of the metric are better.
    pruner : str
        Rule that stops trials worse than others: ``median``, ``halving`` or ``none``.

    Raises
    ------
    ConfigError
        Before any training, if Optuna is not installed, a config cannot be run, a key or metric is unknown, or the
        folder has another search.
    """
    try:
        import optuna  # an extra
    except ImportError as fault:
        raise ConfigError(f"volseg search {explain_import(fault)}") from fault
    values, space = read_config(config), read_space(over)

    def load(*settings: str) -> ExperimentConfig:
        loaded = build_config(values, [*overrides, *settings], config)
        check_components(loaded)
        return loaded

    base = load()
    require_own_folder(base, "search", "run the same command once per machine")
    if pruner not in PRUNERS:
        raise ConfigError(f"unknown pruner {pruner!r}; {did_you_mean(pruner, PRUNERS)}")
    task = load_task(base.data.root, require_files=False)
    _require_metric(metric, base, task)
    for setting in list_samples(space):
        try:
            _require_metric(metric, load(setting), task)
        except ConfigError as fault:
            raise ConfigError(f"{over}: {fault}") from fault
    places = choose_gpus(base, gpus) if gpus > 1 else [None]
    command = ["search", str(config), "--over", str(over), *(part for each in overrides for part in ("--set", each))]
    command += ["--gpus", str(gpus), "--metric", metric, *(["--minimize"] if minimize else []), "--pruner", pruner]
    command += components_arguments()
    facts = {"task": task.name, "wanted": trials, "command": command, "environment": environment()}
    terms = {
        "space": to_jsonable_python(space),
        "metric": metric,
        "minimize": minimize,
        "config": base.located().model_dump(mode="json"),
    }
    study = _Study(optuna, base.folder, PRUNERS[pruner], load, terms, facts)
    try:
        train_each(study.take_trials(trials, space), places, study.finish, study.watch)
    finally:
        study.release()
        study.write()
    return read_search(base.folder)


def format_search(record: SearchRecord) -> str:
    """Return the final message of a search: its trials, and the paths of further results."""
    told = write_brief(record.folder)
    return f"\n{told}\nAll trials are in {record.folder}; page: {record.folder / 'search.html'}"


def _require_metric(metric: str, config: ExperimentConfig, task: Task) -> None:
    if config.split.validation == "none" or config.training.validate_every is None:
        raise ConfigError(
            "a search compares validations during the training; set split.validation to fold, and "
            "training.validate_every to a number"
        )
    if metric not in (known := list_scores(config, task)):
        raise ConfigError(f"validations do not compute the metric {metric!r}; {did_you_mean(metric, known)}")


class _Study:
    """Optuna's study in the folder of a search, and the trials that this process trains.

    Parameters
    ----------
    optuna : module
        The imported module.
    folder : Path
        Folder of the search.
    pruner : str
        Optuna's name of the pruner.
    load : callable
        Returns the config of a trial with its settings.
    terms : dict
        Terms of the search: ``config``, ``space``, ``metric`` and ``minimize``, as plain values.
    facts : dict
        Further content of ``search.json``.
    """

    def __init__(
        self,
        optuna: Any,
        folder: Path,
        pruner: str,
        load: Callable[..., ExperimentConfig],
        terms: dict[str, Any],
        facts: dict[str, Any],
    ) -> None:
        self.optuna, self.folder, self.load, self.terms, self.facts = optuna, folder, load, terms, facts
        self._own: dict[int, Any] = {}
        """Trials that this process has taken and not finished, by number."""
        self._next_look: dict[str, float] = {}
        """Time of the next read of a trial's history, by name."""
        self._pruned: set[str] = set()
        folder.mkdir(parents=True, exist_ok=True)
        journal = optuna.storages.journal
        # Optuna's lock is a link to its file. It outlives a killed process, and Optuna takes it over after 30 s without
        # a change of the file; if the link leads nowhere (no file, or a relative path) Optuna waits forever.
        self._taking, lines = (folder.absolute() / name for name in ("taking", JOURNAL))
        self._taking.touch()
        self._lock = journal.JournalFileSymlinkLock(str(self._taking))
        self.storage = optuna.storages.JournalStorage(journal.JournalFileBackend(str(lines)))
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        with self._locked():
            self.study = optuna.create_study(
                storage=self.storage,
                study_name=STUDY,
                direction="minimize" if terms["minimize"] else "maximize",
                pruner=getattr(optuna.pruners, pruner)(),
                load_if_exists=True,
            )
            begun = self.study.user_attrs.get("terms")
            if begun is None:
                self.study.set_user_attr("terms", terms)
        if begun is not None:
            self._require_same(begun)

    def _require_same(self, begun: Mapping[str, Any]) -> None:
        """Raise if the search was started with another config, other values or another metric."""
        before, now = (
            validated(ExperimentConfig, one["config"], str(self.folder / JOURNAL)) for one in (begun, self.terms)
        )
        lines = differences(before, now)
        changed = [line for line in lines if not may_differ(line.partition(":")[0], folds=True)]
        names = [name for name in self.terms if name != "config" and begun[name] != self.terms[name]]
        changed += [f"{name}: {begun[name]} -> {self.terms[name]}" for name in names]
        if changed:
            refuse("every other key", self.folder, changes="; ".join(changed), kind="search")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other processes and machines from taking trials."""
        self._lock.acquire()
        try:
            self._taking.touch()  # restarts the waiting time of others
            yield
        finally:
            self._lock.release()

    def _list(self) -> list[Any]:
        """Return all trials in their order, with Optuna's current state."""
        trials: list[Any] = self.study.get_trials(deepcopy=False)
        return trials

    def take_trials(self, count: int, space: Space) -> Iterator[PlannedTrial]:
        """Yield abandoned trials, then new ones until the study has ``count`` trials."""
        kinds = {key: self._distribute(values) for key, values in space.items()}
        while True:
            with self._locked():
                trial = self._take(count, kinds)
            if trial is None:
                return
            folder, settings = self._find_folder(trial.number), [f"{key}={trial.params[key]}" for key in kinds]
            try:
                config = self.load(*settings, path_override("output", folder))
            except VolsegError as fault:  # values that do not fit together
                self._fail(trial, str(fault))
                continue
            how = "continues with " if RunFolder(folder).exists else ""
            logger.info("trial %d: %s%s", trial.number, how, " ".join(settings))
            yield PlannedTrial(name=f"trial {trial.number}", config=config, trial=trial)

    def _take(self, count: int, kinds: Mapping[str, Any]) -> Any:
        trials = self._list()
        left = [each.number for each in trials if not each.state.is_finished() and self._is_abandoned(each)]
        if left:
            study_id = self.storage.get_study_id_from_name(STUDY)
            trial_id = self.storage.get_trial_id_from_study_id_trial_number(study_id, left[0])
            trial = self.optuna.trial.Trial(self.study, trial_id)
        elif len(trials) < count:
            # Another seed for each trial: processes that share a seed would try the same values.
            (seed,) = np.random.SeedSequence((self.terms["config"]["seed"], len(trials))).generate_state(1)
            self.study.sampler = self.optuna.samplers.TPESampler(seed=int(seed), constant_liar=True)
            trial = self.study.ask(kinds)
        else:
            return None
        owner = {"host": socket.gethostname(), "space": read_process_namespace(), "pid": getpid(), "since": time.time()}
        trial.set_user_attr("owner", owner)
        self._own[trial.number] = trial
        return trial

    def _distribute(self, values: RangeConfig | Sequence[str]) -> Any:
        """Return Optuna's form of a range or of choices."""
        kinds = self.optuna.distributions
        if not isinstance(values, RangeConfig):
            return kinds.CategoricalDistribution(values)
        if values.is_whole:
            return kinds.IntDistribution(values.low, values.high, log=values.log, step=values.step or 1)
        return kinds.FloatDistribution(values.low, values.high, log=values.log, step=values.step)

    def _is_abandoned(self, frozen: Any) -> bool:
        """Return whether no process trains a trial any more: its search has ended, or has been silent for too long."""
        if frozen.number in self._own:
            return False
        owner = frozen.user_attrs.get("owner")
        if not owner:
            return True
        is_here = (owner["host"], owner["space"]) == (socket.gethostname(), read_process_namespace())
        if is_here and (owner["pid"] == getpid() or not is_running(owner["pid"])):
            return True
        status = read_status(self._find_folder(frozen.number) / STATUS)
        return time.time() - max(owner["since"], 0.0 if status is None else status.time) > LOST_SECONDS

    def _find_folder(self, number: int) -> Path:
        return self.folder / f"trial_{number}"

    def watch(self, run: PlannedTrial, worker: Worker) -> None:
        """Report the validations of a trial, and stop it if it is worse than others."""
        if run.name in self._pruned or time.monotonic() < self._next_look.get(run.name, 0.0):
            return
        self._next_look[run.name] = time.monotonic() + LOOK_SECONDS
        for epoch, value in self._list_new(run):
            run.trial.report(value, epoch)
            # Before the next report: Optuna compares trials at the epoch that was reported last.
            if epoch < run.config.training.epochs and run.trial.should_prune():
                logger.info("%s: pruned after epoch %d, %s %.4f", run.name, epoch, self.terms["metric"], value)
                self._pruned.add(run.name)
                worker.process.terminate()
                return

    def _list_new(self, run: PlannedTrial) -> list[tuple[int, float]]:
        """Return epoch and value of each validation that Optuna does not know."""
        known, tag = self._list()[run.trial.number].intermediate_values, f"val/{self.terms['metric']}"
        lines = [line for line in read_history(run.folder.path / HISTORY) if tag in line.scalars]
        return [(line.epoch, line.scalars[tag]) for line in lines if line.epoch not in known]

    def finish(self, run: PlannedTrial, worker: Worker) -> None:
        """Report the end of a trial to Optuna."""
        for epoch, value in self._list_new(run):
            run.trial.report(value, epoch)
        frozen = self._list()[run.trial.number]
        result = frozen.intermediate_values.get(frozen.last_step)
        if worker.process.returncode != 0 and run.name in self._pruned:
            self._tell(run.trial, state=self.optuna.trial.TrialState.PRUNED)
        elif worker.process.returncode != 0:
            logger.error("%s", worker.describe_end(str(worker.log)))
            status = read_status(run.folder.path / STATUS)
            said = status.message if status is not None and status.state == "failed" else ""
            self._fail(run.trial, said or worker.describe_end().splitlines()[-1].removeprefix("  | volseg: "))
        elif result is None or not math.isfinite(result):
            self._fail(run.trial, f"{self.terms['metric']} is not a finite number after the last epoch")
        else:
            self._tell(run.trial, values=result)
            logger.info("%s: %s %.4f in %.0f s", run.name, self.terms["metric"], result, worker.seconds)
        self.write()

    def _fail(self, trial: Any, error: str) -> None:
        logger.error("trial %d failed: %s", trial.number, error)
        trial.set_user_attr("error", error)
        self._tell(trial, state=self.optuna.trial.TrialState.FAIL)

    def _tell(self, trial: Any, **result: Any) -> None:
        self.study.tell(trial, **result)
        del self._own[trial.number]

    def release(self) -> None:
        """Release the stopped trials for the next search."""
        for trial in self._own.values():
            trial.set_user_attr("owner", None)

    def write(self) -> None:
        """Write the state of all trials, and their page."""
        trials = [self._describe(frozen) for frozen in self._list()]
        content = {"name": self.terms["config"]["name"], **self.facts, **self.terms, "trials": trials}
        RunFolder(self.folder).write_json(SEARCH, replace_nan(content))
        attempt("search.html was not written", lambda: write_report(self.folder))

    def _describe(self, frozen: Any) -> dict[str, Any]:
        is_left = frozen.state.name == "RUNNING" and not frozen.user_attrs.get("owner")
        return {
            "number": frozen.number,
            "state": "interrupted" if is_left else STATES[frozen.state.name],
            "value": frozen.intermediate_values.get(frozen.last_step) if frozen.value is None else frozen.value,
            "epochs": frozen.last_step,
            "seconds": sum(part.seconds for part in read_times(self._find_folder(frozen.number) / TIMES)),
            "values": frozen.params,
            "error": frozen.user_attrs.get("error", ""),
        }
