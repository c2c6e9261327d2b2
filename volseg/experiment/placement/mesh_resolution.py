"""Resolve the mesh of a training, before its model is built: which processes compute which rows and slabs.

If the config does not say whether samples are dealt to replicas or cut, the estimate of a training step decides. Near
the limit, or if a network cannot be traced, a training pass on each GPU decides. It runs beside as many allocated bytes
as the cases and prefetched batches will take there.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from volseg.config.parallel import MeshPlan, ParallelConfig
from volseg.config.schema import ExperimentConfig
from volseg.data.case_store.reading_group import ALONE, meet_readers
from volseg.data.cases import Task
from volseg.estimate.candidate import Candidate, Estimate
from volseg.estimate.search import SURE, choose
from volseg.estimate.step_memory import MemoryUse
from volseg.experiment.building import build_objective, build_step, draw_batch
from volseg.experiment.placement.alternatives import Gpus, build_candidate, get_estimate, run_plan, take_candidate
from volseg.experiment.placement.out_of_memory import is_out_of_memory
from volseg.experiment.placement.placed_network import build_model, build_plain_network
from volseg.experiment.placement.training_mesh import TrainingMesh, describe_mesh
from volseg.experiment.rehearsing import rehearse_losses, rehearse_network
from volseg.parallel.devices import count_launched, count_processes, is_main_process
from volseg.parallel.processes.group import decide_together, largest_over_processes, make_group, start_group
from volseg.parallel.replicas import join_mesh
from volseg.parallel.state.random import own_random_numbers
from volseg.workflow.schedules import WeightAverage

logger = logging.getLogger(__name__)

NEAR = 0.1
"""Relative error of an estimate; closer to the limit, a step is tried."""

LEAST_FOR_CASES = 2**26
"""Bytes of a GPU for prefetched batches and a few cases."""

HALO = 8
"""Planes on each side of a trial slab: the halo that convolutions need from its neighbours."""


def join_processes(config: ExperimentConfig) -> None:
    """Start the process group of a job of several processes (``torchrun``, ``--gpus``).

    Raises
    ------
    ConfigError
        If this number of processes cannot run the config.
    """
    count = count_launched()
    config.mesh(count)  # before any process waits for another
    if count > 1:
        start_group(config.parallel.timeout, on_cpu=config.device == "cpu")


def resolve_mesh(config: ExperimentConfig, task: Task, device: torch.device) -> tuple[ExperimentConfig, TrainingMesh]:
    """Return the config with its mesh resolved, and the mesh; every process calls this function.

    Raises
    ------
    ConfigError
        If replicas would share a batch whose loss is no mean over its samples.
    """
    count = count_processes()
    plan, reason = config.mesh(count), None
    estimate: MemoryUse | None = None
    is_auto = config.parallel.strategy == "auto" and config.parallel.num_gpus == 1
    chosen = choose_by_estimate(config, device) if count > 1 and (is_auto or plan.is_open) else None
    if chosen is not None:
        config, reason, estimate = chosen
        plan = config.mesh(count)
    elif plan.is_open and plan.data > 1 and _has_memory_of_its_own(device):
        reason = "a sample fits a GPU (parallel.spatial: N cuts it)"
        fits, roomy, estimate = _can_train(config, plan, task, device)
        if fits:
            config = roomy
        else:
            plan, estimate = config.mesh(count, fits=False), None
            reason = "a GPU has no memory for a training step on its whole samples"
    if plan.data > 1:
        with own_random_numbers([]):
            made = rehearse_network(build_plain_network(config, task), config, task)
        rehearse_losses(build_objective(config, task), made, task.num_inputs, is_shared=True)
    settled = config.with_mesh(plan) if count > 1 else config
    settled.mesh(count)  # the resolved mesh may not fit other settings
    if is_main_process() and plan.data * plan.spatial * plan.pipeline > 1:
        logger.info("%s", describe_mesh(plan, config, reason))
    mesh = join_mesh(plan.data_processes, plan.spatial_processes)
    replicas = mesh.replicas(plan.data, config.training.deterministic) if plan.data > 1 else None
    if estimate is not None:
        estimate = estimate.of_steps()
    readers, judges = ALONE, None
    if count > 1:  # separate groups: a thread communicates in them beside other work
        readers = meet_readers(make_group(backend="gloo"), reads=mesh.shard == 0)
        judges = make_group(list(range(0, count, mesh.spatial)), "gloo") if mesh.data > 1 else None
    return settled, TrainingMesh(
        plan=plan,
        mesh=mesh,
        replicas=replicas,
        readers=readers,
        judges=judges if mesh.shard == 0 else None,
        estimate=estimate,
    )


def _has_memory_of_its_own(device: torch.device) -> bool:
    return device.type != "cpu"


def _can_train(
    config: ExperimentConfig, plan: MeshPlan, task: Task, device: torch.device
) -> tuple[bool, ExperimentConfig, MemoryUse | None]:
    """Return whether every process has the memory for a training step on its own part of a batch.

    The estimate is used first. If it is close to the free memory, or there is none, the step is tried.

    Returns
    -------
    bool, ExperimentConfig, MemoryUse or None
        The other results are the config, with few enough cases on the GPU for the step, and its estimate.
    """
    needed = _estimate_step(config, plan, device)
    memory = None if needed is None else needed.memory
    free = 0 if needed is None else _find_free_bytes(device)
    if needed is not None and config.data.keep == "auto" and config.data.device_limit is None:
        config, needed = make_room(config, needed, free)
    judged = None if needed is None else judge(needed, free)
    if judged is not None:
        return judged, config, memory
    fits, beside = True, 0 if needed is None else needed.beside
    try:
        with own_random_numbers([device]):
            held = torch.empty(beside, dtype=torch.uint8, device=device)
            _rehearse(config, plan, task, device)
            del held
    except RuntimeError as fault:  # from torch, cuDNN or Triton
        if not is_out_of_memory(fault):
            raise
        fits = False
    torch.cuda.empty_cache()
    return not largest_over_processes(int(not fits), device), config, memory


@dataclass(frozen=True, kw_only=True)
class Needed:
    """Memory of a GPU that a training needs, in bytes."""

    step: int
    beside: int
    """Bytes for cases and batches."""
    memory: MemoryUse | None = None
    """The estimate, on the leader only."""


def judge(needed: Needed, free: int) -> bool | None:
    """Return whether the needed memory fits the free memory, or None if it is too close to tell.

    >>> [judge(Needed(step=needed, beside=10), 110) for needed in (50, 95, 105, 150)]
    [True, None, None, False]
    """
    room = free - needed.beside
    if room >= int((1 + NEAR) * needed.step):
        return True
    return False if room < (1 - NEAR) * needed.step else None


def make_room(config: ExperimentConfig, needed: Needed, free: int) -> tuple[ExperimentConfig, Needed]:
    """Keep cases in main memory if a step lacks the room on the GPU; return the config and the needed memory.

    >>> from volseg.config.schema import DataConfig, PatchConfig
    >>> config = ExperimentConfig(
    ...     name="a", data=DataConfig(root="x"), patch=PatchConfig(size=(8, 8, 8)),
    ...     network={"name": "VNet"}, optimizer={"name": "SGD", "lr": 0.1})
    >>> limited, needed = make_room(config, Needed(step=80 * 2**30, beside=30 * 2**30), 100 * 2**30)
    >>> limited.data.device_limit, needed.beside // 2**30
    (12.0, 12)
    """
    left = max(free - int((1 + NEAR) * needed.step), LEAST_FOR_CASES)
    if left >= needed.beside:
        return config, needed
    return config.with_values(data={"device_limit": left / 2**30}), Needed(step=needed.step, beside=left)


def _estimate_step(config: ExperimentConfig, plan: MeshPlan, device: torch.device) -> Needed | None:
    """Return the estimate of a step, the same in all processes, or None."""
    memory: list[MemoryUse] = []
    count = plan.num_processes * plan.pipeline
    gpus = Gpus.find(device, count) if config.training.can_be_followed else None

    def decide() -> list[int] | None:
        if gpus is None:
            return None
        answer = run_plan(config.with_mesh(plan), gpus)
        found = get_estimate(build_candidate(config, plan, 1), answer.forecasts)
        if found is not None and found.memory is not None:
            memory.append(found.memory)
            return [found.memory.total, answer.reserve]
        reason = answer.problem or (found and found.refused) or "nobody forecast it"
        logger.info("no forecast of a training step (%s): it is tried", reason)
        return None

    told = decide_together(decide)
    if told is None:
        return None
    return Needed(step=told[0], beside=told[1], memory=memory[0] if memory else None)


def _find_free_bytes(device: torch.device) -> int:
    """Return the free bytes of the GPU with the least free memory, over all processes."""
    free, total = torch.cuda.mem_get_info(device)
    return total - largest_over_processes(total - free, device)


def _rehearse(config: ExperimentConfig, plan: MeshPlan, task: Task, device: torch.device) -> None:
    """Run a training step on random voxels with a temporary network.

    Of a cut volume, one slab with its halo is taken, in this process only: a process that runs out of memory must not
    leave others waiting.
    """
    rows = -(-config.patch.batch // plan.data)
    depth, *others = config.patch.size
    sides = (depth if plan.spatial == 1 else min(depth, -(-depth // plan.spatial) + 2 * HALO), *others)
    config = config.with_values(patch={"batch": rows, "size": sides}).model_copy(update={"parallel": ParallelConfig()})
    network = build_model(config, task, device)
    step = build_step(config, task, network, record=False)
    average = WeightAverage(network, config.training.ema) if config.training.ema else None
    network.train()
    step(draw_batch(task, rows, sides, device), gathered=1, completes=True)
    if average is not None:
        average.update()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# Choose replicas and slabs for the processes of a job, by estimates.


def choose_by_estimate(
    config: ExperimentConfig, device: torch.device
) -> tuple[ExperimentConfig, str, MemoryUse | None] | None:
    """Return the config with the mesh of the fastest estimate on this job's processes, and the reason.

    The third result is the memory of its step, on the leader. Every process calls this function and gets the leader's
    choice. Each process has one GPU, so that a pipeline is no candidate. On a CPU, where memory is uncertain, and
    without estimates, return None; then the step is tried.

    Parameters
    ----------
    config : ExperimentConfig
        The config, with its planned network.
    device : torch.device
        Device of this process.
    """
    gpus = Gpus.find(device, count_processes())
    if gpus is None:  # the same in all processes of a job
        return None
    forecasts: list[Estimate] = []

    def decide() -> Mapping[str, Any] | None:
        # A pipeline is no candidate, and its micro-batches take long to trace.
        answer = run_plan(config.with_values(parallel={"pipeline": 1}), gpus)
        forecasts.extend(answer.forecasts)
        if answer.problem:
            logger.info("no forecast of a training step (%s): it is tried", answer.problem)
        return choose_mesh(answer.forecasts, gpus.count, int(SURE * gpus.memory) - answer.reserve)

    told = decide_together(decide)
    if told is None:
        return None
    candidate = Candidate(**told["candidate"])
    known = get_estimate(candidate, forecasts)
    return take_candidate(config, candidate, gpus.count), told["why"], None if known is None else known.memory


def choose_mesh(forecasts: Sequence[Estimate], num_processes: int, capacity: int) -> Mapping[str, Any] | None:
    """Return the fastest candidate with one process per GPU that surely fits, and the reason, as plain values.

    Parameters
    ----------
    forecasts : sequence of Estimate
        Estimates of the traced candidates.
    num_processes : int
        Processes; the candidate must use all of them.
    capacity : int
        Bytes of a GPU that the candidate may take.
    """
    suited = [
        each
        for each in forecasts
        if each.candidate.num_gpus == num_processes
        and each.candidate.pipeline == 1
        and each.memory is not None
        and each.memory.total <= capacity
    ]
    chosen, why = choose(suited)
    return None if chosen is None else {"candidate": vars(chosen.candidate), "why": why}
