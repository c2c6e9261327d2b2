"""Several devices that behave as one: ``ModelParallel`` and what it is made of.

It imports nothing of volseg but the errors, and works in any PyTorch loop.
"""

from volseg.parallel.launcher import is_worker, launch
from volseg.parallel.model_parallel import ModelParallel
from volseg.parallel.spatial import (
    CapturedStep,
    ShardedVolume,
    from_slab,
    loads_batches,
    pointwise_function,
    scatter_batch,
    slab_shape,
    whole,
)
from volseg.parallel.verification.verify import Report, verify

__all__ = [
    "CapturedStep",
    "ModelParallel",
    "Report",
    "ShardedVolume",
    "from_slab",
    "is_worker",
    "launch",
    "loads_batches",
    "pointwise_function",
    "scatter_batch",
    "slab_shape",
    "verify",
    "whole",
]
