"""Run the micro-batches of a batch through the stages, or run the placed network without side effects."""

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from volseg.device.torch_internals import pytree
from volseg.errors import PartitionError
from volseg.parallel.pipeline import run as runs
from volseg.parallel.pipeline.micro_batch import Call, CutBatch, join
from volseg.parallel.pipeline.placement import BatchContext, PlacedRun, Placement
from volseg.parallel.pipeline.statistics import FrozenStatistics, WholeBatchStatistics
from volseg.parallel.pipeline.transfer import Passage, PendingCopies, send, wait_for_copies
from volseg.parallel.state.module import read_version
from volseg.parallel.state.recorded import Attempt

logger = logging.getLogger(__name__)

SPLIT_BATCH_NORM = (
    "batch norm in a pipeline normalises each micro-batch with its own mean and variance, so outputs and gradients in "
    "training differ from those of the plain network; the running statistics are those of the whole batch. Instance "
    "norm, group norm and strategy='spatial' are exact"
)


def run_batch(net: nn.Module, placement: Placement, batch: CutBatch) -> Any:
    """Run the micro-batches.

    Raises
    ------
    PartitionError
        If forward changes in place an argument that goes whole to each micro-batch, or any while there are gradients:
        pieces of a tensor share its version, so the change of one invalidates what autograd has saved of another.
    """
    leaves, grads = pytree.tree_leaves(batch.call), torch.is_grad_enabled()
    guarded = [leaf for leaf, is_cut in zip(leaves, batch.is_batch, strict=True) if grads or not is_cut]
    versions = [(leaf, read_version(leaf)) for leaf in guarded if isinstance(leaf, Tensor)]
    output = join(_flow(net, placement, batch), batch.sizes)
    if len(batch.calls) > 1 and runs.list_changed_tensors(versions):
        raise PartitionError(
            "forward changes an argument in place, but autograd or the next micro-batch may need it as it was; work "
            "out of place (inplace=False, x.clone()), or use the whole batch as split_size"
        )
    return output


def _flow(net: nn.Module, placement: Placement, batch: CutBatch) -> list[Any]:
    """Start the micro-batches one after another.

    Kernels run behind the host: while the second stage computes the first micro-batch, the first stage already has the
    second in its queue. Every device works through its own queue in the order of the micro-batches.
    """
    statistics = WholeBatchStatistics(len(batch.calls))
    context = BatchContext()
    outputs, passages = [], []
    for index, (args, kwargs) in enumerate(batch.calls):
        statistics.begin(index)
        with PlacedRun(placement, statistics, context):
            output = net(*args, **kwargs)
        output, sent = _send_home(output, batch.target, context.pending)
        outputs.append(output)
        passages += sent
    # At the end: an earlier wait would keep the target from its next micro-batch.
    for copied, passage in passages:
        passage.wait(copied)
    # The caller may change the batch in place.
    devices = placement.devices | {batch.target}
    wait_for_copies(devices, devices)
    statistics.commit()
    if statistics.splits_batch_norm and not placement.has_warned:
        placement.has_warned = True
        logger.warning(SPLIT_BATCH_NORM)
    placement.forget_marks(outputs)
    return outputs


def _send_home(output: Any, target: torch.device, pending: PendingCopies) -> tuple[Any, list[tuple[Tensor, Passage]]]:
    """Start the copies of the outputs to the target device."""
    sent: list[tuple[Tensor, Passage]] = []

    def home(tensor: Tensor) -> Tensor:
        if tensor.device == target or tensor.device.type != target.type:
            return tensor
        sent.append(send(tensor, target, pending))
        return sent[-1][0]

    return pytree.tree_map_only(Tensor, home, output), sent


def run_untraced(
    net: nn.Module,
    placement: Placement,
    devices: Sequence[torch.device],
    call: Call,
    with_hooks: bool,
    look: Callable[[Any], Any],
) -> Any:
    """Run the placed network without side effects, with the user's hooks or without, and ``look`` at its output.

    The output may be a list of the network's own, which then gets its earlier contents again.
    """
    hooks = contextlib.nullcontext() if with_hooks else runs.set_hooks_aside(net)
    with Attempt(net, devices, written=placement.written), hooks:
        with PlacedRun(placement, FrozenStatistics(counts_batches=True)):  # the attempt restores the counters
            output = net(*call[0], **call[1])
        return look(output)
