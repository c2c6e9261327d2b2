"""Begin a training with the weights of another one: of a run, a checkpoint, or anybody's ``state_dict``."""

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from volseg.config.schema import ExperimentConfig
from volseg.data.cases import Task
from volseg.data.groups import find_groups
from volseg.errors import CheckpointError, ConfigError
from volseg.experiment.cases import ChosenCases
from volseg.experiment.run_folder import RunFolder
from volseg.models import FitGrid, build_network
from volseg.models.transfer import WeightTransfer, find_followers, transfer_weights
from volseg.parallel.devices import is_main_process
from volseg.parallel.state.random import own_random_numbers
from volseg.workflow.checkpoints import LATEST, load_checkpoint
from volseg.workflow.state import TrainingState

__all__ = ["START", "Start", "require_weights"]

logger = logging.getLogger(__name__)

START = "start.json"
"""File of the run folder that says what was taken."""

WRAPPERS = ("state_dict", "network_weights", "model")
"""Keys under which others keep a ``state_dict``: Lightning, nnU-Net, and many scripts."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Weights that were found."""

    file: Path
    values: Mapping[str, Any]
    """A ``state_dict``, with averaged parameters where the training kept them."""
    task: Task | None = None
    """Of the run that they are from; None where that is not known."""
    cases: frozenset[str] = frozenset()
    """That this run trained on."""


class Start:
    """Give a network the weights that ``training.start_from`` names; called with it.

    Parameters
    ----------
    config : ExperimentConfig
        Of the training that begins.
    chosen : ChosenCases
        Its task and cases.

    Raises
    ------
    ConfigError, CheckpointError
        If there are no such weights, or they cannot be read without running code.
    """

    def __init__(self, config: ExperimentConfig, chosen: ChosenCases) -> None:
        path = config.training.start_from
        assert path is not None
        self.config, self.task = config, chosen.task
        self.weights = find_weights(path)
        self._done: tuple[WeightTransfer, Mapping[str, int]] | None = None
        seen = self._find_seen(chosen)
        same_task = self.weights.task is not None and self.weights.task.name == self.task.name
        if seen and same_task and is_main_process():
            logger.warning(
                "%s was trained on %d of this run's %d validation cases (or on their patients), first %s: their scores "
                "will be too good",
                path,
                len(seen),
                len(chosen.split.validation),
                min(seen),
            )

        before = self.task.modalities if self.weights.task is None else self.weights.task.modalities
        if before != self.task.modalities and is_main_process():
            logger.warning(
                "%s was trained on the channels %s, in this order, and this run has %s: what it learnt of one channel "
                "goes to another",
                path,
                ", ".join(before),
                ", ".join(self.task.modalities),
            )

    def _find_seen(self, chosen: ChosenCases) -> set[str]:
        """Return the validation cases that the weights were trained on, or of whose patients they saw another case."""
        groups = find_groups(self.task, self.config.split.group) or {}
        patients = {groups[name] for name in self.weights.cases if name in groups}
        validated = chosen.split.validation
        return {name for name in validated if name in self.weights.cases or groups.get(name) in patients}

    def __call__(self, network: FitGrid) -> None:
        """Take what fits; see `transfer_weights`."""
        config, task = self.config, self.task
        build = partial(build_network, config.network.spec(), patch_size=config.patch.size)
        with own_random_numbers([]):
            stems = find_followers(
                lambda number: build(in_channels=number, out_channels=task.num_outputs), task.num_channels
            )
            heads = find_followers(
                lambda number: build(in_channels=task.num_channels, out_channels=number), task.num_outputs
            )
        begun = self.weights.task
        try:
            transfer = transfer_weights(
                network,
                self.weights.values,
                stems=stems,
                heads=heads,
                renew_heads=begun is not None and _list_outputs(begun) != _list_outputs(task),
                strict=config.training.start_strict,
            )
        except CheckpointError as fault:
            raise CheckpointError(f"training.start_from: {self.weights.file}: {fault}") from fault
        sizes = {name: value.numel() for name, value in network.state_dict().items() if isinstance(value, Tensor)}
        self._done = transfer, sizes
        if is_main_process():
            logger.info("%s", self._describe())

    def as_json(self) -> dict[str, Any]:
        """Return what was taken, and what was not, by name."""
        assert self._done is not None, "asked before a network was given its weights"
        transfer, _ = self._done
        return {
            "file": str(self.weights.file),
            "taken": list(transfer.taken),
            "adapted": list(transfer.adapted),
            "new": list(transfer.new),
            "left": list(transfer.left),
        }

    def _describe(self) -> str:
        assert self._done is not None
        transfer, sizes = self._done
        total = sum(sizes.values())
        taken = sum(sizes[name] for name in transfer.taken)
        told = (
            f"begun with {self.weights.file}: {len(transfer.taken)} tensors taken, {taken / total:.1%} of all weights"
        )
        parts = {"adapted": transfer.adapted, "new": transfer.new, "left out": transfer.left}
        more = [f"{len(names)} {what} ({_list_first(names)})" for what, names in parts.items() if names]
        return "; ".join([told, *more])


