"""Estimate a config's training on a machine, and choose how to share it: the verb ``volseg plan`` as functions."""

import math
import shlex
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from volseg.config.schema import ExperimentConfig
from volseg.errors import ConfigError
from volseg.estimate.candidate import Candidate, Work, name_candidate
from volseg.estimate.estimator import Machine, Planned
from volseg.estimate.gpu_kinds import KINDS, GpuKind, find_kind
from volseg.estimate.instances import get_instance, get_links
from volseg.estimate.planning import StepPlan, list_largest, plan_work
from volseg.estimate.report import LargestRow, VolumesReport
from volseg.estimate.search import GIB
from volseg.experiment.building import check_components
from volseg.experiment.network_plan import load_facts
from volseg.experiment.placement.alternatives import list_settings
from volseg.experiment.placement.training_work import (
    Described,
    at_size,
    describe_freedom,
    describe_training,
    estimate_reserve,
)
from volseg.parallel.devices import count_gpus, current_gpu_or_cpu
from volseg.parallel.fast_kernels import CAPABILITY
from volseg.parallel.forking import ask_copy
from volseg.planning.plan import parse_memory
from volseg.profiling.calibration import calibrate, describe_kind, describe_machine, rates_file_path, read_calibration
from volseg.workflow.precision import choose_dtype


def plan_training(
    config: ExperimentConfig,
    machine: Machine,
    *,
    channels: int | None = None,
    classes: int | None = None,
    thorough: bool = False,
    numbers: bool = True,
    forks: bool = False,
) -> StepPlan:
    """Estimate a config's training on a machine.

    Parameters
    ----------
    config : ExperimentConfig
        Config of the training.
    machine : Machine
        Machine to plan for.
    channels, classes : int, optional
        See `load_facts`.
    thorough : bool
        Whether to trace also candidates that cannot be the fastest.
    numbers : bool
        Whether candidates that do not fit are traced to the end; see `plan_work`.
    forks : bool
        Whether to trace several candidates at a time, in forks of this process.

    Raises
    ------
    ConfigError, DataError
        If the config cannot be run, or channels and classes are unknown.
    ParallelError
        If the training cannot be traced.
    """
    planned, notes = _describe(config, machine, channels, classes)
    if config.patch.growth:
        notes.append("patches grow, and the table is for the last size; set patch.size and patch.growth for another")
    steps = math.ceil(config.training.iterations / config.training.accumulate)
    return plan_work(planned, notes=notes, steps_per_epoch=steps, thorough=thorough, numbers=numbers, forks=forks)


def _describe(
    config: ExperimentConfig, machine: Machine, channels: int | None, classes: int | None
) -> tuple[Planned, list[str]]:
    """Return the planned work, and notes for the reader."""
    check_components(config)
    gpu = machine.gpu
    dtype = choose_dtype(config.training.precision, gpu.capability)
    facts = load_facts(config, channels, classes)
    described = describe_training(config, dtype, facts)
    reserve, notes = estimate_reserve(described, machine.gpu_bytes)
    d, h, w = described.rule.divisors
    planned = Planned(
        work=described.work,
        machine=machine,
        free=describe_freedom(config, dtype, has_fast_kernels=gpu.capability >= CAPABILITY),
        reserve=reserve,
        times=config.training.accumulate / described.batches,
        resize=partial(_resize, described, machine),
        divisors=(d, h, w),
    )
    return planned, [f"channels and classes from {facts.source}", *notes]


def _resize(described: Described, machine: Machine, sides: tuple[int, int, int]) -> tuple[Work, int]:
    """Return the step on patches of other sides, and the reserved bytes of a GPU for them."""
    resized = at_size(described, sides)
    return resized.work, estimate_reserve(resized, machine.gpu_bytes)[0]


def plan_words(
    plan: StepPlan, config: str | Path, overrides: Sequence[str] = (), components: Sequence[str | Path] = ()
) -> str:
    """Return a plan as text: the table, the choice and its command.

    Parameters
    ----------
    plan : StepPlan
        The plan from `plan_training`.
    config : path
        File of the planned config.
    overrides, components : sequence
        Overrides and component files of the plan; the training command includes them.
    """
    report = plan.report
    where = f"{report.num_gpus} x {report.gpu} of {report.gpu_bytes / GIB:.1f} GiB"
    if report.instance is not None:
        price = "" if report.price_per_hour is None else f", {report.price_per_hour:.2f} $ an hour"
        where += f" ({report.instance}{price})"
    lines = [
        f"{report.network}, {' x '.join(map(str, report.shape))}, {report.precision}, on {where}",
        "",
        plan.table(),
        "",
        f"{plan.why}.",
    ]
    if plan.chosen is not None:
        lines += [f"  {shlex.join(_list_command(plan.chosen.candidate, config, overrides, components))}"]
    lines += [f"It would fit: {remedy}." for remedy in report.remedies]
    refused: dict[str, list[str]] = {}
    for each in plan.forecasts:
        if each.memory is None and each.more_than is None:
            refused.setdefault(str(each.refused), []).append(name_candidate(each.candidate))
    lines += [f"Refused: {'; '.join(names)}: {reason}." for reason, names in refused.items()]
    lines += ["", "GiB of the fullest GPU: `used` by tensors; `reserved` in total, by torch and its libraries too."]
    if report.rates == "published":
        lines.append(f"Times follow from published rates of {report.gpu}: volseg has no measurements of it.")
    if report.price_source is not None:
        lines.append(f"Prices: {report.price_source}; for the steps only, without validation.")
    lines += [f"Note: {note}." for note in report.notes]
    return "\n".join(lines)


