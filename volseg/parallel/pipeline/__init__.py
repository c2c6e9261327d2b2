"""Pipeline parallelism: each device holds some of the layers, and micro-batches flow through.

A ``forward`` is first *observed* (``observe``): the layers and functions it calls, and the tensors they read. The runs
of calls that a cut may separate are timed one by one, and cut into stages that minimise the time of the slowest
(``plan``). Then every call of ``ModelParallel`` splits its batch (``micro_batch``) and lets the pieces *flow*
(``flow``):
the module's own ``forward`` runs on each, layers and tensors on their stages' devices, with running statistics of the
whole batch. A batch whose kind always does the same is *recorded* as CUDA graphs (``record``), and replayed.

The pipeline refuses networks that have no meaning in parts: outputs without a batch dimension, and cuts between the
creation of a tensor and its in-place change.

Why not a chain of children (Eisen), a rewritten network (torchgpipe) or a traced graph
(torch.distributed.pipelining)? The first drops the code of ``forward`` between children, the second requires
another network, the third freezes Python's control flow and one shape.
"""

from volseg.parallel.pipeline.plan.partition import LayerCost, Partition, StageCost
from volseg.parallel.pipeline.strategy import Pipeline, PipelineStrategy

__all__ = ["LayerCost", "Partition", "Pipeline", "PipelineStrategy", "StageCost"]
