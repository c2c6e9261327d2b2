"""Run the network's own ``forward`` with each layer on its stage's device.

Every leaf call has a stage. A tensor that meets a function on another stage is sent there directly (a skip never
travels through the stages between). Functions that ``forward`` calls between layers run on the stage of the last
layer. Everything is ordinary autograd, so backward needs no code: the engine runs one C++ thread per device, and the
micro-batches flow back the way they came.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self
from weakref import ref

import torch
from torch import Tensor, nn

from volseg.device.gpus import move_in_place
from volseg.device.module_internals import get_buffers, get_parameters
from volseg.device.torch_internals import find_backward_pass, get_version, is_transformed, without_overrides
from volseg.errors import PartitionError
from volseg.parallel.pipeline import run as runs
from volseg.parallel.pipeline.statistics import (
    NORMS,
    FrozenStatistics,
    WholeBatchStatistics,
    list_batch_counters,
    run_norm,
)
from volseg.parallel.pipeline.trace import Trace, list_segments
from volseg.parallel.pipeline.transfer import PendingCopies, send, wait_for_copies
from volseg.parallel.state.module import read_version

MARKS = ("_volseg_location", "_volseg_copies")
"""Attributes set on tensors."""

ADDITIONS = ("add_", "__iadd__")
"""Names of ``x.add_`` and ``x += ...``, by which a norm counts its batches."""


@dataclass(frozen=True, eq=False, slots=True)
class Location:
    """A stage's place. Compared by identity: two stages may share a device, yet share no tensors."""

    stage: int
    device: torch.device


@dataclass(eq=False)
class Placement:
    """Stage of every leaf call, parameter and buffer of a network."""

    locations: tuple[Location, ...]
    anchors: dict[nn.Module, list[Location]]
    """For each module that may start a stage: its location, call by call."""
    owners: dict[int, Location]
    """Location of each parameter and buffer, by identity."""
    states: tuple[Tensor, ...]
    """These parameters and buffers, referenced so that no other tensor gets one of the identities."""
    counters: frozenset[int] = frozenset()
    """Identities of the ``num_batches_tracked`` buffers."""
    written: tuple[Tensor, ...] = ()
    """Parameters and buffers that forward changed in the observed call."""
    buffered: tuple[nn.Module, ...] = ()
    """Modules with buffers."""
    aliased: set[int] = field(default_factory=set)
    """Identities of parameters and buffers that forward has reached under another name, such as ``.data``: a change of
    that name does not increase the version, so copies of them are valid only once."""
    has_warned: bool = False
    """Whether the warning about batch norm on micro-batches was given."""
    devices: frozenset[torch.device] = field(init=False)

    def __post_init__(self) -> None:
        self.devices = frozenset(location.device for location in self.locations)

    def forget_marks(self, outputs: Any) -> None:
        """Remove the location marks from outputs of ``forward`` and from tensors that it leaves in buffers.

        Otherwise saving the tensors would save the marks.
        """
        buffers = (buffer for module in self.buffered for buffer in get_buffers(module).values())
        for tensor in runs.iterate_tensors([outputs, *buffers]):
            for name in MARKS:
                vars(tensor).pop(name, None)

    def start_late_run(self) -> "PlacedRun":
        """Return a run for a module called by itself: by the user, or by checkpoint's recomputation in backward."""
        is_recomputed = find_backward_pass() != -1
        return PlacedRun(self, FrozenStatistics(keeps_form=True) if is_recomputed else None)


