"""Let the micro-batches of a batch flow through the stages; or run the network where nothing of it remains."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from volseg.errors import PartitionError
from volseg.parallel.pipeline.flow.placement import PlacedRun, Placement
from volseg.parallel.pipeline.flow.statistics import FrozenStatistics, WholeBatchStatistics
from volseg.parallel.pipeline.flow.transfer import Passage, send
from volseg.parallel.pipeline.micro_batch import Call, copies_of, join, with_pieces
from volseg.parallel.pipeline.observe import run as runs
from volseg.parallel.pipeline.observe.costs import copy_of, moved
from volseg.parallel.pipeline.record.choice import Watch, WatchedRun
from volseg.parallel.state.module import remember
from volseg.parallel.state.random import own_random_numbers

__all__ = ["run_batch", "untraced"]


def run_batch(
    net: nn.Module,
    placement: Placement,
    call: Call,
    calls: Sequence[Call],
    is_batch: Sequence[bool],
    sizes: Sequence[int],
    target: torch.device,
    watch: Watch | None = None,
) -> Any:
    """Run the micro-batches; give back to the caller's tensors what forward changes in them.

    Pieces of one tensor share its versions: one that is changed in place would spoil what autograd has saved of
    another. So where a tensor has a history, and forward was seen to change it, each micro-batch has a copy.
    """
    leaves = pytree.tree_leaves(call)
    open_to_change = len(calls) > 1 and torch.is_grad_enabled()
    results = [
        number
        for number, is_cut in enumerate(is_batch)
        if open_to_change and is_cut and leaves[number].requires_grad and not leaves[number].is_leaf
    ]
    if not results:
        return join(_flow(net, placement, calls, sizes, target, watch), sizes)
    versions = [leaves[number]._version for number in results]
    pieces = copies_of(leaves, results, sizes) if placement.changes_arguments else {}
    if pieces:
        calls = with_pieces(calls, pieces)
    output = join(_flow(net, placement, calls, sizes, target, watch), sizes)
    for number, rows in pieces.items():
        if any(piece._version for piece in rows):
            leaves[number].copy_(torch.cat(rows))
    if not pieces and versions != [leaves[number]._version for number in results]:
        raise PartitionError(
            "forward changes an argument in place that needs a gradient, which it did not when the network was "
            "measured; change a copy of it, or give the batch whole (split_size)"
        )
    return output


def _flow(
    net: nn.Module,
    placement: Placement,
    calls: Sequence[Call],
    sizes: Sequence[int],
    target: torch.device,
    watch: Watch | None = None,
) -> list[Any]:
    """Launch the micro-batches one after another.

    Launching is asynchronous: while the second stage computes the first micro-batch, the first stage has been
    given the second. Every device works through its own queue in the order of the micro-batches.
    """
    statistics = WholeBatchStatistics(len(calls))
    borrowed: dict[Any, Tensor] = {}
    outputs, passages = [], []
    for index, (args, kwargs) in enumerate(calls):
        statistics.begin(index)
        run = (PlacedRun if watch is None else WatchedRun)(placement, statistics, borrowed)
        with run:
            output = net(*args, **kwargs)
        if isinstance(run, WatchedRun) and watch is not None:
            watch.note(sizes[index], run.signature, run.changed)
        output, sent = _send_home(output, target)
        outputs.append(output)
        passages += sent
    # Only now: a wait in between would keep the target from its next micro-batch.
    for copied, passage in passages:
        passage.wait(copied)
    statistics.commit()
    placement.forget_marks(outputs)
    return outputs


def _send_home(output: Any, target: torch.device) -> tuple[Any, list[tuple[Tensor, Passage]]]:
    """Start the outputs' way to the target device."""
    sent: list[tuple[Tensor, Passage]] = []

    def home(tensor: Tensor) -> Tensor:
        if tensor.device == target or tensor.device.type != target.type:
            return tensor
        sent.append(send(tensor, target))
        return sent[-1][0]

    return pytree.tree_map_only(Tensor, home, output), sent


@contextlib.contextmanager
def untraced(
    net: nn.Module, placement: Placement | None, devices: Sequence[torch.device], with_hooks: bool
) -> Iterator[Callable[[Call], Any]]:
    """Lend a function that runs the network, on a copy or where it is placed, of which nothing remains."""
    if placement is None:
        first = devices[0]
        probe = copy_of(net, first, with_hooks)

        def run(call: Call) -> Any:
            args, kwargs = moved(call, first)
            return probe(*args, **kwargs)

        selected = torch.cuda.device(first) if first.type == "cuda" else contextlib.nullcontext()
        with selected, own_random_numbers(devices):
            yield run
        return

    def run_placed(call: Call) -> Any:
        with PlacedRun(placement, FrozenStatistics()):
            return net(*call[0], **call[1])

    known = remember(net, placement.written)
    try:
        with own_random_numbers(devices), contextlib.nullcontext() if with_hooks else runs.hooks_aside(net):
            yield run_placed
    finally:
        known.put_back()