def require_weights(config: ExperimentConfig) -> None:
    """Raise where a training that begins would not get the weights that it is to begin with; see `find_weights`."""
    if config.training.start_from is not None:
        find_weights(config.training.start_from)


def find_weights(path: Path) -> Weights:
    """Return the weights of a run's latest checkpoint, of a checkpoint, or of a file with a ``state_dict``.

    Raises
    ------
    ConfigError, CheckpointError
        If there are none, or they cannot be read without running code.
    """
    if path.is_dir():
        folder = RunFolder(path)
        folder.config()  # raises for a folder that is no run
        file = folder.checkpoints / LATEST
        return _of_run(path, file, load_checkpoint(file))
    if not path.is_file():
        raise ConfigError(
            f"training.start_from: {path} does not exist; name a run folder, a checkpoint or a state_dict"
        )
    if path.suffix == ".safetensors":
        raise ConfigError(
            f"training.start_from: {path} is no file of torch; convert it once by "
            "torch.save(safetensors.torch.load_file(FILE), 'weights.pt')"
        )
    with suppress(CheckpointError):
        return _of_run(path.absolute().parents[1], path, load_checkpoint(path))
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as fault:  # damaged bytes raise anything, and objects of classes are refused
        reason = str(fault).strip().partition("\n")[0] or type(fault).__name__
        raise CheckpointError(
            f"training.start_from: {path} holds no tensors alone ({reason}); save the weights by themselves where they "
            "were trained: torch.save(network.state_dict(), FILE)"
        ) from fault
    return Weights(file=path, values=_unwrapped(content, path))


def _of_run(path: Path, file: Path, state: TrainingState) -> Weights:
    """Return the weights of a checkpoint, with what is known of its run where it still lies in the run's folder."""
    folder = RunFolder(path)
    if not (folder.exists and file.absolute().parent == folder.checkpoints.absolute()):
        return Weights(file=file, values=_averaged(state))
    cases = frozenset(folder.split().training)
    return Weights(file=file, values=_averaged(state), task=folder.task(), cases=cases)


def _list_outputs(task: Task) -> list[Any]:
    """Return what the outputs of a task's networks mean, in their order, which is no part of a mapping's equality."""
    return [sorted(task.labels.items()), [(name, set(values)) for name, values in task.regions.items()]]


def _averaged(state: TrainingState) -> Mapping[str, Any]:
    return {**state.model, **(state.average["average"] if state.average is not None else {})}


def _unwrapped(content: Any, path: Path) -> Mapping[str, Any]:
    """Return the ``state_dict`` in what others wrote, under the plain network's names."""
    for key in WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not any(isinstance(value, Tensor) for value in content.values()):
        raise CheckpointError(f"training.start_from: {path} holds no state_dict, which maps names to tensors")
    if all(isinstance(name, str) and name.startswith("module.") for name in content):  # of torch's DataParallel
        return {name.removeprefix("module."): value for name, value in content.items()}
    return content


def _list_first(names: tuple[str, ...]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
