"""The mesh of a training: the rows and slabs that each process computes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from volseg.config.parallel import MeshPlan
from volseg.config.schema import ExperimentConfig
from volseg.data.augmented import EpochBatches
from volseg.data.case_store.preparing import PreparedCases
from volseg.data.case_store.reading_group import ALONE, Readers
from volseg.data.cases import Task
from volseg.estimate.step_memory import MemoryUse
from volseg.experiment.building import build_batches, build_predictor, build_validation, preprocessing_of
from volseg.experiment.cases import ChosenCases, open_cache, prepare_chosen
from volseg.parallel.devices import is_main_process
from volseg.parallel.replicas import Mesh, Replicas
from volseg.parallel.spatial.plan.shards import spans
from volseg.workflow.distributed import (
    FollowedModel,
    GroupBatches,
    GroupValidation,
    SpreadValidation,
    is_cut_over_processes,
)


@dataclass(frozen=True, kw_only=True)
class TrainingMesh:
    """Process mesh of a training, and the place of this process in it."""

    plan: MeshPlan
    mesh: Mesh
    replicas: Replicas | None = None
    """Replicas that share each batch; None for one replica."""
    readers: Readers = ALONE
    """Processes that read cases: the first process of each replica, which sends slabs to the replica's others."""
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


# Read the cases of a training: one of the processes that share a volume reads, the others receive slabs.
#
# The reader of a replica makes its rows of each batch and validates its share of the cases. A follower computes on the
# slabs that it receives. A network that is not cut over processes has only readers.


class CaseReading:
    """The share of one process in reading: of the cases, of the batches and of validations.

    Parameters
    ----------
    config : ExperimentConfig
        Config of the training.
    mesh : TrainingMesh
        Mesh with the readers and the replicas.
    spacing : sequence of float
        Voxel sides of the prepared cases along D, H, W, in mm.
    """

    def __init__(
        self, config: ExperimentConfig, mesh: TrainingMesh, spacing: Sequence[float] = (1.0, 1.0, 1.0)
    ) -> None:
        self.config = config
        self.mesh = mesh
        self.spacing = spacing

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
