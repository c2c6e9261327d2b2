"""Record one forward as a ``Trace``: module calls, torch functions, and the tensors they read, keep and change.

A caller may count and drop the tensors that are saved for backward. Then observing needs little more memory than
inference.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from volseg.device.gpus import host_values
from volseg.device.torch_internals import find_saved_tensors_hooks, pytree
from volseg.parallel.pipeline import run as runs
from volseg.parallel.pipeline.statistics import NORMS, FrozenStatistics, list_batch_counters, run_norm
from volseg.parallel.pipeline.trace import Call, Operation, Trace
from volseg.parallel.state.module import read_version

DIFFERENTIATE = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)


@dataclass(slots=True, eq=False)
class Block:
    """A block of memory, which several tensors may view."""

    num_bytes: int
    made: int
    """The operation that made it, or first read it."""
    read: set[int] = field(default_factory=set)
    """Operations that read it."""
    kept: set[int] = field(default_factory=set)
    """Operations that save it for backward."""


class Observer(runs.Run):
    """Record a forward.

    Parameters
    ----------
    net
        The network, whose calls run in the context of this object.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.trace = Trace()
        self.made_bytes: dict[int, int] = {}
        self._paths = {module: path for path, module in net.named_modules()}
        names = [*net.named_parameters(remove_duplicate=False), *net.named_buffers(remove_duplicate=False)]
        self._states = {id(state): name for name, state in reversed(names)}
        # By memory, not identity: a linear layer keeps a transposed view of its weight.
        self._owners = {StorageWeakRef(state.untyped_storage()).cdata: name for name, state in names}
        self.blocks: list[Block] = []
        """All used memory except that of parameters and buffers."""
        self._known: dict[int, tuple[StorageWeakRef, Block]] = {}
        self._counters = list_batch_counters(net)
        self._calls: dict[str, int] = defaultdict(int)
        self._guards: list[tuple[Any, bool]] = []
        self._number = 0

    def count(self, tensor: Tensor) -> None:
        """Count a tensor that backward would need, as a hook that drops it."""
        self._see(tensor).kept.add(self._number)

    def note_arguments(self, values: Any) -> None:
        """Count the memory of the call's tensors as made before the first operation."""
        for tensor in runs.iterate_tensors(values):
            self._see(tensor)

    def _see(self, tensor: Tensor) -> Block:
        """Return the block of ``tensor``, made by this operation if it is new."""
        if tensor.layout != torch.strided:
            return Block(0, self._number)
        storage = tensor.untyped_storage()
        weak = StorageWeakRef(storage)
        known = self._known.get(weak.cdata)
        # An address is reused once its memory has been freed.
        if known is None or known[0].expired():
            self._known[weak.cdata] = known = (weak, Block(storage.nbytes(), self._number))
            if weak.cdata not in self._owners:
                self.blocks.append(known[1])
        return known[1]

    def _name_owner(self, tensor: Tensor) -> str | None:
        """Return the name of the parameter or buffer that owns the memory of ``tensor``."""
        if tensor.layout != torch.strided:
            return None
        return self._owners.get(StorageWeakRef(tensor.untyped_storage()).cdata)

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the start of a module call."""
        path = self._paths[module]
        call = Call(path, self._calls[path])
        self._calls[path] += 1
        self.trace.enter(call, self._list_makers((args, kwargs)), self._number_guard())

    def leave(self, module: nn.Module) -> None:  # noqa: ARG002 (calls nest)
        """Record the end of a module call."""
        self.trace.leave()

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        differentiates = function in DIFFERENTIATE
        if runs.keeps_place(function) and not differentiates:
            return self._ask(function, args, kwargs)
        # A tensor wrapped by torch.vmap has no memory of its own.
        read = [runs.unwrap(tensor) for tensor in runs.iterate_tensors((args, kwargs))]
        versions = [(tensor, read_version(tensor)) for tensor in read]
        blocks = [self._see(tensor) for tensor in read]
        for block in blocks:
            block.read.add(self._number)
        dice = _read_random_state(read)
        result = None
        if function in NORMS:
            # Whole-batch statistics do not tie two calls of a norm together.
            result = run_norm(FrozenStatistics(), function, args, kwargs)
        result = function(*args, **kwargs) if result is None else result
        changed = {id(tensor) for tensor in runs.list_changed_tensors(versions)} - self._counters
        rewritten = [(tensor, block) for tensor, block in zip(read, blocks, strict=True) if id(tensor) in changed]
        self.trace.written.update(name for tensor, _ in rewritten if (name := self._name_owner(tensor)))
        # The functions between the differentiated tensor and the derivative stay together.
        since = [block.made for block in (blocks if differentiates else [block for _, block in rewritten])]
        named = (self._states.get(id(tensor)) or getattr(tensor, "_volseg_alias", None) for tensor in read)
        states = dict.fromkeys(name for name in named if name is not None)
        with host_values():
            is_random = not torch.equal(dice, _read_random_state(read))
        uses, oldest = self._list_makers(read), min(since, default=None)
        self.trace.add(Operation(self._number, uses, tuple(states), oldest, is_random), self._number_guard())
        self._sign(result)
        return result

    def _ask(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function that only queries a tensor; mark aliases of parameters and buffers."""
        result = function(*args, **kwargs)
        if isinstance(result, Tensor) and args and id(args[0]) in self._states:
            # Another tensor in the same memory: a change of it changes the parameter or buffer.
            result._volseg_alias = self._states[id(args[0])]  # type: ignore[attr-defined]
        return result

    def _sign(self, result: Any) -> None:
        """Mark results as made by this operation."""
        tensors = list(runs.iterate_tensors(result))
        for tensor in tensors:
            tensor._volseg_made = (self, self._number)  # type: ignore[attr-defined]
            self._see(runs.unwrap(tensor))
        self.made_bytes[self._number] = sum(tensor.nbytes for tensor in tensors)
        self._number += 1

    def _list_makers(self, values: Any) -> tuple[int, ...]:
        marks = (getattr(tensor, "_volseg_made", None) for tensor in runs.iterate_tensors(values))
        return tuple(dict.fromkeys(mark[1] for mark in marks if mark is not None and mark[0] is self))

    def _number_guard(self) -> int:
        """Return a number for the state that checkpoint changes: hooks for saved tensors, and grad mode."""
        hooks = find_saved_tensors_hooks(False)
        pack, with_grad = hooks[0] if hooks else None, torch.is_grad_enabled()
        for number, (known, mode) in enumerate(self._guards):
            if known is pack and mode == with_grad:
                return number
        # Kept alive, so that its identity is not reused.
        self._guards.append((pack, with_grad))
        return len(self._guards) - 1

    def make_trace(self, output: Any) -> Trace:
        """Return the trace; mark the outputs as read by the caller."""
        for tensor in runs.iterate_tensors(output):
            self._see(tensor).read.add(self._number)
        self.trace.outputs = self._list_makers(pytree.tree_leaves(output))
        return self.trace


def _read_random_state(read: list[Tensor]) -> Tensor:
    """Return the state of the generator from which a function of these tensors would draw."""
    device = read[0].device if read else torch.device("cpu")
    with host_values():
        return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