def place(net: nn.Module, trace: Trace, lengths: Sequence[int], devices: Iterable[torch.device]) -> Placement:
    """Assign the trace's segments, ``lengths`` at a time, to ``devices``, and move parameters and buffers there.

    Each tensor goes to the first stage that uses it, and keeps its identity (``.data`` is replaced), so optimizers and
    tied weights stay valid. State that the trace never saw goes with the layer registered before it.
    """
    locations = tuple(Location(stage, device) for stage, (device, _) in enumerate(zip(devices, lengths, strict=False)))
    stage_of = [location for location, length in zip(locations, lengths, strict=True) for _ in range(length)]
    modules = dict(net.named_modules(remove_duplicate=False))
    # Tied parameters and buffers are listed under each of their names.
    named = net.named_parameters(remove_duplicate=False), net.named_buffers(remove_duplicate=False)
    states = {name: state for kind in named for name, state in kind}
    anchors: dict[nn.Module, list[Location]] = defaultdict(list)
    owners: dict[int, Location] = {}
    for segment, location in zip(list_segments(trace), stage_of, strict=True):
        for call in segment.calls:
            anchors[modules[call.path]].append(location)
        for name in segment.states:
            owners.setdefault(id(states[name]), location)
    latest = locations[0]
    for module in net.modules():
        own = [*get_parameters(module).values(), *get_buffers(module).values()]
        found = next((owners[id(state)] for state in own if id(state) in owners), None)
        latest = found or anchors.get(module, [latest])[0]
        for state in own:
            if state is not None:
                owners.setdefault(id(state), latest)
        if own and found is None and not any(module.children()):
            anchors.setdefault(module, [latest])
    for state in states.values():
        gradient, state.grad = state.grad, None
        move_in_place(state, owners[id(state)].device)
        state.grad = None if gradient is None else gradient.to(state.device)
    written = tuple(states[name] for name in sorted(trace.written))
    buffered = tuple(module for module in net.modules() if get_buffers(module))
    of_states = tuple(states.values()), list_batch_counters(net), written
    placement = Placement(locations, dict(anchors), owners, *of_states, buffered)
    runs.install_hooks(net)
    weak = ref(placement)
    for module in net.modules():
        runs.latecomers[module] = weak
    return placement


@dataclass(eq=False)
class BatchContext:
    """Objects that the micro-batches of a batch share."""

    borrowed: dict[Any, Tensor] = field(default_factory=dict)
    """Copies of parameters for stages that use but do not own them."""
    pending: PendingCopies = field(default_factory=PendingCopies)


