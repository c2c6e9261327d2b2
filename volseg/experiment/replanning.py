"""A training step that is out of memory: what is said of it, and how the run goes on in another way where it may.

With ``parallel.on_oom: replan`` a run goes on from its last checkpoint by what needs less memory on the same devices:
once. A second failure ends it, whatever it is told then: it may be a leak, and every attempt costs minutes of GPUs.

One process frees what it holds and begins again by itself. Of several one may fail alone, while the others wait for it
in a collective that nothing interrupts; so all of them begin anew as processes, with the launcher none the wiser, and
carry what happened in a variable of their environment. When they have met again the leader chooses for all of them: by
then nobody waits in a collective for it, and the GPUs are empty.

What may change: the mesh and the kernels, and with them the order of sums, so weights agree to round-off and not bit by
bit. What stays: the batch of an optimizer step, its cases and augmentations, random numbers of the network by the same
seeds, the learning rate, and the number of steps.
"""

import gc
import json
import logging
import math
import multiprocessing
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from volseg.checkpointing.ranks import JobFolder
from volseg.config.base import validated
from volseg.config.parallel import ParallelConfig
from volseg.config.records import read_record
from volseg.config.schema import ExperimentConfig
from volseg.data.json_files import read_json
from volseg.errors import CheckpointError, ConfigError, OutOfMemoryError
from volseg.estimate.candidate import Candidate, Estimate
from volseg.experiment.alternatives import (
    describe_estimate,
    find_estimate,
    list_lines,
    list_overrides,
    list_smaller,
    rank_smaller,
    take_candidate,
)
from volseg.experiment.out_of_memory import describe_attempt, describe_remedies, is_out_of_memory
from volseg.experiment.placed_network import choose_device
from volseg.experiment.plan_process import Answer, Gpus, run_plan
from volseg.parallel.devices import (
    count_gpus,
    count_processes,
    is_distributed,
    name_own_place,
    uses_gpus,
)
from volseg.parallel.processes.first_error import begin_all_anew
from volseg.parallel.processes.group import decide_together, find_supervision, gather_over_processes
from volseg.parallel.processes.progress import find_milestone

__all__ = ["REPLANNED", "BeginAgain", "Replanned", "Replanning", "free_memory"]

logger = logging.getLogger(__name__)

REPLANNED = "replanned.json"
"""File of the run folder that says what ran out of memory, and how the run goes on since."""

VARIABLE = "VOLSEG_OUT_OF_MEMORY"
"""In which a process tells itself, begun anew, what happened."""

HOST_MEMORY = ("DefaultCPUAllocator", "can't allocate memory", "Storage size calculation overflowed")
"""In messages about main memory, of which no way to use GPUs needs less."""


class BeginAgain(Exception):  # noqa: N818 (it is none)
    """The run goes on, in this process and in another way: no error, and for whoever called `Replanning.heeding`."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A training step that was out of memory."""

    where: str
    """Process, host and device."""
    at: str
    """Epoch and batch."""
    said: str
    """The allocator's words, with what was tried."""
    tried: Candidate


@dataclass(frozen=True, kw_only=True)
class Replanned:
    """How a run goes on after such a step."""

    asked: Mapping[str, Any]
    """``parallel`` of the config that failed; a run that is resumed with another one does what that says."""
    processes: int
    failure: Failure
    overrides: tuple[str, ...]
    parallel: Mapping[str, Any]
    training: Mapping[str, Any]
    """``kernels`` and ``record``."""
    why: str

    def is_for(self, config: ExperimentConfig, processes: int) -> bool:
        """Tell whether this is about what a config asks for on so many processes."""
        return dict(self.asked) == _list_asked(config) and self.processes == processes

    def apply(self, config: ExperimentConfig) -> ExperimentConfig:
        """Return the config as the run goes on."""
        training = {**config.training.model_dump(), **self.training}
        parallel = {**self.parallel, "on_oom": config.parallel.on_oom, "timeout": config.parallel.timeout}
        values = {**config.model_dump(), "parallel": parallel, "training": training}
        return validated(ExperimentConfig, values, REPLANNED)

    def as_json(self) -> dict[str, Any]:
        """Return plain values; `read` takes them back."""
        return asdict(self)

    @classmethod
    def read(cls, content: Any, source: object) -> "Replanned":
        """Return what was written down.

        Raises
        ------
        CheckpointError
            If that is something else.
        """
        try:
            found = read_record(cls, content)
            if set(found.training) != {"kernels", "record"}:
                raise ValueError(f"training must hold kernels and record, got {dict(found.training)}")
            validated(ParallelConfig, dict(found.parallel), str(source))
        except (ConfigError, ValueError) as fault:  # the config's has a line per fault
            reason = " ".join(str(fault).split())
            raise CheckpointError(
                f"{source} should say how the run goes on after it was out of memory ({reason}); restore it from a "
                "copy, or remove it and the run goes on as its config says"
            ) from fault
        return found

    def __str__(self) -> str:
        how = " ".join(f"--set {override}" for override in self.overrides)
        failed = f"{self.failure.where} was out of memory at {self.failure.at}"
        return f"{failed}; since then, and once only, the run goes on with {how}: {self.why}"


