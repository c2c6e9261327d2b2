"""GPUs that a process pretends to have."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from volseg.device import pretended, streams, triton_tiles
from volseg.device.norm import passes
from volseg.device.triton_kernels import INSTALLED
from volseg.errors import ParallelError


@dataclass(frozen=True)
class Gpu:
    name: str = "a GPU"
    processors: int = 132
    capability: tuple[int, int] = (9, 0)


def test_a_numbered_cpu_is_a_gpu_while_one_pretends() -> None:
    gpu, host = pretended.name_pretended(1), torch.device("cpu")
    assert not pretended.is_gpu(gpu)
    with pretended.pretending(Gpu()):
        assert pretended.is_gpu(gpu)
        assert not pretended.is_gpu(host)
        assert pretended.count_processors(gpu) == 132
        assert pretended.count_processors(host) == 1
        assert pretended.find_capability(gpu) == (9, 0)
        with pytest.raises(ParallelError, match="already pretends"), pretended.pretending(Gpu()):
            pass
    assert pretended.find_pretended() is None


def test_kernels_are_noted_while_one_pretends() -> None:
    noted: list[pretended.NotedKernel] = []
    x, scale = torch.zeros(1, 4, 2, 2, 2), torch.ones(1, 4)
    with pretended.pretending(Gpu(), noted.append):
        passes.affine(x, scale, scale)
    (kernel,) = noted
    assert (kernel.name, kernel.grid) == ("norm.passes._affine_kernel", (1, 4, 1))
    assert [tensor.shape for tensor in kernel.tensors] == [x.shape, scale.shape, scale.shape, x.shape]


@pytest.mark.skipif(INSTALLED, reason="Triton is installed")
def test_a_kernel_without_triton_says_what_it_needs() -> None:
    x, scale = torch.zeros(1, 4, 2, 2, 2), torch.ones(1, 4)
    assert not triton_tiles.available()
    with pytest.raises(ParallelError, match=r"norm.passes._affine_kernel needs Triton, which is not installed"):
        passes.affine(x, scale, scale)


def test_streams_are_numbered_and_nest() -> None:
    device = pretended.name_pretended(0)

    def find_number() -> int:
        number: int = streams.find_current_stream(device).number
        return number

    with pretended.pretending(Gpu()):
        side = streams.make_stream(device)
        side.wait_stream(streams.find_current_stream(device))
        with streams.on_stream(side):
            assert find_number() == 1
        assert find_number() == 0
        assert side.record_event().query()
        assert streams.make_event().query()
        assert not pretended.is_recording(device)
        with pretended.pretend_recording("step"):
            assert pretended.is_recording(device)
            assert pretended.find_recording() == "step"


def test_outside_nothing_is_pretended() -> None:
    x: Tensor = torch.zeros(2)
    assert not pretended.on_gpu(x)
    assert not pretended.is_recording(x.device)
    assert pretended.find_recording() == ""
