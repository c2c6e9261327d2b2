"""Train and run a network on several devices with the results of one: ``ModelParallel`` and its parts.

The package imports only ``device`` and the errors of volseg, and works in any PyTorch loop.
"""

from volseg.parallel.batches import from_slab, loads_batches, scatter_batch, slab_shape
from volseg.parallel.compiled_network import CompiledNetwork
from volseg.parallel.data_parallel import DataParallel, get_replicas
from volseg.parallel.fast_kernels import FastKernels
from volseg.parallel.fixed_order import RoundSums
from volseg.parallel.model_parallel import ModelParallel
from volseg.parallel.pipeline import Pipeline
from volseg.parallel.processes.launcher import is_worker, launch
from volseg.parallel.recorded_step import RecordedStep
from volseg.parallel.replicas import Mesh, Replicas, Share, join_mesh
from volseg.parallel.spatial import ShardedVolume, Spatial, pointwise_function, whole
from volseg.parallel.verification.report import Report
from volseg.parallel.verification.verify import verify

__all__ = [
    "CompiledNetwork",
    "DataParallel",
    "FastKernels",
    "Mesh",
    "ModelParallel",
    "Pipeline",
    "RecordedStep",
    "Replicas",
    "Report",
    "RoundSums",
    "ShardedVolume",
    "Share",
    "Spatial",
    "from_slab",
    "get_replicas",
    "is_worker",
    "join_mesh",
    "launch",
    "loads_batches",
    "pointwise_function",
    "scatter_batch",
    "slab_shape",
    "verify",
    "whole",
]
