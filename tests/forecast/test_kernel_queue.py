"""The queue of kernels that a stream has, which is how far Python gets ahead of a GPU."""

import torch

from volseg.forecast.kernel_queue import ROOM, KernelQueue, count_kernels
from volseg.forecast.trace import KernelRun


def count(name: str, *, channels_last: bool = False) -> int:
    return count_kernels(KernelRun(name, torch.float32, 0, 0, channels_last=channels_last))


def test_a_kernel_waits_for_the_first_that_makes_room() -> None:
    queue = KernelQueue()
    for number in range(ROOM):
        assert queue.find_room(1, now=0.5) == 0.5
        queue.put(1, end=1.0 + number)
    assert queue.find_room(3, now=0.5) == 3.0, "three must be done first"
    queue.put(3, end=2.0 + ROOM)
    assert queue.find_room(2, now=3.5) == 5.0
    assert queue.find_room(2, now=9000.0) == 9000.0, "all is done"


def test_an_operator_larger_than_the_queue_waits_until_it_is_empty() -> None:
    queue = KernelQueue()
    queue.put(1, end=7.0)
    assert queue.find_room(ROOM + 1, now=1.0) == 7.0


def test_convolutions_copy_what_does_not_lie_with_channels_last() -> None:
    assert count("aten.convolution") == 4, "input and weight there, itself, output back"
    assert count("aten.convolution_backward") == 9
    assert (count("aten.convolution", channels_last=True), count("aten.convolution_backward", channels_last=True)) == (
        1,
        3,
    )
    assert (count("aten.native_batch_norm"), count("aten.add_"), count("norm.passes._sums_kernel")) == (2, 1, 1)