class Replanning:
    """What a training does about a step that is out of memory.

    Parameters
    ----------
    config : ExperimentConfig
        Of the training, as it was asked for.
    """

    def __init__(self, config: ExperimentConfig) -> None:
        self.config = config
        self.replanned: Replanned | None = None
        """How the run goes on, where it was replanned."""
        self.tried: Candidate | None = None
        """What the training does, once that is settled."""
        said = os.environ.pop(VARIABLE, None)
        self.failure = None if said is None else read_record(Failure, json.loads(said))

    def settle(self, role: JobFolder, config: ExperimentConfig, resume: bool) -> ExperimentConfig:
        """Return the config with how the run goes on, where a step was out of memory; every process calls this.

        Raises
        ------
        OutOfMemoryError
            If nothing takes less.
        """
        failures = gather_over_processes([json.dumps(asdict(self.failure))] if self.failure else [])
        count = count_processes()

        def decide() -> dict[str, Any] | None:
            if failures:
                found: Replanned | None = _choose(config, read_record(Failure, json.loads(failures[0])), count)
                logger.warning("%s", found)
            else:
                found = self._read(role, config, count) if resume else None
            return None if found is None else found.as_json()

        if (told := decide_together(decide)) is None:
            return config
        self.replanned = Replanned.read(told, REPLANNED)
        return self.replanned.apply(config)

    def _read(self, role: JobFolder, config: ExperimentConfig, count: int) -> Replanned | None:
        """Return what the run folder says of it, if that is about this config."""
        file = role.folder.path / REPLANNED
        if not file.exists():
            return None
        found = Replanned.read(read_json(file), file)
        if not found.is_for(config, count):
            logger.info("%s is about another mesh than is asked for now, which is tried as it is", file)
            return None
        logger.info("%s", found)
        return found

    def files(self) -> dict[str, Any]:
        """Return what the run folder keeps of it."""
        return {} if self.replanned is None else {REPLANNED: self.replanned.as_json()}

    @contextmanager
    def heeding(self) -> Iterator[None]:
        """Do something about a step that is out of memory within the block; any other error passes.

        Raises
        ------
        OutOfMemoryError
            Where the run ends by it, with what would fit.
        BeginAgain
            Where the run goes on in this process. Of several processes all begin anew from here.
        """
        try:
            yield
        except OutOfMemoryError as fault:
            cause = fault.__cause__
            if self.tried is None or cause is None:
                raise
            if not _is_of_step(self.config, cause):
                raise OutOfMemoryError(
                    f"{fault}. It was no training step ({find_milestone()}), so no other way to run one is suggested"
                ) from cause
            said = describe_attempt(self.config, choose_device(self.config), cause)
            failure = Failure(where=name_own_place(), at=str(find_milestone()), said=said, tried=self.tried)
            if self.config.parallel.on_oom != "replan" or self.replanned is not None:
                raise OutOfMemoryError(self._explain(failure)) from cause
            self._go_on(failure)
            raise BeginAgain from None

    def _go_on(self, failure: Failure) -> None:
        """Keep the failure for the next attempt, in this process or in those that all processes become."""
        supervision = find_supervision()
        if supervision is None or not is_distributed():
            self.failure = failure
            return
        if multiprocessing.parent_process() is not None:  # whose pipe to its parent would be gone
            raise OutOfMemoryError(
                f"{failure.said}. parallel.on_oom: replan restarts processes, which those of multiprocessing "
                "cannot; start them by torchrun, or by volseg train --gpus"
            )
        begin_all_anew(failure.said, supervision, {VARIABLE: json.dumps(asdict(failure))})

    def _explain(self, failure: Failure) -> str:
        """Return the failure with what would fit."""
        answer = _forecast(self.config, failure.tried, more_gpus=True)
        lines = list_lines(self.config, _list_ways(self.config, failure, answer.forecasts), count_processes())
        before = [] if self.replanned is None else [f"{self.replanned}. A second time ends the run."]
        ways = ["What takes less, fastest first:", *lines] if lines else []
        fitting = [f"It would fit: {remedy}." for remedy in answer.remedies]
        lacking = [f"How much each takes is not forecast: {answer.problem}."] if answer.problem else []
        tried = self.config if self.replanned is None else self.replanned.apply(self.config)
        told = [f"{failure.said}, at {failure.at}.", *before, *ways, *lacking, *fitting, describe_remedies(tried)]
        return "\n".join(told)


