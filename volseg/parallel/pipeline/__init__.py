"""One network over several devices: each holds some of the layers, and micro-batches flow through.

A ``forward`` is first *observed* (``observe``): which layers it calls, which functions, what they read. The runs of
calls that a cut may separate are timed one by one, and cut into stages whose slowest is as quick as can be (``plan``).
Then every call of ``ModelParallel`` splits its batch (``micro_batch``) and lets the pieces *flow* (``flow``): the
module's own ``forward`` runs on each, layers and tensors on their stages' devices, with running statistics of the whole
batch. What batches of one kind always do alike is *recorded* as CUDA graphs (``record``), and replayed.

It refuses what has no meaning by parts: outputs without a batch dimension, and cuts between the making of a
tensor and its change in place.

Why not a chain of children (Eisen), a rewritten network (torchgpipe) or a traced graph
(torch.distributed.pipelining)? The first drops whatever ``forward`` does between children, the second asks for
another network, the third freezes Python's control flow and one shape.
"""

from volseg.parallel.pipeline.plan.partition import LayerCost, Partition, StageCost
from volseg.parallel.pipeline.strategy import Pipeline, PipelineStrategy

__all__ = ["LayerCost", "Partition", "Pipeline", "PipelineStrategy", "StageCost"]
