"""Sums of kernels and work, by hand."""

import pytest
from made_up_kernels import kernel, work

from volseg.profiling.kernels import as_kernels, sum_device_times, sum_kinds, sum_layers
from volseg.profiling.report import DevicePeaks

PEAKS = DevicePeaks(bytes_per_second=100.0, flops_per_second=1000.0, source="made up")


def test_a_device_computes_sends_and_waits():
    ran = [
        kernel(start=0, seconds=4),
        kernel(start=3, seconds=2, stream=1),  # beside the first for a second
        kernel("ncclDevKernel_AllReduce", direction="communication", start=4, seconds=3, stream=2),
        kernel("_send_kernel", direction="communication", start=6, seconds=2, stream=3),
        kernel(start=100, seconds=50, device=1),
    ]
    times = sum_device_times(ran, device=0, step=10.0)
    assert (times.computing, times.communicating) == (5, 5)
    # One of the three seconds of the sum is behind a kernel, and the message is beside the sum for a second.
    assert (times.exposed, times.hidden) == (3, 2)
    assert times.waiting == 2
    assert times.computing + times.exposed + times.waiting == times.step == 10


@pytest.mark.parametrize(
    ("settings", "exposed", "hidden", "waiting", "step"),
    [
        ({"step": 6.0}, 3, 0, 0, 7),  # its kernels took longer
        ({"step": 6.0, "exposed": 1.0}, 1, 2, 1, 6),  # known otherwise
        ({"step": 6.0, "exposed": 9.0}, 3, 0, 0, 7),
        ({"step": 10.0, "steps": 2}, 1.5, 0, 6.5, 10),  # the mean of two steps
    ],
)
def test_the_parts_of_a_step_add_up_to_it(settings, exposed, hidden, waiting, step):
    ran = [kernel(seconds=4), kernel("nccl", direction="communication", start=4, seconds=3)]
    times = sum_device_times(ran, device=0, **settings)
    assert (times.exposed, times.hidden, times.waiting, times.step) == (exposed, hidden, waiting, step)


def test_a_layer_is_held_against_its_bounds():
    ran = [kernel(seconds=2), kernel("norm", start=2, seconds=1), kernel(direction="backward", start=3, seconds=5)] * 2
    done = [
        work(flops=1000, moved=50, by_flops=1.0, by_bytes=0.5),
        work(kind="norm", moved=50, by_bytes=0.5),
        work(layer="never seen", flops=7, by_flops=7.0),
    ]
    backward, forward = sum_layers(ran, done, step=10.0, steps=2, peaks=PEAKS, classes={"a": "Conv3d"})
    assert (forward.layer, forward.module, forward.direction) == ("a", "Conv3d", "forward")
    assert (forward.calls, forward.seconds, forward.share) == (2, 3, 0.3)
    assert (forward.flops, forward.bytes_moved) == (1000, 100)
    assert forward.bound == 1.5, "the longer one, kernel by kernel"
    assert forward.times_bound == 2.0
    assert forward.bandwidth_share == pytest.approx(100 / 3 / 100)
    assert forward.flop_share == pytest.approx(1000 / 3 / 1000)
    assert (backward.seconds, backward.bound, backward.times_bound, backward.flops) == (5, None, None, None)


def test_without_peaks_work_is_told_and_no_bound():
    (row,) = sum_layers([kernel()], [work(flops=10, moved=5)], step=1.0)
    assert (row.flops, row.bytes_moved) == (10, 5)
    assert (row.bound, row.times_bound, row.bandwidth_share, row.flop_share) == (None,) * 4


def test_kinds_of_ambiguous_names_are_those_of_the_work_there():
    ran = [
        kernel("_forward_kernel", layer="stem", seconds=3),
        kernel("_forward_kernel", layer="(loss)", start=3, seconds=1),
        kernel("_halo_kernel", layer="stem", start=4, seconds=1),
        kernel("sm90_xmma_dgrad_x", layer="stem", direction="backward", start=5, seconds=2),
    ]
    done = [work("stem", kind="convolution", name="convolution.few_taps._forward_kernel")]
    found = {row.kind: row.seconds for row in sum_kinds(ran, done, step=7.0)}
    assert found == {"convolution": 5, "loss": 1, "pointwise": 1}


def test_followed_work_is_played_one_behind_the_other():
    first, second = as_kernels([work(by_flops=1.0), work(by_bytes=2.0)])
    assert (first.start, first.end, second.start, second.end) == (0, 2, 2, 6)
