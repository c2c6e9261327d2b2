"""Decide who computes what in a training, once, before its model is built.

Where the config leaves open whether samples are dealt to replicas or cut, one training pass on each GPU decides. Why
tried and not computed: what a network keeps for its backward pass, nobody but a run of it tells.
"""

import logging

import torch

from volseg.config.parallel import MeshPlan, ParallelConfig
from volseg.config.schema import ExperimentConfig
from volseg.data.cases import Task
from volseg.data.labels import num_indices
from volseg.data.reading_group import meet_readers
from volseg.experiment.building import build_objective
from volseg.experiment.out_of_memory import is_out_of_memory
from volseg.experiment.placed_network import build_model, build_plain_network
from volseg.experiment.rehearsing import rehearse_network
from volseg.experiment.training_mesh import TrainingMesh, describe
from volseg.parallel.devices import count_launched, count_processes, is_main_process
from volseg.parallel.mesh import join_mesh
from volseg.parallel.processes import make_group, start_group
from volseg.parallel.state.random import own_random_numbers
from volseg.workflow.averaging import WeightAverage
from volseg.workflow.components import build_optimizer
from volseg.workflow.named import Named
from volseg.workflow.objective import require_mean_over_samples
from volseg.workflow.precision import Precision
from volseg.workflow.processes import largest_over_processes

__all__ = ["join_processes", "settle_mesh"]

logger = logging.getLogger(__name__)

HALO = 8
"""Planes that a slab is tried with on each side besides its own: those of its neighbours that convolutions need."""


def join_processes(config: ExperimentConfig) -> None:
    """Start the process group of a job of several processes (``torchrun``, ``--gpus``).

    Raises
    ------
    ConfigError
        If so many processes cannot run the config.
    """
    count = count_launched()
    config.mesh(count)  # before anybody waits for anybody
    if count > 1:
        start_group(config.parallel.timeout, on_cpu=config.device == "cpu")


def settle_mesh(config: ExperimentConfig, task: Task, device: torch.device) -> tuple[ExperimentConfig, TrainingMesh]:
    """Return the config with what it left open about the mesh, and the mesh; every process calls it.

    Raises
    ------
    ConfigError
        If replicas would share a batch whose loss is no mean over its samples.
    """
    count = count_processes()
    plan, reason = config.mesh(count), None
    if plan.is_open and plan.data > 1 and _has_memory_of_its_own(device):
        reason = "a sample fits a GPU (parallel.spatial: N cuts it)"
        if not _can_train(config, plan, task, device):
            plan = config.mesh(count, fits=False)
            reason = "a GPU has no memory for a training step on its whole samples"
    if plan.data > 1:
        require_mean_over_samples(
            build_objective(config, task),
            num_channels=task.num_channels,
            num_classes=task.num_outputs,
            num_indices=num_indices(task),
            outputs=_count_channels(config, task),
        )
    settled = config.with_mesh(plan) if count > 1 else config
    if is_main_process() and plan.data * plan.spatial * plan.pipeline > 1:
        logger.info("%s", describe(plan, config, reason))
    mesh = join_mesh(plan.data_processes, plan.spatial_processes)
    replicas = mesh.replicas(plan.data, config.training.deterministic) if plan.data > 1 else None
    if count == 1:
        return settled, TrainingMesh(plan=plan, mesh=mesh, replicas=replicas)
    # Groups of their own: a thread sends in them beside other work.
    readers = meet_readers(make_group(backend="gloo"), reads=mesh.shard == 0)
    judges = make_group(list(range(0, count, mesh.spatial)), "gloo") if mesh.data > 1 else None
    return settled, TrainingMesh(
        plan=plan, mesh=mesh, replicas=replicas, readers=readers, judges=judges if mesh.shard == 0 else None
    )


def _count_channels(config: ExperimentConfig, task: Task) -> dict[str, int]:
    """Return the channels of the network's further outputs, which its losses are tried with."""
    if len(config.network.outputs) == 1:
        return {}
    with own_random_numbers([]):
        made = rehearse_network(build_plain_network(config, task), config, task)
    return {name: value.shape[1] for name, value in made.items() if name != "logits" and getattr(value, "ndim", 0) == 5}


def _has_memory_of_its_own(device: torch.device) -> bool:
    return device.type != "cpu"


def _can_train(config: ExperimentConfig, plan: MeshPlan, task: Task, device: torch.device) -> bool:
    """Tell whether every process has the memory for a training step on its own part of a batch."""
    fits = True
    try:
        with own_random_numbers([device]):
            _rehearse(config, plan, task, device)
    except RuntimeError as fault:  # that of torch, cuDNN or Triton
        if not is_out_of_memory(fault):
            raise
        fits = False
    torch.cuda.empty_cache()
    return not largest_over_processes(int(not fits), device)


def _rehearse(config: ExperimentConfig, plan: MeshPlan, task: Task, device: torch.device) -> None:
    """Do a training step on random voxels with a network of its own, of which nothing is left.

    Of a volume that is cut one slab is taken, with its halo, by this process alone: one that runs out of memory must
    not leave others waiting for it.
    """
    rows = -(-config.patch.batch // plan.data)
    depth, *others = config.patch.size
    sides = (depth if plan.spatial == 1 else min(depth, -(-depth // plan.spatial) + 2 * HALO), *others)
    patch = config.patch.model_copy(update={"batch": rows, "size": sides})
    config = config.model_copy(update={"parallel": ParallelConfig(), "patch": patch})
    network = build_model(config, task, device)
    on_gpu, parts = device.type == "cuda", config.optimizer.parts
    optimizer = build_optimizer(config.optimizer.spec(), network, on_gpu=on_gpu, parts=parts)
    average = WeightAverage(network, config.training.ema) if config.training.ema else None
    image = torch.randn(rows, task.num_channels, *sides, device=device)
    label = torch.randint(num_indices(task), (rows, 1, *sides), dtype=torch.uint8, device=device)
    network.train()
    with Precision.choose(config.training.precision, device).autocast():
        outputs = Named(network, inputs=["image"], outputs=config.network.outputs)({"image": image})
        fields = build_objective(config, task).to(device)({"image": image, "label": label, **outputs})
    fields["loss"].backward()
    optimizer.step()
    if average is not None:
        average.update()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
