"""Try volseg before a training: a small network on synthetic data, or a config's network on several devices."""

import logging
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Any

import torch

from volseg.checkpointing.folder import RunFolder
from volseg.commands import spell
from volseg.config.catalogue import shipped_config_path
from volseg.config.loading import load_config, path_override, require_config
from volseg.config.schema import ExperimentConfig
from volseg.data.synthetic import make_task
from volseg.experiment.building import check_components
from volseg.experiment.cases import read_task
from volseg.experiment.network_plan import plan_network
from volseg.experiment.placement.placed_network import build_plain_network
from volseg.experiment.prediction.predicting import predict
from volseg.experiment.report import format_outcome
from volseg.experiment.training import train
from volseg.models.grids import GridRule
from volseg.parallel import Report
from volseg.parallel import verify as verify_network
from volseg.parallel.devices import count_gpus, list_devices, list_gpus

logger = logging.getLogger(__name__)


def quickstart(output: str | Path | None = None, overrides: Sequence[str] = ()) -> str:
    """Generate data, train, validate on unseen cases, and predict cases without labels.

    Parameters
    ----------
    output : path, optional
        Folder of the run; its subfolder ``data`` gets the data. By default ``runs/quickstart``.
    overrides : sequence of str
        Overrides of its config, such as ``training.epochs=1``.

    Returns
    -------
    str
        Dice per label, the folder of the run, and the next commands.

    Raises
    ------
    ConfigError
        If the folder has a run.
    """
    folder = RunFolder(output or Path("runs") / "quickstart")
    folder.require_free()
    # Logged first: nothing else names the folder to a user who stops the run.
    go_on = spell(f"volseg train {quote(str(folder.config_file))} -o {quote(str(folder.path))} --resume")
    logger.info("data and run are in %s; you can stop the training, and continue it with: %s", folder.path, go_on)
    root = make_task(folder.path / "data" / "Task00_Synthetic")
    places = [path_override("data.root", root), path_override("output", folder.path)]
    config = load_config(shipped_config_path("quickstart"), [*overrides, *places])
    outcome = train(config)
    predict(folder, [root / "imagesTs"]).require_all()
    real = "task04_unet" if count_gpus() else "task04_cpu"  # both are shipped with volseg, and found by name
    more = ["volseg data fetch Task04_Hippocampus", f"volseg train {real} --set data.root=Task04_Hippocampus"]
    return "\n  ".join([format_outcome(outcome), *map(spell, more)])


SMALLEST = 16
"""Voxels along each side, if the network supports so few."""

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
        Number of shards, or of stages at most. GPUs if that many are visible; otherwise one GPU replaces all of them,
        or the CPU does, which shows the same errors.
    shape : sequence of int, optional
        D, H, W of the volume; by default a small one that the network supports, no larger than the training patch.
    strategy : str, optional
        Strategy; by default the config's, or spatial.

    Raises
    ------
    ConfigError, DataError
        If the network cannot be built, or there is no task.
    GridError, ParallelError
        If the plain network does not support the shape, or the network cannot be cut over the devices.
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
    """Return sides that need only seconds: the check uses float64, on a CPU too, and some thirty steps."""
    wanted = (max(SMALLEST, PLANES * shards), SMALLEST, SMALLEST)
    d, h, w = (min(side, max(least, small)) for side, least, small in zip(patch, rule.minimum, wanted, strict=True))
    return rule.sides((d, h, w))
