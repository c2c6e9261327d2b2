"""Find other ways to run a training with ``volseg plan``, as settings of its config; explain out-of-memory errors."""

import gc
import json
import math
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from volseg.commands import run_module
from volseg.config.base import validated
from volseg.config.loading import dump_config, override
from volseg.config.parallel import MeshPlan
from volseg.config.schema import ExperimentConfig
from volseg.errors import ConfigError, OutOfMemoryError, VolsegError
from volseg.estimate.candidate import Candidate, Estimate
from volseg.estimate.report import PlanReport
from volseg.experiment.own_components import components_arguments
from volseg.experiment.placement.placed_network import choose_device
from volseg.launched import OF_JOB, OWN_LAUNCHER
from volseg.memory import total_bytes
from volseg.parallel.devices import uses_gpus

PLACED = ("data", "spatial", "pipeline", "strategy", "devices", "split_size", "checkpoint")
"""Keys of ``parallel`` that a candidate decides."""

CLEARLY_LESS = 0.97
"""Factor of the failed candidate's tensor bytes; estimates above it are not considered smaller."""


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


def list_settings(candidate: Candidate) -> list[str]:
    """Return the config overrides that select a candidate."""
    mesh = {"data": candidate.data, "spatial": candidate.spatial, "pipeline": candidate.pipeline}
    settings = [f"parallel.{name}={count}" for name, count in mesh.items() if count > 1]
    if candidate.split_size is not None:
        settings.append(f"parallel.split_size={candidate.split_size}")
    if candidate.checkpoint is not None:
        whole = "parallel.devices=1" if candidate.num_gpus == 1 else "parallel.spatial=1"
        # Recomputation is part of the strategy that cuts, even without a cut.
        settings += ["parallel.strategy=spatial", whole] if candidate.spatial == 1 else []
        settings.append(f"parallel.checkpoint={candidate.checkpoint}")
    return settings


def take_candidate(config: ExperimentConfig, candidate: Candidate, *, one_process: bool = False) -> ExperimentConfig:
    """Return the config that runs the candidate, in a process per replica and slab, or in ``one_process``.

    Raises
    ------
    ConfigError
        If its other values do not fit the candidate.
    """
    values = config.model_dump()
    values["parallel"] = {name: value for name, value in values["parallel"].items() if name not in PLACED}
    for setting in list_settings(candidate):
        values = override(values, setting)
    if one_process and candidate.num_gpus > 1:
        devices = config.parallel.devices or candidate.num_gpus
        strategy = "pipeline" if candidate.spatial == 1 else "spatial"
        values["parallel"] |= {"spatial": None, "pipeline": None, "strategy": strategy, "devices": devices}
    training = config.training.model_dump()
    if training["kernels"] == "fast" and candidate.kernels == "torch":
        training["kernels"] = "torch"
    training["record"] = training["record"] and candidate.recorded
    return validated(ExperimentConfig, {**values, "training": training}, "the config with less memory")


