"""Show that an experiment's network computes the same on several devices as on one."""

from collections.abc import Sequence

import torch

from volseg.config.schema import ExperimentConfig
from volseg.data.msd import load_task
from volseg.experiment.building import check_components
from volseg.models import FitGrid, build_network
from volseg.parallel import verify as verify_network
from volseg.parallel.sharding import Report

__all__ = ["verify"]


def verify(config: ExperimentConfig, *, num_devices: int = 4, shape: Sequence[int] | None = None) -> Report:
    """Compare the config's network cut over devices with itself on one: outputs, gradients, buffers, one step.

    Parameters
    ----------
    config : ExperimentConfig
        Its network, with the channels and classes of its task.
    num_devices : int
        Shards. GPUs where as many are visible; otherwise the one device stands for all, which shows the same errors.
    shape : sequence of int, optional
        D, H, W of the volume; the training patch by default.

    Raises
    ------
    ConfigError, DataError
        If the network cannot be built, or there is no task.
    UnsupportedOperatorError
        If the network uses a function without a sharded form: names it and the module.
    """
    check_components(config)
    task = load_task(config.data.root, require_files=False)
    network = build_network(
        config.network.spec(),
        in_channels=task.num_channels,
        out_channels=task.num_classes,
        patch_size=config.patch.size,
    )
    gpus = torch.cuda.device_count()
    names = [f"cuda:{index}" for index in range(gpus)] if gpus >= num_devices else ["cuda:0" if gpus else "cpu"]
    devices = [names[index % len(names)] for index in range(num_devices)]
    volume = (1, task.num_channels, *(shape or config.patch.size))
    return verify_network(FitGrid(network), volume, devices=devices, on_unsupported=config.parallel.on_unsupported)
