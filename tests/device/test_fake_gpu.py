"""GPUs that are not there."""

import pytest
import torch

from tests.fake_gpus import Gpu, KernelObserver
from volseg.device import fake_gpu, gpus, triton_tiles
from volseg.device.norm import passes
from volseg.device.norm.activation import Term
from volseg.device.triton_kernels import INSTALLED
from volseg.errors import ParallelError


def test_a_numbered_cpu_is_a_gpu_where_gpus_are_faked() -> None:
    gpu, host = fake_gpu.fake_device(1), torch.device("cpu")
    assert not gpus.is_gpu(gpu)
    with fake_gpu.faking(Gpu()):
        assert gpus.is_gpu(gpu)
        assert not gpus.is_gpu(host)
        assert gpus.count_processors(gpu) == 132
        assert gpus.count_processors(host) == 1
        assert gpus.get_capability(gpu) == (9, 0)
        with pytest.raises(ParallelError, match="already fakes"), fake_gpu.faking(Gpu()):
            pass
    assert gpus.has_values(gpu)
    assert not gpus.on_gpu(torch.zeros(2))
    assert not gpus.is_recording(host)
    assert fake_gpu.get_fake() is None


def test_kernels_are_noted_on_fake_gpus() -> None:
    observer = KernelObserver()
    x, scale = torch.zeros(1, 4, 2, 2, 2), torch.ones(1, 4)
    with fake_gpu.faking(Gpu(), observer):
        passes.affine(Term(x, None, scale, scale))
    (kernel,) = observer.noted
    assert (kernel.name, kernel.grid) == ("norm.passes._affine_kernel", (1, 4, 1))
    assert [tensor.shape for tensor in kernel.tensors] == [x.shape, scale.shape, scale.shape, x.shape]


@pytest.mark.skipif(INSTALLED, reason="Triton is installed")
def test_a_kernel_without_triton_says_what_it_needs() -> None:
    x, scale = torch.zeros(1, 4, 2, 2, 2), torch.ones(1, 4)
    assert not triton_tiles.available()
    with pytest.raises(ParallelError, match=r"norm.passes._affine_kernel needs Triton, which is not installed"):
        passes.affine(Term(x, None, scale, scale))


def test_streams_are_numbered_and_nest() -> None:
    device = fake_gpu.fake_device(0)

    def find_number() -> int:
        return gpus.current_gpu_stream(device).number

    with fake_gpu.faking(Gpu()):
        side = gpus.make_stream(device)
        side.wait_stream(gpus.current_gpu_stream(device))
        with gpus.on_stream(side):
            assert find_number() == 1
        assert find_number() == 0
        side.wait_event(side.record_event())
        assert not gpus.is_recording(device)
        with gpus.fake_recording("step"):
            assert gpus.is_recording(device)