def free_memory() -> None:
    """Give back what a failed attempt held, when nothing refers to it any more."""
    gc.collect()  # models and graphs of autograd are full of circles
    if uses_gpus():
        torch.cuda.empty_cache()


def _is_of_step(config: ExperimentConfig, cause: BaseException) -> bool:
    """Tell whether a training step was what did not fit its device."""
    if not is_out_of_memory(cause) or find_milestone().phase != "train":
        return False
    if choose_device(config).type == "cpu":
        return True
    return not isinstance(cause, MemoryError) and not any(text in str(cause) for text in HOST_MEMORY)


def _list_asked(config: ExperimentConfig) -> dict[str, Any]:
    """Return what a config says of who computes what."""
    return config.parallel.model_dump(mode="json", exclude={"on_oom", "timeout"})


def _choose(config: ExperimentConfig, failure: Failure, processes: int) -> Replanned:
    """Return how a run goes on: the fastest that fits by forecast, else what takes least of any network's memory.

    Raises
    ------
    OutOfMemoryError
        If nothing takes less.
    """
    forecasts = _forecast(config, failure.tried, more_gpus=False).forecasts
    ways = [
        way
        for way in _list_ways(config, failure, forecasts)
        if way.candidate.num_gpus == failure.tried.num_gpus and _suits(way.candidate, processes)
    ]
    if not any(way.runs for way in ways):  # what takes least comes first then: this is done once
        ways.reverse()  # the most thorough first, where nobody knows how much it needs
        ways.sort(key=lambda way: math.inf if way.memory is None else way.memory.total)
    for way in ways:
        try:
            changed = take_candidate(config, way.candidate, processes)
        except ConfigError:  # kernels that were asked for, say
            continue
        training = changed.training
        return Replanned(
            asked=_list_asked(config),
            processes=processes,
            failure=failure,
            overrides=tuple(list_overrides(config, changed)),
            parallel=changed.parallel.model_dump(mode="json"),
            training={"kernels": training.kernels, "record": training.record},
            why=describe_estimate(way),
        )
    raise OutOfMemoryError(
        f"{failure.said}. parallel.on_oom: replan found nothing that takes less memory on the same devices"
    )


def _suits(candidate: Candidate, processes: int) -> bool:
    """Tell whether so many processes can run a candidate: they stay as many, each with the GPUs that it has."""
    return candidate.data * candidate.spatial == processes if processes > 1 else candidate.data == 1


def _list_ways(config: ExperimentConfig, failure: Failure, forecasts: Sequence[Estimate]) -> list[Estimate]:
    """Return what takes less memory, fastest first, with its numbers where they can be told."""
    if fitting := rank_smaller(failure.tried, forecasts):
        return fitting
    return [
        find_estimate(each, forecasts) or Estimate(candidate=each, refused="less memory; how much is not known")
        for each in list_smaller(failure.tried, config.patch.batch)
    ]


def _forecast(config: ExperimentConfig, tried: Candidate, *, more_gpus: bool) -> Answer:
    """Return what is forecast of every way to use the GPUs of the training, or all that are visible if they are more.

    Seconds in which this process waits: it has nothing else to do.
    """
    count = max(tried.num_gpus, count_gpus() if more_gpus else 0)
    gpus = Gpus.find(choose_device(config), count)
    if gpus is None:
        return Answer()
    is_open = config.model_copy(update={"parallel": ParallelConfig()})
    answer = run_plan(is_open, gpus, thorough=True)
    if answer.problem:
        logger.warning("no forecast of what would fit: %s", answer.problem)
    return answer
