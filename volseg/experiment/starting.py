"""Start a training with the weights of a source: a network that predicts, or weights only."""

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from volseg.config.schema import ExperimentConfig
from volseg.data.cases import Task
from volseg.data.groups import assign_patients
from volseg.errors import CheckpointError
from volseg.experiment.cases import ChosenCases
from volseg.experiment.prediction.sources import read_weights
from volseg.formatting import list_some
from volseg.models.fit_grid import FitGrid
from volseg.models.networks import build_network
from volseg.models.weights import WeightTransfer, strip_prefixes, trace_dependent_dims, transfer_weights
from volseg.parallel.devices import is_main_process
from volseg.parallel.state.random import own_random_numbers

logger = logging.getLogger(__name__)

START = "start.json"
"""File of the run folder that lists the loaded weights."""


class Start:
    """Load the weights of ``training.start_from`` into the network that is passed to a call.

    Parameters
    ----------
    config : ExperimentConfig
        Config of the new training.
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
        self.weights = read_weights(path)
        self._done: WeightTransfer | None = None
        same_task = self.weights.task is not None and self.weights.task.name == self.task.name
        if same_task and is_main_process() and (seen := self._find_seen(chosen)):
            logger.warning(
                "%s was trained on %d of this run's %d validation cases or on other cases of their patients, first "
                "%s: their scores will be too high",
                path,
                len(seen),
                len(chosen.split.validation),
                min(seen),
            )

        before = self.task.modalities if self.weights.task is None else self.weights.task.modalities
        if before != self.task.modalities and is_main_process():
            logger.warning(
                "%s was trained on the channels %s, in this order, but this run has %s, so the weights of one "
                "channel are applied to another",
                path,
                ", ".join(before),
                ", ".join(self.task.modalities),
            )

    def _find_seen(self, chosen: ChosenCases) -> set[str]:
        """Return the validation cases that trained the weights, or that share a patient with such a case."""
        groups = assign_patients(self.task, self.config.split.group) or {}
        trained = self.weights.list_cases()
        patients = {groups[name] for name in trained if name in groups}
        validated = chosen.split.validation
        return {name for name in validated if name in trained or groups.get(name) in patients}

    def __call__(self, network: FitGrid) -> None:
        """Load the weights that fit into a network; see `transfer_weights`."""
        config, task, weights = self.config, self.task, self.weights
        values = self._choose_names(network)
        build = partial(build_network, config.network.spec(), patch_size=config.patch.size)
        with own_random_numbers([]):
            stems = trace_dependent_dims(
                lambda number: build(in_channels=number, out_channels=task.num_outputs), task.num_inputs
            )
            heads = trace_dependent_dims(
                lambda number: build(in_channels=task.num_inputs, out_channels=number), task.num_outputs
            )
        begun = weights.task
        try:
            transfer = transfer_weights(
                network,
                values,
                weights.average,
                stems=stems,
                heads=heads,
                renew_heads=begun is not None and _list_outputs(begun) != _list_outputs(task),
                strict=config.training.start_strict,
            )
        except CheckpointError as fault:
            raise CheckpointError(f"training.start_from: {weights.file}: {fault}") from fault
        self._done = transfer
        if is_main_process():
            logger.info("%s", self._describe(transfer, network))

    def _choose_names(self, network: FitGrid) -> Mapping[str, Any]:
        """Return the weights under the naming that matches most names of the network."""
        weights, known = self.weights, network.state_dict()
        if weights.average:
            return weights.values
        ways = [strip_prefixes(values, known) for values in (weights.values, weights.written) if values is not None]
        return max(ways, key=lambda values: len(known.keys() & values.keys()))

    def as_json(self) -> dict[str, Any]:
        """Return the loaded and the skipped weights, by name."""
        transfer = self._done
        assert transfer is not None, "called before the weights were loaded"
        return {"file": str(self.weights.file), "digest": self.weights.digest, **asdict(transfer)}

    def _describe(self, transfer: WeightTransfer, network: FitGrid) -> str:
        """Return a report: each parameter counts once, and the share is rounded down, so that 100% means all."""
        sizes = {name: parameter.numel() for name, parameter in network.named_parameters()}
        taken = sizes.keys() & transfer.taken
        share = sum(sizes[name] for name in taken) / sum(sizes.values())
        told = (
            f"started from {self.weights.file}: {len(taken)} of {len(sizes)} parameters loaded, "
            f"{math.floor(1000 * share) / 10:.1f}% of all weights"
        )
        parts = {"adapted": transfer.adapted, "new": transfer.new, "left out": transfer.left}
        more = [f"{len(names)} {what} ({list_some(names, 4)})" for what, names in parts.items() if names]
        return "; ".join([told, *more])


def require_weights(config: ExperimentConfig) -> None:
    """Raise if the initial weights of a new training cannot be read; see `read_weights`."""
    if config.training.start_from is not None:
        read_weights(config.training.start_from)


def _list_outputs(task: Task) -> list[Any]:
    """Return the meaning of the outputs of a task's networks, in their order, which a mapping's equality ignores."""
    return [sorted(task.labels.items()), [(name, set(values)) for name, values in task.regions.items()]]
