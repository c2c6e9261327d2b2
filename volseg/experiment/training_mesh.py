"""The mesh of a training: which processes compute which rows and slabs."""

from dataclasses import dataclass

import torch.distributed as dist

from volseg.config.parallel import MeshPlan
from volseg.config.schema import ExperimentConfig
from volseg.data.reading_group import ALONE, Readers
from volseg.estimate.allocator import MemoryUse
from volseg.parallel.mesh import Mesh
from volseg.parallel.replicas import Replicas
from volseg.parallel.spatial.plan.shards import spans

__all__ = ["TrainingMesh", "describe_mesh"]


@dataclass(frozen=True, kw_only=True)
class TrainingMesh:
    """Process mesh of a training, and the place of this process in it."""

    plan: MeshPlan
    mesh: Mesh
    replicas: Replicas | None = None
    """Who shares each batch; None where there is one replica."""
    readers: Readers = ALONE
    """Who reads cases: the first process of each replica, from which the others of it get their slabs."""
    judges: dist.ProcessGroup | None = None
    """On gloo, of the processes that read and so validate; None where there is one, and in those that do not."""
    estimate: MemoryUse | None = None
    """Memory of a step by the plan that chose the mesh, in the leader; None where no plan was made."""

    @property
    def reads(self) -> bool:
        """Whether this process reads cases."""
        return self.readers.number is not None

    def deal(self, batch_size: int) -> list[slice]:
        """Return the rows of a batch that this process computes, a slice for each of its replicas."""
        if self.replicas is None:
            return [slice(0, batch_size)]
        dealt = self.replicas.deal(batch_size)
        return [dealt[replica] for replica in self.replicas.own]


def describe_mesh(plan: MeshPlan, config: ExperimentConfig, reason: str | None = None) -> str:
    """Return in a sentence what the devices do with each step's batch."""
    batch, batches = config.patch.batch, config.training.accumulate
    parts = [f"each step's batch of {batch}"]
    if plan.data > 1:
        dealt = " + ".join(str(stop - start) for start, stop in spans(batch, plan.data))
        parts = [f"{plan.data} replicas of the network, each step's batch of {batch} dealt {dealt}"]
    if batches > 1:
        parts.append(f"{batches} batches per optimizer step")
    if plan.spatial > 1:
        parts.append(f"every volume cut into {plan.spatial} slabs")
    if plan.pipeline > 1:
        parts.append(f"the layers over {plan.pipeline} devices of each process")
    if plan.num_processes < plan.data * plan.spatial:
        parts.append(f"all of it computed by {plan.num_processes} process(es)")
    return ", ".join(parts) + (f": {reason}" if reason else "")
