"""Made-up kernels, work and traces whose sums can be computed by hand."""

from volseg.profiling.kernels import PlacedWork, StepPlace, TimedKernel


def kernel(name="conv", layer="a", direction="forward", start=0.0, seconds=1.0, device=0, stream=0):
    place = StepPlace(layer, "communication" if direction == "communication" else direction)
    return TimedKernel(name=name, place=place, start=start, seconds=seconds, device=device, stream=stream)


def work(layer="a", direction="forward", flops=0, moved=0, by_flops=0.0, by_bytes=0.0, kind="convolution", name=None):
    return PlacedWork(
        name=name or f"aten.{kind}",
        place=StepPlace(layer, direction),
        kind=kind,
        flops=flops,
        bytes_moved=moved,
        bound=max(by_flops, by_bytes),
        forecast=2 * max(by_flops, by_bytes),
    )


def event(name, cat, ts, dur, tid=1, **args):
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "tid": tid, "pid": 0, "args": args}


def launched(
    name, number, at, tid, start, dur, *, call="cudaLaunchKernel", cat="kernel", stream=7, device=0, grid=(1,)
):
    """Return the call that starts a kernel, and the kernel."""
    return [
        event(call, "cuda_runtime", at, 1, tid, correlation=number),
        event(name, cat, start, dur, 0, correlation=number, stream=stream, device=device, grid=list(grid)),
    ]
