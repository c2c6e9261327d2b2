"""The mesh of a training: which processes compute which rows and slabs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from volseg.config.parallel import MeshPlan
from volseg.config.schema import ExperimentConfig
from volseg.data.augmented import EpochBatches
from volseg.data.cases import Task
from volseg.data.preparing import PreparedCases
from volseg.data.reading_group import ALONE, Readers
from volseg.estimate.step_memory import MemoryUse
from volseg.experiment.building import build_batches, build_predictor, build_validation, preprocessing_of
from volseg.experiment.cases import ChosenCases, open_cache, prepare_chosen
from volseg.parallel.devices import is_main_process
from volseg.parallel.mesh import Mesh
from volseg.parallel.replicas import Replicas
from volseg.parallel.spatial.plan.shards import spans
from volseg.workflow.spatial_group import FollowedModel, GroupBatches, GroupValidation, is_cut_over_processes
from volseg.workflow.spread_validation import SpreadValidation

__all__ = ["CaseReading", "TrainingMesh", "describe_mesh"]


@dataclass(frozen=True, kw_only=True)
class TrainingMesh:
    """Process mesh of a training, and the place of this process in it."""

    plan: MeshPlan
    mesh: Mesh
    replicas: Replicas | None = None
    """Who shares each batch; None where there is one replica."""
    readers: Readers = ALONE
    """Who reads cases: the first process of each replica, from which the others of it get their slabs."""
    judges: dist.ProcessGroup | None = None
    """On gloo, of the processes that read and so validate; None where there is one, and in those that do not."""
    estimate: MemoryUse | None = None
    """Memory of a step by the plan that chose the mesh, in the leader; None where no plan was made."""

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
    """Return in a sentence what the devices do with each step's batch."""
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


# Read the cases of a training: of the processes that share a volume one reads, the others follow it.
#
# The reader of a replica makes its rows of each batch and validates its share of the cases. A follower computes on the
# slabs that it is sent. A network that is not cut over processes has only readers.


class CaseReading:
    """The part of one process in reading: of the cases, of the batches and of validations.

    Parameters
    ----------
    config : ExperimentConfig
        Of the training.
    mesh : TrainingMesh
        Who reads, and who trains together.
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
        """Return prepared cases, without bad ones if the config would rather leave these out than stop.

        A process that reads has all cases that train and its share of those that validate, another one none.
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
        """Return a validation of prepared cases, in which every process takes part.

        Parameters
        ----------
        model : nn.Module
            The model in training.
        task : Task
            Its labels.
        prepared : PreparedCases
            What `prepare` returned.
        mirror : bool
            Whether predictions are averaged over mirrorings.
        folder : Path, optional
            Where the predictions are written, after the training, by the processes that make them.
        show : bool
            Whether a bar counts the cases of the leader.
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