def list_overrides(before: ExperimentConfig, after: ExperimentConfig) -> list[str]:
    """Return the ``--set`` overrides that turn one config into the other.

    >>> from volseg.config.sections import DataConfig, PatchConfig
    >>> config = ExperimentConfig(
    ...     name="a", data=DataConfig(root="x"), patch=PatchConfig(size=(8, 8, 8)),
    ...     network={"name": "VNet"}, optimizer={"name": "SGD", "lr": 0.1})
    >>> list_overrides(config, take_candidate(config, Candidate(checkpoint="all", kernels="fast")))
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


def rank_smaller(tried: Candidate, forecasts: Sequence[Estimate]) -> list[Estimate]:
    """Return the estimates that need clearly less memory than ``tried``.

    Only estimates that run are returned, fastest first; if none runs, the others, smallest first.
    """
    failed = get_estimate(tried, forecasts)
    # Compare the bytes of tensors: torch has emptied its cache before it failed.
    most = math.inf if failed is None or failed.memory is None else CLEARLY_LESS * failed.memory.used
    smaller = [
        (each, each.memory.total)
        for each in forecasts
        if each.memory is not None and not _is_same(each.candidate, tried) and each.memory.used <= most
    ]
    if fitting := [each for each, _ in smaller if each.runs]:
        return sorted(fitting, key=lambda each: (each.candidate.num_gpus != tried.num_gpus, each.seconds or 0.0))
    return [each for each, _ in sorted(smaller, key=lambda each: each[1])]


def get_estimate(candidate: Candidate, forecasts: Sequence[Estimate]) -> Estimate | None:
    """Return the estimate of a candidate, with any kernels on one GPU, or None."""
    same = [each for each in forecasts if _is_same(each.candidate, candidate)]
    return next((each for each in same if each.candidate.kernels == candidate.kernels), same[0] if same else None)


def _is_same(one: Candidate, other: Candidate) -> bool:
    return replace(one, kernels="torch", recorded=False) == replace(other, kernels="torch", recorded=False)


def describe_estimate(forecast: Estimate) -> str:
    """Return the numbers of an estimate."""
    if forecast.memory is None:
        return forecast.refused or "no estimate"
    speed = "" if forecast.seconds is None else f", {forecast.seconds:.3g} s per step"
    of_each = " of each GPU" if forecast.candidate.num_gpus > 1 else ""
    return f"{forecast.memory.total / 2**30:.1f} GiB{of_each}{speed}"


def list_lines(config: ExperimentConfig, forecasts: Sequence[Estimate], num_processes: int) -> list[str]:
    """Return a line to paste for each estimate, with its numbers; skip those that the config does not allow."""
    lines = []
    for forecast in forecasts:
        try:
            overrides = list_overrides(config, take_candidate(config, forecast.candidate))
        except ConfigError:  # for example, kernels that the config names
            continue
        gpus = f"--gpus {forecast.candidate.num_gpus} " if forecast.candidate.num_gpus != num_processes else ""
        lines.append(f"  {gpus}{' '.join(f'--set {each}' for each in overrides)}   {describe_estimate(forecast)}")
    return lines


# Run ``volseg plan`` in a separate process for a training that waits for the answer.
#
# A process that traces a step uses fake GPUs, but the training's process has real ones. The plan's process sees no GPU,
# computes in one thread, and ends with the process that started it.


NOTHING_FITS = 3
"""Exit status of ``volseg plan`` if nothing fits; the output is still an answer."""

LONGEST_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """GPUs of one kind to plan for."""

    name: str
    """Name in torch."""
    memory: int
    """Bytes of one GPU that this process can use."""
    count: int = 1

    @classmethod
    def find(cls, device: torch.device, count: int) -> "Gpus | None":
        """Return the description of a device, or None if it is not a GPU."""
        if device.type != "cuda":
            return None
        free, total = torch.cuda.mem_get_info(device)
        allowed = torch.cuda.get_per_process_memory_fraction(device) * total
        own = torch.cuda.memory_reserved(device)
        return cls(name=torch.cuda.get_device_name(device), memory=min(int(allowed), free + own), count=count)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Answer of the plan's process."""

    forecasts: tuple[Estimate, ...] = ()
    reserve: int = 0
    """Bytes of a GPU for other uses: cases, and prefetched batches."""
    problem: str = ""
    """Reason for the lack of estimates."""
    remedies: tuple[str, ...] = ()
    """Remedies if nothing fits, with numbers: larger GPUs, more of them, a smaller patch."""


