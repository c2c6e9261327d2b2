"""What kernels of our own move, as a forecast counts it."""

import torch

from tests.fake_gpus import Gpu, KernelObserver
from volseg.device import fake_gpu
from volseg.device.norm import passes
from volseg.device.norm.activation import Term
from volseg.estimate.operator_work import describe_noted


def count_bytes(ends: tuple[int, int] | None) -> int:
    observer = KernelObserver()
    x, scale = torch.zeros(1, 32, 16, 16, 16, dtype=torch.bfloat16), torch.ones(1, 32)
    x = x.contiguous(memory_format=torch.channels_last_3d)
    with fake_gpu.faking(Gpu(), observer):
        passes.affine(Term(x, None, scale, scale), torch.empty_like(x), ends)
    return describe_noted(observer.noted[0], 0).bytes_moved


def test_the_ends_of_a_slab_are_not_all_of_it() -> None:
    plane, scales = 32 * 16 * 16 * 2, 2 * 32 * 4
    assert count_bytes(None) == 2 * 16 * plane + scales
    assert count_bytes((1, 1)) == 2 * 2 * plane + scales
