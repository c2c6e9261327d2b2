"""Resolve the mesh of a training, before its model is built: which processes compute which rows and slabs.

If the config does not decide whether samples are dealt to replicas or cut, an estimate of a training step does. If a
network cannot be traced, replicas share the batch.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from volseg.config.parallel import MeshPlan
from volseg.config.schema import ExperimentConfig
from volseg.data.augmented import EpochBatches
from volseg.data.case_store.preparing import ALONE, PreparedCases, Readers, meet_readers
from volseg.data.cases import Task
from volseg.estimate.candidate import Candidate, Estimate, name_candidate
from volseg.estimate.search import SURE, choose
from volseg.estimate.step_memory import MemoryUse
from volseg.experiment.building import build_batches, build_predictor, build_validation, preprocessing_of
from volseg.experiment.cases import ChosenCases, open_cache, prepare_chosen
from volseg.experiment.placement.alternatives import Gpus, get_estimate, run_plan, take_candidate
from volseg.parallel.devices import count_launched, count_processes, is_main_process
from volseg.parallel.processes.group import decide_together, make_group, start_group
from volseg.parallel.replicas import Mesh, Replicas, join_mesh
from volseg.parallel.spatial.plan.shards import spans
from volseg.workflow.distributed import (
    FollowedModel,
    GroupBatches,
    GroupValidation,
    SpreadValidation,
    is_cut_over_processes,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TrainingMesh:
    """Process mesh of a training, and the place of this process in it."""

    plan: MeshPlan
    mesh: Mesh
    replicas: Replicas | None = None
    """Replicas that share each batch; None for one replica."""
    readers: Readers = ALONE
    """Processes that read cases: the first process of each replica, which sends slabs to its other processes."""
    judges: dist.ProcessGroup | None = None
    """Gloo group of the processes that read and so validate; None for one process, and in the others."""
    estimate: MemoryUse | None = None
    """Memory of a step in the plan that chose the mesh, on the leader; None without a plan."""

    @property
    def reads(self) -> bool:
        """Whether this process reads cases."""
        return self.readers.number is not None

    def deal(self, batch_size: int) -> list[slice]:
        """Return the rows of a batch that this process computes, a slice for each of its replicas."""
        if self.replicas is None:
            return [slice(0, batch_size)]
        dealt = self.replicas.deal(batch_size)
        return [dealt[replica] for replica in self.replicas.own]


def describe_mesh(plan: MeshPlan, config: ExperimentConfig, reason: str | None = None) -> str:
    """Return a sentence that describes the devices' shares of each step's batch."""
    batch, batches = config.patch.batch, config.training.accumulate
    parts = [f"each step's batch of {batch}"]
    if plan.data > 1:
        dealt = " + ".join(str(stop - start) for start, stop in spans(batch, plan.data))
        parts = [f"{plan.data} replicas of the network, each step's batch of {batch} dealt {dealt}"]
    if batches > 1:
        parts.append(f"{batches} batches per optimizer step")
    if plan.spatial > 1:
        parts.append(f"every volume cut into {plan.spatial} slabs")
    if plan.pipeline > 1:
        parts.append(f"the layers over {plan.pipeline} devices of each process")
    if plan.num_processes < plan.data * plan.spatial:
        parts.append(f"all of it computed by {plan.num_processes} process(es)")
    return ", ".join(parts) + (f": {reason}" if reason else "")


def join_processes(config: ExperimentConfig) -> None:
    """Start the process group of a job of several processes (``torchrun``, ``--gpus``).

    Raises
    ------
    ConfigError
        If this number of processes cannot run the config.
    """
    count = count_launched()
    config.mesh(count)  # before any process waits for another
    if count > 1:
        start_group(config.parallel.timeout, on_cpu=config.device == "cpu")


def resolve_mesh(config: ExperimentConfig, device: torch.device) -> tuple[ExperimentConfig, TrainingMesh]:
    """Return the config with its mesh resolved, and the mesh; every process calls this function."""
    count = count_processes()
    plan, reason, forecast = config.mesh(count), None, Forecast()
    is_auto = config.parallel.strategy == "auto" and config.parallel.num_gpus == 1
    if count > 1 and (is_auto or plan.is_open):
        forecast = choose_by_estimate(config, device)
    if forecast.chosen is not None:
        config, reason = take_candidate(config, forecast.chosen), forecast.why
        plan = config.mesh(count)
    settled = config.with_mesh(plan) if count > 1 else config
    settled.mesh(count)  # the resolved mesh may not fit other settings
    if is_main_process() and plan.data * plan.spatial * plan.pipeline > 1:
        logger.info("%s", describe_mesh(plan, config, reason))
    mesh = join_mesh(plan.data_processes, plan.spatial_processes)
    replicas = mesh.replicas(plan.data, config.training.deterministic) if plan.data > 1 else None
    readers, judges = ALONE, None
    if count > 1:  # separate groups: a thread communicates in them during other work
        readers = meet_readers(make_group(backend="gloo"), reads=mesh.shard == 0)
        judges = make_group(list(range(0, count, mesh.spatial)), "gloo") if mesh.data > 1 else None
    return settled, TrainingMesh(
        plan=plan,
        mesh=mesh,
        replicas=replicas,
        readers=readers,
        judges=judges if mesh.shard == 0 else None,
        estimate=forecast.memory,
    )


# Choose replicas and slabs for the processes of a job, by estimates.


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Answer of `volseg plan` about the mesh of a job; the same in all processes, except for ``memory``."""

    chosen: Candidate | None = None
    """None if the training cannot be estimated."""
    why: str | None = None
    memory: MemoryUse | None = None
    """Memory of the chosen candidate's training steps, on the leader."""