def run_plan(
    config: ExperimentConfig, gpus: Gpus, *, thorough: bool = False, seconds: float = LONGEST_SECONDS
) -> Answer:
    """Return the estimates of a config's training on some GPUs, or the problem, such as a timeout.

    Parameters
    ----------
    config : ExperimentConfig
        Config of the training; every value that it leaves open is tried.
    gpus : Gpus
        GPUs to plan for.
    thorough : bool
        Whether to trace also candidates that cannot be the fastest.
    seconds : float
        Time limit for the answer.
    """
    gpu = ["--gpu", gpus.name, "--gpus", str(gpus.count), "--gpu-memory", f"{gpus.memory / 2**30:.3f}GiB"]
    # The environment may name any encoding; this process reads UTF-8.
    own = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8", "PYTHONUTF8": "1"}
    inherited = {name: value for name, value in os.environ.items() if name not in OF_JOB}
    # Other processes may wait for this one, and treat it as hanging after their timeout.
    seconds = min(seconds, config.parallel.timeout / 2)
    try:
        with tempfile.TemporaryDirectory(prefix="volseg_plan_") as folder:
            file = dump_config(config.located(), Path(folder) / "config.yaml")
            # Without --all the estimate of a candidate may exceed the memory.
            command = run_module("volseg", "plan", str(file), "--json", "--all" if thorough else "--numbers", *gpu)
            ended = subprocess.run(  # noqa: S603 (our own interpreter and arguments; no shell)
                [*command, *components_arguments()],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                env={**inherited, **own, OWN_LAUNCHER: str(os.getpid())},
                encoding="utf-8",
                errors="replace",
                timeout=seconds,
                check=False,
            )
    except subprocess.TimeoutExpired:
        return Answer(problem=f"volseg plan did not answer within {seconds:.0f} s")
    except (ConfigError, OSError) as fault:  # components known only to this process, or no process available
        return Answer(problem=str(fault).partition("\n")[0])
    if ended.returncode not in (0, NOTHING_FITS):
        lines = [line for line in ended.stderr.splitlines() if line.strip()]
        return Answer(problem=lines[-1].removeprefix("volseg: ") if lines else f"exit status {ended.returncode}")
    try:
        report = PlanReport.model_validate_json(ended.stdout)
    except ValueError as fault:
        return Answer(problem="the output of volseg plan is not a plan: " + str(fault).partition("\n")[0])
    forecasts = tuple(row.estimate for row in report.candidates)
    return Answer(forecasts=forecasts, reserve=report.reserve_bytes, remedies=report.remedies)


# Report out-of-memory errors, with remedies.


SAYS_MEMORY = re.compile(
    r"\b(CUDA|Cuda|HIP|NCCL)\b.*out of memory"
    r"|can't allocate memory|not enough memory: you tried to allocate"
    r"|CU[A-Z]+_STATUS_\w*ALLOC\w*_FAILED"
    r"|Storage size calculation overflowed",
    re.DOTALL,
)
"""Messages of allocators and libraries whose exceptions have no separate class: of main memory, of CUDA's driver
and of libraries. Other messages that mention memory do not match."""


@contextmanager
def explaining_memory(config: ExperimentConfig) -> Iterator[None]:
    """Turn an out-of-memory error within the block into one with the attempted sizes and the remedies.

    Raises
    ------
    OutOfMemoryError
        With the sizes of the config, and the remedies, the cheapest first.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as fault:
        if isinstance(fault, VolsegError) or not is_out_of_memory(fault):
            raise
        attempt = describe_attempt(config, choose_device(config), fault)
        raise OutOfMemoryError(f"{attempt}. {describe_remedies(config)}") from fault


def free_memory() -> None:
    """Free the memory of a failed or tried training, once nothing refers to it."""
    gc.collect()  # models and autograd graphs have many reference cycles
    if uses_gpus():
        torch.cuda.empty_cache()


def is_out_of_memory(fault: BaseException) -> bool:
    """Return whether an allocator of torch or of one of its libraries raised an exception."""
    if isinstance(fault, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(fault, RuntimeError) and SAYS_MEMORY.search(str(fault)) is not None


def describe_attempt(config: ExperimentConfig, device: torch.device, fault: BaseException) -> str:
    """Return the attempted sizes, and the message of the allocator."""
    window = config.inference.window
    reason = str(fault).partition("\n")[0].rstrip(".") or type(fault).__name__
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else total_bytes()
    return (
        f"out of memory on {device}, which has {memory / 2**30:.1f} GiB ({reason}). Tried: patch.size "
        f"{list(config.patch.size)}, patch.batch {config.patch.batch}, inference.window "
        f"{'the whole volume' if window is None else list(window)}, inference.batch {config.inference.batch}"
    )


def describe_remedies(config: ExperimentConfig) -> str:
    """Return remedies that always need less memory, the cheapest first."""
    ways = {"all": ", or parallel.checkpoint: tiled (recomputes in tiles)", "tiled": ""}
    checkpoint = ways.get(str(config.parallel.checkpoint), ", or parallel.checkpoint: all (recomputes activations)")
    return (
        "Reduce patch.batch, then patch.size (training) or inference.window (prediction), or use more GPUs per volume "
        f"(parallel.spatial){checkpoint}"
    )