def _list_command(
    candidate: Candidate, config: str | Path, overrides: Sequence[str], components: Sequence[str | Path]
) -> list[str]:
    """Return the command that trains the planned config with a candidate."""
    gpus = ["--gpus", str(candidate.num_gpus)] if candidate.num_gpus > 1 else []
    settings = [part for each in (*overrides, *list_settings(candidate)) for part in ("--set", each)]
    files = [part for file in components for part in ("--components", str(file))]
    return ["volseg", "train", str(config), *gpus, *settings, *files]


def plan_volumes(
    config: ExperimentConfig,
    machine: Machine,
    *,
    channels: int | None = None,
    classes: int | None = None,
    forks: bool = False,
) -> VolumesReport:
    """Return the largest patches that each way of sharing a machine can train on; see `plan_training`."""
    planned, _ = _describe(config, machine, channels, classes)
    work = planned.work
    found = list_largest(planned, forks=forks)
    rows = tuple(
        LargestRow(
            name=name_candidate(candidate),
            aspect=aspect,
            sides=None if largest is None else largest.sides,
            next_sides=None if largest is None else largest.limit,
            total_bytes=None if largest is None else largest.needed,
        )
        for candidate, aspect, largest in found
    )
    return VolumesReport(
        network=work.name,
        batch_size=work.batch_size,
        precision=str(work.precision).removeprefix("torch."),
        gpu=machine.gpu.name,
        num_gpus=machine.num_gpus,
        gpu_bytes=machine.gpu_bytes,
        reserve_bytes=planned.reserve,
        rows=rows,
    )


# Find the machine of a plan: named by an instance or by its GPUs, or the local machine.


NEAR = 0.12
"""Largest share of the nominal memory that CUDA may leave out of its report."""


def resolve_machine(
    *,
    num_gpus: int | None = None,
    gpu_memory: str | None = None,
    kind: str | None = None,
    instance: str | None = None,
    here: bool = False,
) -> Machine:
    """Return the named machine; by default the local one, if it has GPUs.

    Parameters
    ----------
    num_gpus : int, optional
        Number of GPUs: 1 by default, or at most (and by default) those of an instance or of this machine.
    gpu_memory : str
        Memory of one GPU, such as ``16GiB``.
    kind : str
        Kind of GPU; by default the kind with that memory.
    instance : str
        A cloud instance.
    here : bool
        Whether to plan for this machine.

    Raises
    ------
    ConfigError
        If more than one machine is named, no machine is found, or a name is unknown.
    """
    described = gpu_memory is not None or kind is not None
    if sum([described, instance is not None, here]) > 1:
        raise ConfigError(
            "a plan is for one machine: --gpus N --gpu-memory SIZE (or --gpu KIND), --instance NAME or --here; got "
            "more than one of these"
        )
    if instance is not None:
        named = get_instance(instance)
        return replace(named, num_gpus=_take(num_gpus, named.num_gpus, str(named.instance)))
    if described:
        return _describe_machine(num_gpus or 1, gpu_memory, kind)
    if not here and not count_gpus():
        raise ConfigError(
            "no GPU is visible; name the GPUs to plan for: --gpus 4 --gpu-memory 16GiB, or --instance p3.8xlarge"
        )
    return _find_own_machine(num_gpus)


def _take(wanted: int | None, there: int, where: str) -> int:
    if wanted is not None and wanted > there:
        raise ConfigError(f"--gpus {wanted} asks for more than the {there} GPU(s) of {where}; choose at most {there}")
    return wanted or there


def _describe_machine(num_gpus: int, gpu_memory: str | None, kind: str | None) -> Machine:
    size = None if gpu_memory is None else int(parse_memory(gpu_memory) * GIB)
    if kind is not None:
        gpu = find_kind(kind)
    else:
        assert size is not None
        sold = size  # the generator must not see None
        gpu = min(KINDS.values(), key=lambda each: abs(each.memory / sold - 1))
    if size is None or 0 <= 1 - gpu.memory / size <= NEAR:  # CUDA reports less than the nominal memory
        size = gpu.memory
    return Machine(gpu=gpu, num_gpus=num_gpus, links=get_links(gpu), gpu_bytes=size)


def local_gpu_kind(device: torch.device) -> GpuKind:
    """Return the kind of this machine's GPU: with its measured calibration, else from the table of kinds.

    Raises
    ------
    ConfigError
        If its kind is unknown and it has no calibration.
    """
    machine = describe_machine(device)
    stored = read_calibration(rates_file_path(machine["gpu"], machine["torch"]), machine)
    if stored is not None:
        return describe_kind(stored)
    try:
        kind = find_kind(machine["gpu"])
    except ConfigError as fault:
        raise ConfigError(f"{fault}; or measure it once with volseg plan --calibrate") from None
    return replace(kind, memory=machine["total_memory"])


def _find_own_machine(num_gpus: int | None) -> Machine:
    if not count_gpus():
        raise ConfigError("--here plans for the GPUs of this machine, but none is visible; name others with --instance")
    # In a fork, so that this process can still fork to trace steps.
    gpu = ask_copy(lambda: local_gpu_kind(current_gpu_or_cpu()))
    count = _take(num_gpus, count_gpus(), "this machine")
    return Machine(gpu=gpu, num_gpus=count, links=get_links(gpu), gpu_bytes=gpu.memory)


def calibrate_words() -> str:
    """Measure the GPUs of this machine once, and return the result as text.

    Raises
    ------
    ConfigError
        If there is no GPU.
    """
    kind = calibrate(current_gpu_or_cpu())
    return f"{kind.name}: {kind.source}; --here and parallel: auto use these rates"
