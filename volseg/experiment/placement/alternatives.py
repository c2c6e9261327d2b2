"""Alternatives for a training that need less memory, as settings of its config.

Pure, on a config and on estimates. Without estimates, `list_smaller` gives the order, by the known effect of each
setting on any network.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from volseg.config.base import validated
from volseg.config.parallel import MeshPlan
from volseg.config.schema import ExperimentConfig
from volseg.errors import ConfigError
from volseg.estimate.candidate import Candidate, Estimate

__all__ = [
    "build_candidate",
    "describe_estimate",
    "get_estimate",
    "list_lines",
    "list_overrides",
    "list_smaller",
    "rank_smaller",
    "take_candidate",
]

CLEARLY_LESS = 0.97
"""Factor of the failed candidate's tensor bytes; estimates above it count as no smaller."""


def build_candidate(config: ExperimentConfig, plan: MeshPlan, num_devices: int) -> Candidate:
    """Return the candidate that a settled config runs.

    Parameters
    ----------
    config : ExperimentConfig
        The config, with the mesh of its processes.
    plan : MeshPlan
        The mesh of the processes.
    num_devices : int
        Devices of one process.
    """
    parallel, strategy = config.parallel, config.parallel.model_strategy
    in_process = num_devices if strategy != "none" and plan.num_processes == 1 else 1
    stages = max(plan.pipeline, in_process if strategy == "pipeline" else 1)
    slabs = max(plan.spatial, in_process if strategy in ("spatial", "auto") and stages == 1 else 1)
    is_fast = strategy in ("spatial", "auto") or config.training.kernels == "fast"
    return Candidate(
        data=plan.data,
        spatial=slabs,
        pipeline=stages,
        split_size=parallel.split_size if isinstance(parallel.split_size, int) else None,
        checkpoint=parallel.checkpoint,
        kernels="fast" if is_fast else "torch",
        recorded=config.training.record,
    )


def take_candidate(config: ExperimentConfig, candidate: Candidate, num_processes: int) -> ExperimentConfig:
    """Return the config with which ``num_processes`` run the candidate.

    Raises
    ------
    ConfigError
        If its other values do not fit the candidate.
    """
    recomputes_alone = candidate.checkpoint is not None and candidate.spatial == candidate.pipeline == 1
    is_alone = candidate.data * candidate.spatial == 1
    parallel = {
        **config.parallel.model_dump(),
        "data": None if is_alone else candidate.data,
        "spatial": None if is_alone or candidate.pipeline > 1 else candidate.spatial,
        "pipeline": candidate.pipeline if candidate.pipeline > 1 else None,
        "split_size": candidate.split_size,
        # Recomputation is part of the strategy that cuts, on one device too.
        "strategy": "spatial" if recomputes_alone else "none",
        "devices": 1 if recomputes_alone and num_processes == 1 else None,
        "checkpoint": candidate.checkpoint,
    }
    training = config.training.model_dump()
    if training["kernels"] == "fast" and candidate.kernels == "torch":
        training["kernels"] = "torch"
    training["record"] = training["record"] and candidate.recorded
    source = "what takes less memory"
    return validated(ExperimentConfig, {**config.model_dump(), "parallel": parallel, "training": training}, source)


def list_overrides(before: ExperimentConfig, after: ExperimentConfig) -> list[str]:
    """Return the ``--set`` overrides that turn one config into the other.

    >>> from volseg.config.schema import DataConfig, PatchConfig
    >>> config = ExperimentConfig(
    ...     name="a", data=DataConfig(root="x"), patch=PatchConfig(size=(8, 8, 8)),
    ...     network={"name": "VNet"}, optimizer={"name": "SGD", "lr": 0.1})
    >>> list_overrides(config, take_candidate(config, Candidate(checkpoint="all", kernels="fast"), 1))
    ['parallel.strategy=spatial', 'parallel.devices=1', 'parallel.checkpoint=all', 'training.record=false']
    """
    one, other = before.model_dump(mode="json"), after.model_dump(mode="json")
    return [
        f"{section}.{key}={_as_yaml(value)}"
        for section in ("patch", "parallel", "training")
        for key, value in other[section].items()
        if one[section][key] != value
    ]


