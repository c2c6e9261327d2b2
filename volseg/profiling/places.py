"""Track the layer and direction that a step currently computes, and the work that it does there.

In forward, global module hooks report the running module. In backward, the autograd node identifies it: nodes are
numbered in the order of their creation, so a node's number is between those at the start and the end of its module::

    numbers     0 ... 7 | 8 ... 11 | 12 ... 20 | 21 ...
    modules      stem   |  down.0  |  down.1   | (loss)

A layer is the innermost running module. A deferred norm counts for the module that reads its result, since its kernel
runs there.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from volseg.device.torch_internals import find_backward_node, find_backward_pass, find_next_node_number, get_node_number
from volseg.estimate.gpu_kinds import GpuKind
from volseg.estimate.instances import Links
from volseg.estimate.roofline import HALF, classify
from volseg.estimate.step_time import select_step
from volseg.estimate.trace import KernelRun, Sent, StepTrace
from volseg.profiling.kernels import LOSS, MARK, OPTIMIZER, OUTSIDE, PlacedWork, StepPlace, find_kind, travels


class PlaceWatch:
    """Report the place of a step inside `watching`.

    Parameters
    ----------
    find_network
        Returns the plain network that a module runs, whose module names are reported; None for other modules.
    annotates
        Whether to add ranges to the trace of torch's profiler.
    """

    def __init__(self, find_network: Callable[[nn.Module], nn.Module | None], *, annotates: bool = False) -> None:
        self._find_network = find_network
        self._annotates = annotates
        self._names: dict[nn.Module, str] = {}
        self._roots: set[nn.Module] = set()
        self._parameters: dict[int, str] = {}
        self._running: list[tuple[nn.Module, str, Any]] = []
        self._turns: dict[int, tuple[list[int], list[str]]] = {}
        """Node numbers at which the layer changes, and the new layers, by thread."""
        self._layer_outside = OUTSIDE
        self._was_backward = False
        self.classes: dict[str, str] = {}
        """Class of each layer's module."""

    @contextmanager
    def watching(self) -> Iterator["PlaceWatch"]:
        """Watch the modules of this process inside the context."""
        handles = [
            register_module_forward_pre_hook(self._begin),
            register_module_forward_hook(self._end, always_call=True),
        ]
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def find_place(self) -> StepPlace:
        """Return the current place of the step on the calling thread."""
        if find_backward_pass() != -1:
            self._was_backward = True
            if self._running:
                return StepPlace(self._running[-1][1], "recompute")
            node = find_backward_node()
            return OUTSIDE_BACKWARD if node is None else StepPlace(self._find_layer(node), "backward")
        if self._running:
            return StepPlace(self._running[-1][1], "forward")
        if self._was_backward:
            return StepPlace(OPTIMIZER, "optimizer")
        return StepPlace(self._layer_outside, "forward" if self._layer_outside == LOSS else "other")

    def begin_step(self) -> None:
        """Mark the start of a step: work before the network's forward pass belongs to no layer."""
        self._was_backward, self._layer_outside = False, OUTSIDE

    def name_layer(self, number: int) -> str:
        """Return the layer that created the autograd node with a number.

        Threads may use the same numbers: the first thread that ran a module takes precedence.
        """
        for numbers, layers in self._turns.values():
            if numbers and numbers[0] <= number:
                return layers[bisect_right(numbers, number) - 1]
        return OUTSIDE

    def _find_layer(self, node: Any) -> str:
        variable = getattr(node, "variable", None)  # a node that accumulates a parameter's gradient has no number
        if variable is not None:
            return self._parameters.get(id(variable), OUTSIDE)
        return self.name_layer(get_node_number(node))

    def _begin(self, module: nn.Module, args: Any) -> None:  # noqa: ARG002 (a hook's signature)
        network = None if module in self._names else self._find_network(module)
        if network is not None:
            self._learn(module, network)
        name = self._names.get(module)
        if name is None:
            return
        if module in self._roots and not self._running:
            self.begin_step()
        mark = None
        if self._annotates:
            mark = torch.profiler.record_function(f"{MARK}{name}")
            mark.__enter__()
        self._running.append((module, name, mark))
        self._turn(name)

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG002 (a hook's signature)
        if not self._running or self._running[-1][0] is not module:
            return
        *_, mark = self._running.pop()
        if mark is not None:
            mark.__exit__(None, None, None)
        if not self._running:
            self._layer_outside = LOSS
        self._turn(self._running[-1][1] if self._running else LOSS)

    def _learn(self, module: nn.Module, network: nn.Module) -> None:
        self._roots.add(module)
        self._names[module] = OUTSIDE
        for name, part in network.named_modules():
            self._names.setdefault(part, name or OUTSIDE)
            self.classes.setdefault(name or OUTSIDE, type(part).__name__)
        for name, parameter in network.named_parameters():
            self._parameters[id(parameter)] = name.rpartition(".")[0] or OUTSIDE

    def _turn(self, layer: str) -> None:
        """Record that another layer creates the following nodes."""
        numbers, layers = self._turns.setdefault(get_ident(), ([], []))
        numbers.append(find_next_node_number())
        layers.append(layer)


OUTSIDE_BACKWARD = StepPlace(OUTSIDE, "backward")


def list_work(trace: StepTrace, places: Mapping[int, StepPlace], gpu: GpuKind, links: Links) -> list[PlacedWork]:
    """Return the work of an estimated step, including its messages.

    Parameters
    ----------
    trace
        Kernels and messages of one device.
    places
        Places of these kernels, by the ``id`` of a `KernelRun`.
    gpu, links
        Kind of the devices, and the links between them.
    """
    found, place = [], StepPlace(OUTSIDE, "other")
    events = select_step(trace.events)
    alone = not any(isinstance(event, Sent) for event in events)
    for event in events:
        if isinstance(event, KernelRun):
            place = places[id(event)]
            work = _place_work(event, place, gpu, trace.device)
            if travels(event.name, alone=alone):  # waits for other devices, so no rate of this device bounds its time
                work = replace(work, place=StepPlace(place.layer, "communication"), kind="communication", bound=None)
            found.append(work)
        elif isinstance(event, Sent):
            # A message belongs to the layer of the kernel before it.
            found.append(
                PlacedWork(
                    name=event.kind,
                    place=StepPlace(place.layer, "communication"),
                    kind="communication",
                    flops=0,
                    bytes_moved=event.size,
                    forecast=links.seconds(event),
                    device=trace.device,
                )
            )
    return found


def _place_work(run: KernelRun, place: StepPlace, gpu: GpuKind, device: int) -> PlacedWork:
    """Return the work of a kernel, and the minimum time that a GPU needs for it."""
    peaks, classes = gpu.peaks, classify(run)
    moved = [kernel.least_bytes or kernel.bytes_moved for kernel in classes]
    by_bytes = [count / peaks.bandwidth for count in moved]
    by_flops = [kernel.flops / (peaks.half if kernel.dtype == HALF else peaks.full) for kernel in classes]
    return PlacedWork(
        name=run.name,
        place=place,
        kind={LOSS: "loss", OPTIMIZER: "optimizer"}.get(place.layer) or find_kind(run.name),
        flops=sum(kernel.flops for kernel in classes),
        bytes_moved=sum(moved),
        bound=sum(map(max, by_bytes, by_flops)),
        forecast=gpu.seconds(run),
        device=device,
    )