def choose_by_estimate(config: ExperimentConfig, device: torch.device) -> Forecast:
    """Return the fastest estimate on this job's processes, and the reason.

    Every process calls this function and gets the leader's choice. Each process has one GPU, so a pipeline is not a
    candidate. On a CPU, where memory is uncertain, and without estimates, nothing is chosen.

    Parameters
    ----------
    config : ExperimentConfig
        The config, with its planned network.
    device : torch.device
        Device of this process.
    """
    gpus = Gpus.find(device, count_processes())
    if gpus is None:  # the same in all processes of a job
        return Forecast()
    forecasts: list[Estimate] = []

    def decide() -> Mapping[str, Any]:
        # A pipeline is not a candidate, and its micro-batches take long to trace.
        answer = run_plan(config.with_values(parallel={"pipeline": 1}), gpus)
        forecasts.extend(answer.forecasts)
        if answer.problem:
            logger.warning(
                "no estimate of a training step (%s), so samples are not cut; set parallel.spatial: N to cut them",
                answer.problem,
            )
        chosen, why = choose_mesh(answer.forecasts, gpus.count, int(SURE * gpus.memory) - answer.reserve)
        return {"chosen": chosen and vars(chosen), "why": why}

    told = decide_together(decide)
    if told["chosen"] is None:
        return Forecast()
    chosen = Candidate(**told["chosen"])
    known = get_estimate(chosen, forecasts)
    memory = None if known is None or known.memory is None else known.memory.of_steps()
    return Forecast(chosen=chosen, why=told["why"], memory=memory)


def choose_mesh(forecasts: Sequence[Estimate], num_processes: int, capacity: int) -> tuple[Candidate | None, str]:
    """Return the fastest candidate with one process per GPU that surely fits, else the smallest, and the reason.

    Parameters
    ----------
    forecasts : sequence of Estimate
        Estimates of the traced candidates.
    num_processes : int
        Processes; the candidate must use all of them.
    capacity : int
        Bytes of a GPU that the candidate may use.
    """
    suited = [
        (each.memory.total, each)
        for each in forecasts
        if each.candidate.num_gpus == num_processes and each.candidate.pipeline == 1 and each.memory is not None
    ]
    if not suited:
        return None, ""
    if fitting := [each for size, each in suited if size <= capacity]:
        chosen, why = choose(fitting)
        return (None if chosen is None else chosen.candidate), why
    size, smallest = min(suited, key=lambda each: each[0])
    takes = f"{size / 2**30:.1f} GiB of {capacity / 2**30:.1f} GiB"
    return smallest.candidate, f"{name_candidate(smallest.candidate)} needs the least memory, but may not fit ({takes})"


# Read the cases of a training: one of the processes that share a volume reads, the others receive slabs.
#
# The reader of a replica makes its rows of each batch and validates its share of the cases. A follower computes on the
# slabs that it receives. A network that is not cut over processes has only readers.


@dataclass(frozen=True)
class CaseReading:
    """The share of one process in reading: of the cases, of the batches and of validations."""

    config: ExperimentConfig
    """Config of the training."""
    mesh: TrainingMesh
    """Mesh with the readers and the replicas."""
    spacing: Sequence[float] = (1.0, 1.0, 1.0)
    """Voxel sides of the prepared cases along D, H, W, in mm."""

    def prepare(self, chosen: ChosenCases) -> PreparedCases:
        """Return prepared cases, without bad ones if the config skips bad cases.

        A reading process has all training cases and its share of the validation cases; other processes have none.
        """
        preprocessing = preprocessing_of(self.config)
        return prepare_chosen(
            chosen,
            preprocessing,
            skip_bad=self.config.data.skip_bad,
            readers=self.mesh.readers,
            cache=open_cache(self.config, chosen.task, preprocessing) if self.mesh.reads else None,
        )

    def make_batches(self, prepared: PreparedCases, task: Task, model: nn.Module, device: torch.device) -> EpochBatches:
        """Return this process's part of the batches of prepared training cases."""
        config, batches = self.config, None
        if self.mesh.reads:
            rows = self.mesh.deal(config.patch.batch)
            batches = build_batches(config, task, prepared.training, device, rows=rows, spacing=self.spacing)
        if is_cut_over_processes(model):
            return GroupBatches(model, batches, config.training.iterations, batch_size=config.patch.batch)
        assert batches is not None, "a follower of a model that is not shared"
        return batches

    def make_validation(
        self,
        model: nn.Module,
        task: Task,
        prepared: PreparedCases,
        *,
        mirror: bool,
        folder: Path | None = None,
        show: bool = False,
    ) -> SpreadValidation | GroupValidation:
        """Return a validation of prepared cases; every process takes part in it.

        Parameters
        ----------
        model : nn.Module
            The model in training.
        task : Task
            Task with the labels.
        prepared : PreparedCases
            Result of `prepare`.
        mirror : bool
            Whether predictions are averaged over mirrorings.
        folder : Path, optional
            Folder in which the processes write their predictions, after the training.
        show : bool
            Whether a progress bar counts the cases of the leader.
        """
        called = FollowedModel(model) if is_cut_over_processes(model) else model
        predictor, own = build_predictor(self.config, task, (called,), mirror=mirror), None
        if self.mesh.reads:
            validation = build_validation(
                self.config, task, predictor, prepared.validation, folder=folder, show=show and is_main_process()
            )
            own = SpreadValidation(validation, prepared.order, self.mesh.judges)
        if is_cut_over_processes(model):
            return GroupValidation(model, own, predictor.autocast)
        assert own is not None, "a follower of a model that is not shared"
        return own
