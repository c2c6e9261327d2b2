"""One micro-batch's run while it is recorded: refuse what a replay would not repeat."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from volseg.device.gpus import is_gpu
from volseg.device.torch_internals import (
    TorchDispatchMode,
    find_saved_tensors_hooks,
    find_transform,
    get_storage_key,
)
from volseg.parallel.pipeline.flow.placement import BatchContext, PlacedRun, Placement
from volseg.parallel.pipeline.flow.statistics import WholeBatchStatistics
from volseg.parallel.pipeline.observe import run as runs
from volseg.parallel.pipeline.observe.observer import DIFFERENTIATE
from volseg.parallel.pipeline.record.graphs import RecordRefusedError

VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class RefusedOperations(TorchDispatchMode):
    """Refuse functions whose result Python reads, or whose shape depends on values: a replay runs no Python.

    Each of them would invalidate a CUDA capture. Random numbers are refused on other GPUs than the one that starts the
    graph: a replay writes the seeds of each GPU on that GPU's current stream, for which the graph does not wait.

    Parameters
    ----------
    first
        Device that starts the graph.
    """

    def __init__(self, first: torch.device) -> None:
        super().__init__()
        self._first = first

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Indexing has a tag only because of masks.
        is_index = function is torch.ops.aten.index.Tensor
        by_mask = is_index and any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        if by_mask or (not is_index and VALUES.intersection(function.tags)):
            raise RecordRefusedError(f"the network reads values of a tensor ({function}), which a replay would not")
        result = function(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in function.tags and any(
            is_gpu(tensor.device) and tensor.device != self._first for tensor in runs.iterate_tensors(result)
        ):
            raise RecordRefusedError(f"random numbers are drawn ({function}) on another GPU than {self._first}")
        return result


class RecordedRun(PlacedRun):
    """A placed run under ``RefusedOperations`` that also refuses derivatives, hooks of saved tensors and own state.

    Parameters
    ----------
    placement, statistics, context
        As for any placed run.
    first
        Device that starts the graph.
    """

    skips_quiet = False

    def __init__(
        self, placement: Placement, statistics: WholeBatchStatistics, context: BatchContext, first: torch.device
    ) -> None:
        super().__init__(placement, statistics, context)
        self._refused = RefusedOperations(first)

    def __enter__(self) -> "RecordedRun":
        self._refused.__enter__()
        super().__enter__()
        # By memory instead of identity: ``.data`` is another tensor, with a version of its own.
        self._memory = {_find_memory(state) for state in self.placement.states}
        return self

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)
        self._refused.__exit__(*failure)

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in DIFFERENTIATE or find_transform() is not None:
            raise RecordRefusedError("forward differentiates or maps functions (torch.autograd, torch.func)")
        if find_saved_tensors_hooks(False) is not None:
            raise RecordRefusedError("forward recomputes or offloads activations (hooks for saved tensors)")
        plain = [runs.unwrap(tensor) for tensor in runs.iterate_tensors((args, kwargs or {}))]
        read = [(tensor, runs.read_version(tensor)) for tensor in plain]
        result = super().__torch_function__(function, types, args, kwargs)
        # Micro-batches on two streams would change it concurrently.
        if any(_find_memory(tensor) in self._memory for tensor in runs.list_changed_tensors(read)):
            raise RecordRefusedError(f"forward changes its own state ({getattr(function, '__name__', function)})")
        return result


def _find_memory(tensor: Tensor) -> int:
    return get_storage_key(tensor.untyped_storage()) if tensor.layout == torch.strided else -1


class CountedStatistics(WholeBatchStatistics):
    """Leave ``num_batches_tracked`` to the replay."""

    def __init__(self, micro_batches: int) -> None:
        super().__init__(micro_batches)
        self._counters: list[Tensor] = []

    def counts_batch(self, counter: Tensor) -> bool:
        """Count later; return False."""
        if super().counts_batch(counter):
            self._counters.append(counter)
        return False

    def commit(self) -> None:
        """Update running buffers and counters."""
        super().commit()
        for counter in self._counters:
            counter.add_(1)
