"""Handle a training step that runs out of memory: explain it, and resume the run with less memory if the config allows.

With ``parallel.on_oom: replan`` a run resumes from its last checkpoint with settings that need less memory on the same
devices, but only once. A second failure ends the run: it may be a leak, and every attempt costs minutes of GPUs.

A single process frees its memory and starts again on its own. Of several processes, only one may fail while the others
wait for it in a collective that cannot be interrupted. So all of them restart without the launcher's
knowledge, and pass the failure on in an environment variable. After the restart the leader chooses for all of them:
then no process waits in a collective, and the GPUs are empty.

The mesh and the kernels may change, and with them the order of sums: weights agree to round-off, not bit by bit.
Unchanged are the batch of an optimizer step, its cases and augmentations, the network's random seeds, the learning
rate, and the number of steps.
"""

import json
import logging
import multiprocessing
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from volseg.checkpointing.job_folder import JobFolder
from volseg.config.loading import build_config, require_sound_overrides
from volseg.config.parallel import ParallelConfig
from volseg.config.registry import read_record
from volseg.config.schema import ExperimentConfig
from volseg.data.json_files import read_json
from volseg.errors import CheckpointError, ConfigError, OutOfMemoryError
from volseg.estimate.candidate import Candidate
from volseg.experiment.placement.alternatives import (
    Answer,
    Gpus,
    describe_attempt,
    describe_estimate,
    describe_remedies,
    is_out_of_memory,
    list_lines,
    list_overrides,
    rank_smaller,
    run_plan,
    take_candidate,
)
from volseg.experiment.placement.placed_network import choose_device
from volseg.parallel.devices import count_gpus, count_processes, is_distributed, name_own_place
from volseg.parallel.processes.first_error import begin_all_anew
from volseg.parallel.processes.group import decide_together, gather_over_processes, get_supervision
from volseg.parallel.processes.progress import get_milestone

logger = logging.getLogger(__name__)

REPLANNED = "replanned.json"
"""File of the run folder with the failure, and the settings of the run since then."""

VARIABLE = "VOLSEG_OUT_OF_MEMORY"
"""Environment variable that passes the failure to the restarted process."""

REPLACED = ("parallel.", "training.kernels=", "training.record=")
"""Beginnings of the overrides of a candidate."""

HOST_MEMORY = ("DefaultCPUAllocator", "can't allocate memory", "Storage size calculation overflowed")
"""Texts of messages about main memory, which no other use of the GPUs saves."""


class BeginAgain(Exception):  # noqa: N818 (not an error)
    """Request to restart the run in this process with other settings; the caller of `heeding` catches it."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A training step that ran out of memory."""

    where: str
    """Process, host and device."""
    at: str
    """Epoch and batch."""
    said: str
    """The allocator's message, with the attempted sizes."""
    tried: Candidate


@dataclass(frozen=True, kw_only=True)
class Replanned:
    """Settings of a run after a step ran out of memory."""

    asked: Mapping[str, Any]
    """``parallel`` of the config that failed; a resumed run with another value follows its config."""
    processes: int
    failure: Failure
    overrides: tuple[str, ...]
    """Settings of ``parallel``, and ``training.kernels`` and ``training.record``."""
    why: str

    def apply(self, config: ExperimentConfig) -> ExperimentConfig:
        """Return the config with which the run continues."""
        return build_config(config.model_dump(), self.overrides, REPLANNED)

    @classmethod
    def read(cls, content: Any, source: object) -> "Replanned":
        """Return a record from its fields as plain values.

        Raises
        ------
        CheckpointError
            If the content is not such a record.
        """
        try:
            found = read_record(cls, content)
            if strange := [each for each in found.overrides if not each.startswith(REPLACED)]:
                raise ValueError(f"{strange[0]} is not a setting of a candidate")
            require_sound_overrides(found.overrides)
        except (ConfigError, ValueError) as fault:
            raise CheckpointError(
                f"{source} should contain the settings chosen after the run ran out of memory ({fault}); restore it "
                "from a backup, or remove it to continue with the config of the run"
            ) from fault
        return found

    def __str__(self) -> str:
        how = " ".join(f"--set {override}" for override in self.overrides)
        failed = f"{self.failure.where} ran out of memory at {self.failure.at}"
        return f"{failed}; since then, and only once, the run continues with {how}: {self.why}"


