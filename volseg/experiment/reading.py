"""Who reads the cases of a training: of the processes that share a volume one reads, the others follow it.

The reader of a replica makes its rows of each batch and validates its share of the cases. A follower computes on the
slabs that it is sent. A network that is not cut over processes has readers alone.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from volseg.config.schema import ExperimentConfig
from volseg.data.augmented import EpochBatches
from volseg.data.cases import Case, Task
from volseg.data.preparing import PreparedCases
from volseg.experiment.building import build_batches, build_metrics, build_predictor, preprocessing_of
from volseg.experiment.cases import ChosenCases, open_cache, prepare_chosen
from volseg.experiment.scoring import build_scoring
from volseg.experiment.training_mesh import TrainingMesh
from volseg.inference.predictor import Predictor
from volseg.monitoring.progress import progress
from volseg.parallel.devices import is_main_process
from volseg.workflow.spatial_group import FollowedModel, GroupBatches, GroupValidation, is_cut_over_processes
from volseg.workflow.spread_validation import SpreadValidation
from volseg.workflow.validation import Validation

__all__ = ["Follower", "Reader", "choose_reading"]


def choose_reading(
    config: ExperimentConfig, mesh: TrainingMesh, spacing: Sequence[float] = (1.0, 1.0, 1.0)
) -> "Follower":
    """Return whether this process reads or follows; ``spacing``: voxel sides after preprocessing, in mm."""
    return Reader(config, mesh, spacing) if mesh.reads else Follower(config, mesh)


class Follower:
    """A process that computes on the slabs it is sent.

    Parameters
    ----------
    config : ExperimentConfig
        Of the training.
    mesh : TrainingMesh
        Whom it trains with.
    """

    def __init__(self, config: ExperimentConfig, mesh: TrainingMesh) -> None:
        self.config = config
        self.mesh = mesh

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
        batches = self._cut_batches(prepared, task, device)
        if is_cut_over_processes(model):
            length, batch_size = self.config.training.iterations, self.config.patch.batch
            return GroupBatches(model, batches, length, batch_size=batch_size)
        assert batches is not None, "a follower of a model that is not shared"
        return batches

    def _cut_batches(self, prepared: PreparedCases, task: Task, device: torch.device) -> EpochBatches | None:
        del prepared, task, device
        return None

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
        predictor = build_predictor(self.config, task, (called,), mirror=mirror)
        validation = self._judge(predictor, task, prepared, folder, show)
        if is_cut_over_processes(model):
            return GroupValidation(model, validation, predictor.autocast)
        assert validation is not None, "a follower of a model that is not shared"
        return validation

    def _judge(
        self, predictor: Predictor, task: Task, prepared: PreparedCases, folder: Path | None, show: bool
    ) -> SpreadValidation | None:
        del predictor, task, prepared, folder, show
        return None


class Reader(Follower):
    """The process that reads the cases of a replica.

    Parameters
    ----------
    config : ExperimentConfig
        Of the training.
    mesh : TrainingMesh
        Whom it trains with.
    spacing : sequence of float
        Voxel sides of the prepared cases along D, H, W, in mm.
    """

    def __init__(self, config: ExperimentConfig, mesh: TrainingMesh, spacing: Sequence[float]) -> None:
        super().__init__(config, mesh)
        self.spacing = spacing

    def _cut_batches(self, prepared: PreparedCases, task: Task, device: torch.device) -> EpochBatches:
        rows = self.mesh.deal(self.config.patch.batch)
        return build_batches(self.config, task, prepared.training, device, rows=rows, spacing=self.spacing)

    def _judge(
        self, predictor: Predictor, task: Task, prepared: PreparedCases, folder: Path | None, show: bool
    ) -> SpreadValidation:
        cases = prepared.validation
        validation = Validation(
            predictor,
            cases,
            task.structures,
            ignore=task.ignore,
            values=task.class_values,
            metrics=build_metrics(self.config, task),
            scoring=build_scoring(self.config, task),
            folder=folder,
            batch_size=self.config.inference.batch,
            show=_bar(cases, "validating") if show and is_main_process() else iter,
        )
        return SpreadValidation(validation, prepared.order, self.mesh.judges)


def _bar(cases: Sequence[Case], title: str) -> Callable[[Iterable[Any]], Iterable[Any]]:
    return partial(progress, title=title, total=len(cases))
