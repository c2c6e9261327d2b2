"""Constructed traces in the form of torch's profiler: each kernel is assigned to its layer."""

import pytest
from made_up_kernels import event, launched

from volseg.errors import VolsegError
from volseg.profiling.trace_file import read_trace, replace_replayed

LAYERS = {7: "stem", 10: "down.0", 11: "down.0"}
NODE = "autograd::engine::evaluate_function: "


def name_layer(number):
    return LAYERS.get(number, "(loss)")


def make_eager():
    """A step: two layers, the loss, backward in another thread with a sum and a recomputed layer, the optimizer."""
    return [
        event("volseg: (augmentation)", "user_annotation", 0, 8),
        *launched("cut", 1, 2, 1, 5, 3, stream=20),
        event("volseg: (step) 0", "user_annotation", 10, 190),
        *launched("copy of inputs", 2, 11, 1, 12, 1),
        event("volseg: (step)", "user_annotation", 12, 30),
        event("volseg: stem", "user_annotation", 13, 10),
        event("aten::conv3d", "cpu_op", 14, 8),
        *launched("conv", 3, 15, 1, 30, 10, grid=(4, 1)),
        event("volseg: down.0", "user_annotation", 25, 15),
        *launched("conv", 4, 26, 1, 40, 10, grid=(2, 1)),
        *launched("_send_kernel", 5, 30, 1, 45, 3, stream=9),
        *launched("dice", 6, 50, 1, 52, 2),
        event(NODE + "DiceBackward", "cpu_op", 60, 5, 2, **{"Sequence number": 15}),
        *launched("dice backward", 7, 61, 2, 62, 2),
        event(NODE + "ConvolutionBackward0", "cpu_op", 70, 20, 2, **{"Sequence number": 11}),
        event("volseg: down.0", "user_annotation", 71, 5, 2),
        *launched("conv", 8, 72, 2, 73, 10, grid=(2, 1)),
        *launched("dgrad", 9, 80, 2, 85, 10, call="cuLaunchKernelEx"),
        event(NODE + "torch::autograd::AccumulateGrad", "cpu_op", 91, 3, 2),
        *launched("add", 10, 92, 2, 95, 1),
        event(NODE + "ConvolutionBackward0", "cpu_op", 100, 10, 2, **{"Sequence number": 7}),
        *launched("ncclDevKernel_AllReduce", 11, 101, 2, 103, 20, stream=9),
        *launched("clip", 12, 120, 1, 124, 1),
        event("Optimizer.step#SGD.step", "user_annotation", 130, 20),
        *launched("multi_tensor_apply", 13, 135, 1, 140, 5),
        *launched("Memcpy DtoH", 14, 160, 1, 162, 1, cat="gpu_memcpy"),
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
        event("volseg: stem", "gpu_user_annotation", 30, 10, 7),
    ]


def test_each_kernel_has_its_layer_and_direction():
    found = {(kernel.timed.name, kernel.timed.start * 1e6): kernel for kernel in read_trace(make_eager(), name_layer)}
    places = {(name, round(start)): tuple(kernel.timed.place) for (name, start), kernel in found.items()}
    assert places == {
        ("cut", 5): ("(augmentation)", "augmentation"),
        ("copy of inputs", 12): ("(step)", "other"),
        ("conv", 30): ("stem", "forward"),
        ("conv", 40): ("down.0", "forward"),
        ("_send_kernel", 45): ("down.0", "communication"),
        ("dice", 52): ("(loss)", "forward"),
        ("dice backward", 62): ("(loss)", "backward"),
        ("conv", 73): ("down.0", "recompute"),
        ("dgrad", 85): ("down.0", "backward"),
        ("add", 95): ("down.0", "backward"),
        ("ncclDevKernel_AllReduce", 103): ("stem", "communication"),
        ("clip", 124): ("(optimizer)", "optimizer"),
        ("multi_tensor_apply", 140): ("(optimizer)", "optimizer"),
        ("Memcpy DtoH", 162): ("(optimizer)", "optimizer"),
    }
    assert {kernel.step for kernel in found.values() if kernel.timed.name != "cut"} == {0}
    assert next(kernel for kernel in found.values() if kernel.timed.name == "cut").step is None


def make_replay():
    """The same step recorded, twice: one call starts all, on other streams and in another order, with a memset more."""
    events = []
    for number, begin in enumerate((0, 1000)):
        events.append(event(f"volseg: (step) {number}", "user_annotation", begin, 50))
        call = event("cudaGraphLaunch", "cuda_runtime", begin + 5, 2, 1, correlation=100 + number)
        events.append(call)
        kernels = [
            ("conv", (4, 1), 10), ("_send_kernel", (1,), 3), ("Memset", (), 1), ("conv", (2, 1), 10), ("dice", (1,), 2),
            ("dice backward", (1,), 2), ("conv", (2, 1), 10), ("dgrad", (1,), 10),
            ("ncclDevKernel_AllReduce", (1,), 20),
            ("add", (1,), 1), ("clip", (1,), 1), ("multi_tensor_apply", (1,), 5),
        ]  # fmt: skip
        at = begin + 20
        for stream, (name, grid, seconds) in enumerate(kernels):
            events.append(
                event(
                    name, "kernel", at, seconds, 0, correlation=100 + number, stream=stream, device=0, grid=list(grid)
                )
            )
            at += seconds
    return events


def test_replayed_kernels_are_those_of_the_eager_step():
    eager = read_trace(make_eager(), name_layer)
    seen = read_trace(make_replay(), name_layer)
    found, matched = replace_replayed(seen, eager)
    second = [(kernel.timed.name, *kernel.timed.place) for kernel in found if kernel.step == 1]
    assert second == [
        ("conv", "stem", "forward"),
        ("_send_kernel", "down.0", "communication"),
        ("Memset", "stem", "forward"),
        ("conv", "down.0", "forward"),
        ("dice", "(loss)", "forward"),
        ("dice backward", "(loss)", "backward"),
        ("conv", "down.0", "recompute"),
        ("dgrad", "down.0", "backward"),
        ("ncclDevKernel_AllReduce", "stem", "communication"),
        ("add", "down.0", "backward"),
        ("clip", "(optimizer)", "optimizer"),
        ("multi_tensor_apply", "(optimizer)", "optimizer"),
    ]
    assert matched == pytest.approx(74 / 75), "all but the memset"


def test_what_is_no_profile_is_refused_in_words():
    with pytest.raises(VolsegError, match=r"no range named volseg: \(step\) N"):
        read_trace([event("aten::add", "cpu_op", 0, 1)], name_layer)
    with pytest.raises(VolsegError, match="has 1 ranges, but neither a kernel nor an operator"):
        read_trace([event("volseg: (step) 0", "user_annotation", 0, 1)], name_layer)