class Replanning:
    """Response of a training to a step that runs out of memory.

    Parameters
    ----------
    config : ExperimentConfig
        Config of the training, as given.
    """

    def __init__(self, config: ExperimentConfig) -> None:
        self.config = config
        self.replanned: Replanned | None = None
        """Settings of a replanned run."""
        self.tried: Candidate | None = None
        """The candidate that the training runs, once it is settled."""
        said = os.environ.pop(VARIABLE, None)
        self.failure = None if said is None else read_record(Failure, json.loads(said))

    def settle(self, role: JobFolder, config: ExperimentConfig, resume: bool) -> ExperimentConfig:
        """Return the config with the replanned settings after a failure; every process calls this function.

        Raises
        ------
        OutOfMemoryError
            If no candidate needs less memory.
        """
        failures = gather_over_processes([json.dumps(asdict(self.failure))] if self.failure else [])
        count = count_processes()

        def decide() -> dict[str, Any] | None:
            if failures:
                found = _choose(config, read_record(Failure, json.loads(failures[0])), count)
                logger.warning("%s", found)
                return asdict(found)
            file = role.folder.path / REPLANNED
            if not resume or not file.exists():
                return None
            found = Replanned.read(read_json(file), file)
            if dict(found.asked) != _list_asked(config) or found.processes != count:
                logger.info("%s is for another mesh; the requested mesh is used", file)
                return None
            logger.info("%s", found)
            return asdict(found)

        if (told := decide_together(decide)) is None:
            return config
        self.replanned = Replanned.read(told, REPLANNED)
        return self.replanned.apply(config)

    def files(self) -> dict[str, Any]:
        """Return the record for the run folder."""
        return {} if self.replanned is None else {REPLANNED: asdict(self.replanned)}

    @contextmanager
    def heeding(self) -> Iterator[None]:
        """Handle a step that runs out of memory within the block; any other error passes.

        Raises
        ------
        OutOfMemoryError
            If the run ends, with remedies.
        BeginAgain
            If the run restarts in this process. With several processes, all restart as processes instead.
        """
        try:
            yield
        except OutOfMemoryError as fault:
            cause = fault.__cause__
            if self.tried is None or cause is None:
                raise
            if not _is_of_step(self.config, cause):
                raise OutOfMemoryError(
                    f"{fault}. The failure was not in a training step ({get_milestone()}), so replanning cannot help"
                ) from cause
            said = describe_attempt(self.config, choose_device(self.config), cause)
            failure = Failure(where=name_own_place(), at=str(get_milestone()), said=said, tried=self.tried)
            if self.config.parallel.on_oom != "replan" or self.replanned is not None:
                raise OutOfMemoryError(self._explain(failure)) from cause
            self._go_on(failure)
            raise BeginAgain from None

    def _go_on(self, failure: Failure) -> None:
        """Keep the failure for the next attempt, in this process or in the restarted processes."""
        supervision = get_supervision()
        if supervision is None or not is_distributed():
            self.failure = failure
            return
        if multiprocessing.parent_process() is not None:  # a restart would lose the pipe to its parent
            raise OutOfMemoryError(
                f"{failure.said}. parallel.on_oom: replan restarts processes, but those of multiprocessing "
                "cannot restart; start them with torchrun or volseg train --gpus"
            )
        begin_all_anew(failure.said, supervision, {VARIABLE: json.dumps(asdict(failure))})

    def _explain(self, failure: Failure) -> str:
        """Return the failure with remedies."""
        answer = _forecast(self.config, failure.tried, more_gpus=True)
        lines = list_lines(self.config, rank_smaller(failure.tried, answer.forecasts), count_processes())
        before = [] if self.replanned is None else [f"{self.replanned}. A second failure ends the run."]
        ways = ["Settings that need less memory, fastest first:", *lines] if lines else []
        fitting = [f"It would fit: {remedy}." for remedy in answer.remedies]
        lacking = [f"Their memory could not be estimated: {answer.problem}."] if answer.problem else []
        tried = self.config if self.replanned is None else self.replanned.apply(self.config)
        told = [f"{failure.said}, at {failure.at}.", *before, *ways, *lacking, *fitting, describe_remedies(tried)]
        return "\n".join(told)


def _is_of_step(config: ExperimentConfig, cause: BaseException) -> bool:
    """Return whether the failed allocation was of a training step on its device."""
    if not is_out_of_memory(cause) or get_milestone().phase != "train":
        return False
    if choose_device(config).type == "cpu":
        return True
    return not isinstance(cause, MemoryError) and not any(text in str(cause) for text in HOST_MEMORY)


def _list_asked(config: ExperimentConfig) -> dict[str, Any]:
    """Return a config's settings of the mesh."""
    return config.parallel.model_dump(mode="json", exclude={"on_oom", "timeout"})


def _choose(config: ExperimentConfig, failure: Failure, processes: int) -> Replanned:
    """Return the settings to continue with: the fastest estimate that fits, else the smallest.

    Raises
    ------
    OutOfMemoryError
        If no candidate needs less memory.
    """
    answer = _forecast(config, failure.tried, more_gpus=False)
    for way in rank_smaller(failure.tried, answer.forecasts):
        if way.candidate.num_gpus != failure.tried.num_gpus or not _suits(way.candidate, processes):
            continue
        try:
            changed = take_candidate(config, way.candidate, one_process=processes == 1)
        except ConfigError:  # for example, kernels that the config names
            continue
        return Replanned(
            asked=_list_asked(config),
            processes=processes,
            failure=failure,
            overrides=tuple(list_overrides(config, changed)),
            why=describe_estimate(way),
        )
    raise OutOfMemoryError(
        f"{failure.said}. parallel.on_oom: replan found no settings that need less memory on the same devices"
    )


def _suits(candidate: Candidate, processes: int) -> bool:
    """Return whether the job's processes can run a candidate: their number and GPUs stay the same."""
    return candidate.data * candidate.spatial == processes if processes > 1 else candidate.data == 1


def _forecast(config: ExperimentConfig, tried: Candidate, *, more_gpus: bool) -> Answer:
    """Return the estimates of all candidates on the GPUs of the training, or on all visible GPUs if they are more.

    This process waits some seconds for the answer: it has nothing else to do.
    """
    count = max(tried.num_gpus, count_gpus() if more_gpus else 0)
    gpus = Gpus.find(choose_device(config), count)
    if gpus is None:
        return Answer()
    is_open = config.model_copy(update={"parallel": ParallelConfig(timeout=config.parallel.timeout)})
    answer = run_plan(is_open, gpus, thorough=True)
    if answer.problem:
        logger.warning("could not estimate what would fit: %s", answer.problem)
    return answer
