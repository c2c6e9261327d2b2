"""Times of steps, from traces written by hand."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from volseg.estimate.gpu_kinds import HostRates
from volseg.estimate.instances import Links
from volseg.estimate.step_time import estimate_pipeline_seconds, estimate_times
from volseg.estimate.trace import Event, KernelRun, Mark, Sent, StepTrace

MS, US = 1e-3, 1e-6

HOST = {"operator": 5 * US, "triton": 30 * US, "slab": 90 * US, "replay": 100 * US}
HOST |= {"exchange": 500 * US, "message": 50 * US}
HOST |= {"convolution forward": 40 * US, "norm forward": 60 * US, "pointwise forward": 10 * US}
HOST |= {"convolution backward": 50 * US, "norm backward": 70 * US, "pointwise backward": 15 * US}


class Gpu:
    """Moves a terabyte per second; its kernels take no less than 2 us."""

    is_measured = True

    def seconds(self, run: KernelRun) -> float:
        return max(2 * US, run.bytes_moved / 1e12)

    def host_rates(self) -> HostRates:
        return HOST


GPU: Any = Gpu()
LINKS = Links(bandwidth=1e9, latency_s=10 * US)


def run(ms: float, name: str = "aten.add", stream: int = 0) -> KernelRun:
    return KernelRun(name, torch.float32, 0, int(ms * 1e9), ((1, 8, 4, 4, 4),), False, stream)


def step(forward: list[Event], backward: list[Event], update: list[Event] = []) -> StepTrace:  # noqa: B006  (read only)
    events = [Mark("step"), Mark("forward"), *forward, Mark("backward"), *backward, Mark("optimizer"), *update]
    return StepTrace((*events, Mark("end")))


def test_a_step_of_long_kernels_takes_their_sum_by_part() -> None:
    times = estimate_times([step([run(3)] * 2, [run(5)] * 2, [run(1)])], GPU, LINKS)
    assert times.seconds == pytest.approx(17 * MS)
    assert times.parts == pytest.approx({"forward": 6 * MS, "loss": 0, "backward": 10 * MS, "optimizer": MS, "rest": 0})
    assert times.host == pytest.approx((2 * 10 + 2 * 15 + 5) * US)


def test_a_step_takes_as_long_as_the_slower_of_python_and_the_device() -> None:
    eager = estimate_times([step([run(0)] * 100, [run(0)] * 100)], GPU, LINKS)
    assert eager.seconds == pytest.approx((100 * 10 + 100 * 15) * US, rel=0.01)
    # Python is done with both parts long before the device has done the first kernel.
    times = estimate_times([step([run(50)], [run(0)] * 100)], GPU, LINKS)
    assert times.seconds == pytest.approx(50 * MS + 100 * 2 * US, rel=0.01)


def test_a_recording_does_without_python() -> None:
    begin, end = [Mark("step"), run(9), Mark("record"), Mark("forward")], [Mark("replay"), run(7), Mark("end")]
    times = estimate_times([StepTrace((*begin, *[run(0)] * 100, *end))], GPU, LINKS, recorded=True)
    assert times.seconds == pytest.approx(100 * 2 * US)
    assert times.host == pytest.approx(100 * US)


def test_only_the_last_step_counts() -> None:
    twice = StepTrace((Mark("placed"), run(8), Mark("step"), run(20), Mark("step"), run(3), Mark("end"), run(99)))
    assert estimate_times([twice], GPU, LINKS).seconds == pytest.approx(3 * MS)


def test_what_travels_on_a_stream_of_its_own_hides_behind_work() -> None:
    for size, stream, seconds in ((10**6, 1, 3 * MS), (10**6, 0, 4 * MS + 10 * US), (9 * 10**6, 1, 9 * MS)):
        times = estimate_times([step([Sent("halo", size, 2, stream), run(3)], [])], GPU, LINKS)
        assert times.seconds == pytest.approx(seconds, rel=0.02)


def test_kernels_by_which_planes_travel_are_part_of_their_message() -> None:
    sent, kernel = Sent("halo", 10**6, 2), replace(run(1), name="peer.planes._exchange_planes_kernel")
    alone, both = (estimate_times([step(events, [])], GPU, LINKS) for events in ([sent], [kernel, sent, kernel]))
    assert both.seconds == alone.seconds > 0


def test_of_several_devices_the_slowest_counts() -> None:
    traces = [step([run(3)], [run(3)]), step([run(2)], [run(9)])]
    assert estimate_times(traces, GPU, LINKS).seconds == pytest.approx(11 * MS, rel=0.01)


@pytest.mark.parametrize(("stages", "pieces"), list(product((1, 2, 3, 4, 8), (1, 2, 4, 16))))
def test_equal_stages_take_what_gpipe_says(stages: int, pieces: int) -> None:
    assert estimate_pipeline_seconds([(2.0, 3.0)] * stages, pieces) == pytest.approx(5.0 * (pieces + stages - 1))


def test_unequal_stages_wait_for_the_slowest() -> None:
    # All but the last micro-batch of the slowest stage are behind one another; the ends pass through the others.
    assert estimate_pipeline_seconds([(1.0, 0.0), (5.0, 0.0), (2.0, 0.0)], 4) == pytest.approx(1 + 4 * 5 + 2)


def test_a_pipeline_fills_and_empties() -> None:
    traces = [step([run(4)] * 2, [run(8)] * 2), step([run(4)] * 2, [run(8)] * 2, [run(1)])]
    assert estimate_times(traces, GPU, LINKS, stages=True, micro_batches=2).seconds == pytest.approx((12 * 3 + 1) * MS)
    assert estimate_times(traces, GPU, LINKS).seconds == pytest.approx(25 * MS)


def test_one_process_starts_the_kernels_of_all_stages() -> None:
    traces = [step([run(0)] * 100, [run(0)] * 100)] * 4
    # It looks at each function of forward besides.
    found = estimate_times(traces, GPU, LINKS, stages=True).seconds
    assert found == pytest.approx(4 * 100 * (2.4 * 10 + 15) * US, rel=0.01)


def test_a_network_on_slabs_takes_python_longer() -> None:
    norm, convolution = run(0, "norm.passes._affine_kernel"), run(0, "aten.convolution")
    eager = estimate_times([step([norm, convolution, run(0)] * 10, [])], GPU, LINKS)
    assert eager.host == pytest.approx(10 * (90 + 90 + 10) * US)
    loss = run(0, "losses.dice.passes._sums_kernel")
    assert estimate_times([step([loss, convolution] * 10, [])], GPU, LINKS).host == pytest.approx(10 * (30 + 40) * US)


def test_a_sum_over_more_gpus_sends_up_to_twice_as_much() -> None:
    two, eight = (LINKS.seconds(Sent("all_reduce", 2**28, number)) for number in (2, 8))
    assert eight == pytest.approx(two * 1.75, rel=1e-3)
    assert LINKS.seconds(Sent("all_reduce", 2**28, 1)) == 0
    latencies = [replace(LINKS, is_direct=direct).seconds(Sent("all_reduce", 1, 8)) for direct in (False, True)]
    assert latencies == pytest.approx([70 * US, 10 * US], rel=1e-3)


def test_python_takes_long_over_an_eager_exchange() -> None:
    sends = [Sent("halo", 2**12, 2)] * 10
    eager, recorded = (estimate_times([step(sends, [])], GPU, LINKS, recorded=recorded) for recorded in (False, True))
    assert eager.host == pytest.approx(10 * HOST["exchange"])
    assert recorded.host == HOST["replay"]
    assert estimate_times([step([Sent("all_reduce", 8, 2)] * 10, [])], GPU, LINKS).host == pytest.approx(
        10 * HOST["message"]
    )
