"""Show that an experiment's network computes the same on several devices as on one."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from volseg.config.loading import require_config
from volseg.config.schema import ExperimentConfig
from volseg.experiment.building import check_components
from volseg.experiment.cases import read_task
from volseg.experiment.network_plan import plan_network
from volseg.experiment.placement.placed_network import build_plain_network
from volseg.models import GridRule
from volseg.parallel import Report
from volseg.parallel import verify as verify_network
from volseg.parallel.devices import list_devices, list_gpus

SMALLEST = 16
"""Voxels along each side, if the network takes so few."""

PLANES = 4
"""Planes of each shard along D, at the finest level."""


def verify(
    config: ExperimentConfig | str | Path,
    *,
    num_devices: int = 4,
    shape: Sequence[int] | None = None,
    strategy: str | None = None,
) -> Report:
    """Compare the config's network over devices with itself on one device, in every mode of a training.

    Parameters
    ----------
    config : ExperimentConfig or path
        Config of the network, with the channels and classes of its task.
    num_devices : int
        Number of shards, or of stages at most. GPUs if that many are visible; otherwise one GPU acts for all of them,
        or copies on the CPU, which shows the same errors.
    shape : sequence of int, optional
        D, H, W of the volume; by default a small one that the network takes, no larger than the training patch.
    strategy : str, optional
        Strategy; by default the config's, or spatial.

    Raises
    ------
    ConfigError, DataError
        If the network cannot be built, or there is no task.
    GridError, ParallelError
        If the plain network does not take the shape, or the network cannot be cut over the devices.
    UnsupportedOperatorError
        If the network uses a function without a sharded form; names the function and the module.
    """
    config = require_config(config)
    check_components(config)
    task = read_task(config)
    planned = plan_network(config, task).complete(config)
    with torch.random.fork_rng(list_gpus()):
        torch.manual_seed(config.seed)
        network = build_plain_network(planned, task)
    chosen = strategy or ("pipeline" if config.parallel.strategy == "pipeline" else "spatial")
    options: dict[str, Any] = {"split_size": config.parallel.split_size}
    if chosen == "spatial":
        options = {"on_unsupported": config.parallel.on_unsupported, "checkpoint": config.parallel.checkpoint}
    devices = list_devices()[:num_devices]
    if len(devices) < num_devices:
        devices = devices[:1] * num_devices
    sides = shape or _small(network.rule, config.patch.size, num_devices)
    batch = 2 if chosen == "pipeline" else 1  # the fewest that give two micro-batches
    return verify_network(network, (batch, task.num_inputs, *sides), devices, strategy=chosen, **options)


def _small(rule: GridRule, patch: Sequence[int], shards: int) -> tuple[int, int, int]:
    """Return sides that take only seconds: the check uses float64, on a CPU too, and some thirty steps."""
    wanted = (max(SMALLEST, PLANES * shards), SMALLEST, SMALLEST)
    d, h, w = (min(side, max(least, small)) for side, least, small in zip(patch, rule.minimum, wanted, strict=True))
    return rule.sides((d, h, w))