class PlacedRun(runs.Run):
    """One micro-batch's run over the stages.

    Parameters
    ----------
    placement
        Stage of every call and state.
    statistics
        Handles running statistics; ``None`` leaves norms unchanged.
    context
        Objects that the micro-batches of a batch share.
    """

    def __init__(
        self,
        placement: Placement,
        statistics: FrozenStatistics | WholeBatchStatistics | None = None,
        context: "BatchContext | None" = None,
    ) -> None:
        super().__init__()
        self.placement = placement
        self.here = placement.locations[0]
        self._statistics = statistics
        self._context = context or BatchContext()
        self._calls: dict[nn.Module, int] = defaultdict(int)
        self._received: list[tuple[Tensor, int]] = []
        self._senders: list[ref[Tensor]] = []
        self._device_before: int | None = None

    def __enter__(self) -> Self:
        super().__enter__()
        if self.here.device.type == "cuda":
            self._device_before = torch.cuda.current_device()
            torch.cuda.set_device(self.here.device)
        return self

    def __exit__(self, *failure: Any) -> None:
        if self._device_before is not None:
            torch.cuda.set_device(self._device_before)
        super().__exit__(*failure)
        for sender in self._senders:
            tensor = sender()
            if tensor is not None:
                # The tensors that backward keeps must not keep copies that only forward needed.
                del tensor._volseg_copies  # type: ignore[attr-defined]

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> runs.Arguments | None:
        """Switch to the stage of ``module`` and send its arguments there."""
        calls = self.placement.anchors.get(module)
        if calls is None:
            return None
        index = self._calls[module]
        self._calls[module] = index + 1
        self.turn_to(calls[min(index, len(calls) - 1)])
        # Functions called here are not part of forward, and must not be intercepted.
        with without_overrides():
            if self._all_here(args, kwargs):
                return None
            return runs.map_tensors(self.bring, args), runs.map_tensors(self.bring, kwargs)

    def turn_to(self, location: Location) -> None:
        """Continue on another stage."""
        if location is not self.here:
            if location.device.type == "cuda":
                # Tensors that forward makes on plain "cuda" belong to the current stage.
                torch.cuda.set_device(location.device)
            if location.stage < self.here.stage:  # an earlier layer: it may change sent tensors in place
                wait_for_copies([location.device], self.placement.devices)
            self.here = location

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if runs.keeps_place(function):
            result = function(*args, **kwargs)
            return self._inherit(result, args) if isinstance(result, Tensor) else result
        if self._statistics is not None:
            if function in NORMS:
                result = run_norm(self._statistics, function, args, kwargs, self.bring)
                if result is not None:
                    return self._settle(result)
            elif args and id(args[0]) in self.placement.counters and getattr(function, "__name__", "") in ADDITIONS:
                # Counted on its own device, once per batch.
                return function(*args, **kwargs) if self._statistics.counts_batch(args[0]) else args[0]
        if not self._all_here(args, kwargs):
            args, kwargs = runs.map_tensors(self.bring, args), runs.map_tensors(self.bring, kwargs)
        result = function(*args, **kwargs)
        if self._received:
            self._check_received(function)
        return self._settle(result)

    def _all_here(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether every tensor in the arguments is here; unrolled, as every function passes this check."""
        here = self.here
        for value in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(value, Tensor):
                if getattr(value, "_volseg_location", None) is not here and not self.is_here(value):
                    return False
            elif isinstance(value, tuple | list | dict) and not all(map(self.is_here, runs.iterate_tensors(value))):
                return False
        return True

    def is_here(self, tensor: Tensor) -> bool:
        """Return whether a function of the current stage may read ``tensor`` directly."""
        at = getattr(tensor, "_volseg_location", None) or self.placement.owners.get(id(tensor))
        if at is not None:
            return at is self.here
        # Made elsewhere: only a tensor on another stage's device moves. CPU scalars and indices mix with CUDA tensors.
        return tensor.device == self.here.device or tensor.device not in self.placement.devices

    def bring(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` on the current stage, sent once and cached."""
        if self.is_here(tensor):
            return tensor
        # A copy made without grad must not serve a use with grad: no gradient flows through it.
        with_grad = torch.is_grad_enabled()
        copies: dict[Any, Tensor]
        key: Any
        if is_transformed(tensor):
            raise PartitionError(
                f"a function inside torch.vmap or torch.func, on stage {self.here.stage}, uses a tensor of "
                "another stage: keep the transformed function inside the forward of one layer, or set the cuts "
                "(cuts=[...]) so that both are on one device"
            )
        if id(tensor) in self.placement.owners:
            # A buffer that forward has changed since then is copied again.
            number = read_version(tensor)
            copies, key = self._context.borrowed, (id(tensor), self.here, with_grad, number)
            if id(tensor) in self.placement.aliased:
                copies.pop(key, None)
        else:
            # Cached on the tensor itself, so that copies live no longer than the original or this run.
            if not hasattr(tensor, "_volseg_copies"):
                tensor._volseg_copies = {}  # type: ignore[attr-defined]
                self._senders.append(ref(tensor))
            copies, key = tensor._volseg_copies, (self.here, with_grad, read_version(tensor))  # type: ignore[attr-defined]
        if key not in copies:
            # The next micro-batch may change a buffer during the copy.
            is_buffer = id(tensor) in self.placement.owners and not isinstance(tensor, nn.Parameter)
            copied, passage = send(tensor.clone() if is_buffer else tensor, self.here.device, self._context.pending)
            copies[key] = passage.wait(copied)
            copies[key]._volseg_location = self.here  # type: ignore[attr-defined]
        if not copies[key].is_inference():
            self._received.append((copies[key], get_version(copies[key])))
        return copies[key]

    def _settle(self, result: Any) -> Any:
        """Locate the tensors of a result here."""
        for tensor in runs.iterate_tensors(result):
            if tensor.device == self.here.device:
                tensor._volseg_location = self.here  # type: ignore[attr-defined]
        return result

    def _inherit(self, result: Any, args: tuple[Any, ...]) -> Any:
        """Locate an attribute that is a tensor (``x.T``, ``x.data``) with its owner."""
        if isinstance(result, Tensor) and args and isinstance(args[0], Tensor):
            owner = args[0]
            at = getattr(owner, "_volseg_location", None) or self.placement.owners.get(id(owner))
            if at is not None and result is not owner and id(result) not in self.placement.owners:
                result._volseg_location = at  # type: ignore[attr-defined]
                if id(owner) in self.placement.owners:
                    self.placement.aliased.add(id(owner))
        return result

    def _check_received(self, function: Callable[..., Any]) -> None:
        """Refuse an in-place change of a copy: the original, on its own stage, would keep the old value."""
        if runs.list_changed_tensors(self._received):
            name = getattr(function, "__name__", repr(function))
            raise PartitionError(
                f"{name} changes in place a tensor of stage {self.here.stage - 1} or earlier, which the partition "
                "did not foresee: forward took another branch than in the measured call. Use the out-of-place "
                "function, or set the cuts (cuts=[...]) so that both are on one device"
            )
        self._received.clear()