def _as_yaml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def list_smaller(tried: Candidate, batch_size: int) -> list[Candidate]:
    """Return candidates that take less memory on as many devices for any network, the simplest first.

    They have fewer replicas that are cut more, and each mesh also with recomputed activations. A pipeline is cut by
    layers, whose sizes depend on the network: for it, only smaller micro-batches are known to take less.

    Examples
    --------
    >>> [(each.data, each.spatial, each.checkpoint) for each in list_smaller(Candidate(data=2), 2)]
    [(2, 1, 'all'), (1, 2, None), (1, 2, 'all')]
    """
    if tried.pipeline > 1:
        smaller = (tried.split_size or -(-batch_size // tried.data)) // 2
        return [replace(tried, split_size=smaller)] if smaller else []
    return list(_list_cuts(tried))


def _list_cuts(tried: Candidate) -> Iterator[Candidate]:
    devices = tried.data * tried.spatial
    for data in range(tried.data, 0, -1):
        if devices % data:
            continue
        mesh = replace(tried, data=data, spatial=devices // data, kernels="fast")
        if data < tried.data:
            yield mesh
        if mesh.checkpoint != "tiled":
            yield replace(mesh, checkpoint="tiled" if mesh.checkpoint == "all" else "all")


def rank_smaller(tried: Candidate, forecasts: Sequence[Estimate]) -> list[Estimate]:
    """Return the estimates that run and need clearly less memory than ``tried``, fastest first."""
    failed = get_estimate(tried, forecasts)
    # Compare the bytes of tensors: torch has emptied its cache before it failed.
    most = None if failed is None or failed.memory is None else CLEARLY_LESS * failed.memory.used
    fitting = [
        each
        for each in forecasts
        if each.runs
        and each.memory is not None
        and not _is_same(each.candidate, tried)
        and (most is None or each.memory.used <= most)
    ]
    return sorted(fitting, key=lambda each: (each.candidate.num_gpus != tried.num_gpus, each.seconds or 0.0))


def get_estimate(candidate: Candidate, forecasts: Sequence[Estimate]) -> Estimate | None:
    """Return the estimate of a candidate, with any kernels on one GPU, or None."""
    same = [each for each in forecasts if _is_same(each.candidate, candidate)]
    return next((each for each in same if each.candidate.kernels == candidate.kernels), same[0] if same else None)


def _is_same(one: Candidate, other: Candidate) -> bool:
    return replace(one, kernels="torch", recorded=False) == replace(other, kernels="torch", recorded=False)


def describe_estimate(forecast: Estimate) -> str:
    """Return the numbers of an estimate."""
    if forecast.memory is None:
        return forecast.refused or "no forecast"
    speed = "" if forecast.seconds is None else f", {forecast.seconds:.3g} s per step"
    of_each = " of each GPU" if forecast.candidate.num_gpus > 1 else ""
    return f"{forecast.memory.total / 2**30:.1f} GiB{of_each}{speed}"


def list_lines(config: ExperimentConfig, forecasts: Sequence[Estimate], num_processes: int) -> list[str]:
    """Return a line to paste for each estimate, with its numbers; skip those that the config does not allow."""
    lines = []
    for forecast in forecasts:
        count = forecast.candidate.data * forecast.candidate.spatial
        try:
            overrides = list_overrides(config, take_candidate(config, forecast.candidate, count))
        except ConfigError:  # for example, kernels that the config names
            continue
        gpus = f"--gpus {forecast.candidate.num_gpus} " if forecast.candidate.num_gpus != num_processes else ""
        lines.append(f"  {gpus}{' '.join(f'--set {each}' for each in overrides)}   {describe_estimate(forecast)}")
    return lines
