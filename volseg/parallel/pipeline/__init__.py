"""Pipeline parallelism: each device holds some of the layers, and micro-batches flow through.

An ``Observer`` records one ``forward``: the layers and functions that it calls, and the tensors that they read.
``costs`` times the runs of calls that a cut may separate, and ``stages`` joins them so that the slowest stage takes
least time. Then every call of ``ModelParallel`` splits its batch (``micro_batch``), and the micro-batches flow: the
module's own ``forward`` runs on each, with layers and tensors on their stages' devices (``placement``), and with
running statistics of the whole batch. A ``BatchRecorder`` captures batches of a kind that always does the same as CUDA
graphs, and replays them.

The pipeline refuses networks that have no meaning in parts: outputs without a batch dimension, and cuts between the
creation of a tensor and its in-place change.

Why not a chain of children (Eisen), a rewritten network (torchgpipe) or a traced graph (torch.distributed.pipelining)?
The first drops the code of ``forward`` between children, the second requires another network, the third freezes
Python's control flow and one shape.
"""

from volseg.parallel.pipeline.partition import LayerCost, Partition, StageCost
from volseg.parallel.pipeline.strategy import Pipeline, PipelineStrategy

__all__ = ["LayerCost", "Partition", "Pipeline", "PipelineStrategy", "StageCost"]
