"""Compute the work of a step by layer, and the least time that a device needs for it."""

from dataclasses import replace
from typing import Any

from volseg.device.torch_internals import TorchDispatchMode
from volseg.estimate.gpu_kinds import GpuKind
from volseg.estimate.instances import Links
from volseg.estimate.operator_work import describe_kernel, list_tensors
from volseg.estimate.roofline import HALF, classify
from volseg.estimate.step_time import select_step
from volseg.estimate.trace import KernelRun, Sent, StepTrace
from volseg.profiling.kernels import LOSS, OPTIMIZER, OUTSIDE, PlacedWork, StepPlace, find_kind, travels
from volseg.profiling.places import PlaceWatch


class PlacedRuns(TorchDispatchMode):
    """Launched kernels with their places; a kernel is identified by its object.

    Parameters
    ----------
    watch
        Reports the place of the step.
    """

    def __init__(self, watch: PlaceWatch) -> None:
        super().__init__()
        self._watch = watch
        self._found: dict[int, tuple[KernelRun, StepPlace]] = {}

    def note(self, run: KernelRun) -> None:
        """Record a kernel at the current place."""
        self._found[id(run)] = run, self._watch.find_place()

    def find(self, run: KernelRun) -> StepPlace:
        """Return the place of a recorded kernel."""
        return self._found[id(run)][1]

    def items(self) -> list[tuple[KernelRun, StepPlace]]:
        """Return all recorded kernels with their places, in order."""
        return list(self._found.values())

    def noting(self) -> "PlacedRuns":
        """Return a context that records torch's operators that run inside, on any device."""
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        tensors = list_tensors((args, kwargs))
        if tensors or list_tensors(out):
            run = describe_kernel(func, args, kwargs, tensors, out, 0)
            if run is not None:
                self.note(run)
        return out


def place_work(run: KernelRun, place: StepPlace, gpu: GpuKind | None = None, device: int = 0) -> PlacedWork:
    """Return the work of a kernel, and the least time that a GPU needs for it.

    Parameters
    ----------
    run
        The kernel.
    place
        Place of the kernel.
    gpu
        Kind of GPU; None for a device of unknown speed.
    device
        Number of the device.
    """
    classes = classify(run)
    moved = [kernel.least_bytes or kernel.bytes_moved for kernel in classes]
    flops = sum(kernel.flops for kernel in classes)
    kind = {LOSS: "loss", OPTIMIZER: "optimizer"}.get(place.layer) or find_kind(run.name)
    work = PlacedWork(name=run.name, place=place, kind=kind, flops=flops, bytes_moved=sum(moved), device=device)
    if gpu is None:
        return work
    peaks = gpu.peaks
    by_bytes = [count / peaks.bandwidth for count in moved]
    by_flops = [kernel.flops / (peaks.half if kernel.dtype == HALF else peaks.full) for kernel in classes]
    return replace(
        work,
        byte_bound=sum(by_bytes),
        flop_bound=sum(by_flops),
        bound=sum(map(max, by_bytes, by_flops)),
        forecast=gpu.seconds(run),
    )


def list_work(trace: StepTrace, runs: PlacedRuns, gpu: GpuKind, links: Links) -> list[PlacedWork]:
    """Return the work of an estimated step, including its messages.

    Parameters
    ----------
    trace
        Kernels and messages of one device.
    runs
        Places of these kernels.
    gpu, links
        Kind of the devices, and the links between them.
    """
    found, place = [], StepPlace(OUTSIDE, "other")
    events = select_step(trace.events)
    alone = not any(isinstance(event, Sent) for event in events)
    for event in events:
        if isinstance(event, KernelRun):
            place = runs.find(event)
            work = place_work(event, place, gpu, trace.device)
            if travels(event.name, alone=alone):  # it waits for other devices: no rate of this device bounds its time
                own = StepPlace(place.layer, "communication")
                work = replace(work, place=own, kind="communication", byte_bound=None, flop_bound=None, bound=None)
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
