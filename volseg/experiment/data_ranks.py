"""Read the cases of a training: of the processes that share a volume one reads, the others follow it.

The reader of a replica makes its rows of each batch and validates its share of the cases. A follower computes on the
slabs that it is sent. A network that is not cut over processes has only readers.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from volseg.config.schema import ExperimentConfig
from volseg.data.augmented import EpochBatches
from volseg.data.cases import Task
from volseg.data.preparing import PreparedCases
from volseg.experiment.building import build_batches, build_predictor, build_validation, preprocessing_of
from volseg.experiment.cases import ChosenCases, open_cache, prepare_chosen
from volseg.experiment.training_mesh import TrainingMesh
from volseg.parallel.devices import is_main_process
from volseg.workflow.spatial_group import FollowedModel, GroupBatches, GroupValidation, is_cut_over_processes
from volseg.workflow.spread_validation import SpreadValidation

__all__ = ["CaseReading"]


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
