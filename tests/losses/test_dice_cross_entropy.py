"""Dice plus cross entropy on shards equals that on one device."""

import pytest
import torch
from torch import Tensor

from volseg.errors import DataError
from volseg.losses.dice.reference import Terms
from volseg.losses.dice_cross_entropy import dice_cross_entropy, read_at_grid
from volseg.parallel.spatial.context import Context
from volseg.parallel.spatial.transport.one_process import LocalDevices
from volseg.parallel.spatial.volume import from_whole

TERMS = [
    Terms(),
    Terms(0.3, 2.0, include_background=False, batch=True, squared=True, jaccard=True, smooth_nr=0.2, smooth_dr=0.4),
]


def cutter(grid: tuple[int, ...]) -> Context:
    return Context(LocalDevices(["cpu"] * torch.Size(grid).numel(), grid))


def logits(*size: int) -> Tensor:
    return torch.randn(2, 3, *size, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64], ids=str)
@pytest.mark.parametrize("sharded_label", [False, True], ids=["whole label", "sharded label"])
@pytest.mark.parametrize("grid", [(1,), (2,), (3,), (4,), (2, 2)], ids=str)
@pytest.mark.parametrize("size", [(8, 6, 4), (4, 3, 2), (7, 5, 4), (1, 6, 4)], ids=str)
@pytest.mark.parametrize("terms", TERMS, ids=["plain", "everything"])
def test_loss_of_slabs_equals_loss_of_the_volume(terms, size, grid, sharded_label, dtype):
    """Heads of one grid, of half, of no whole fraction, and too coarse to be cut."""
    x, y = logits(*size), torch.randint(0, 3, (2, 1, 8, 6, 4)).to(dtype)
    expected = dice_cross_entropy(x, y, terms)
    (wanted,) = torch.autograd.grad(3 * expected, x)
    dims, context = tuple(range(2, 2 + len(grid))), cutter(grid)
    can_cut = all(x.shape[dim] >= shards for dim, shards in zip(dims, grid, strict=True))
    head = from_whole(x, dims, context) if can_cut else x
    actual = dice_cross_entropy(head, from_whole(y, dims, context) if sharded_label else y, terms)
    assert type(actual) is Tensor
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)
    (gradient,) = torch.autograd.grad(3 * actual, x)
    torch.testing.assert_close(gradient, wanted, rtol=1e-11, atol=1e-16)


def test_a_coarser_head_copies_no_label() -> None:
    y = torch.randint(0, 3, (2, 1, 8, 6, 4), dtype=torch.uint8)
    assert read_at_grid(y, (4, 2, 4)).untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


def test_a_label_that_is_no_class_is_refused_by_all_shards() -> None:
    y = torch.zeros(2, 1, 8, 6, 4, dtype=torch.uint8)
    y[0, 0, 7] = 9
    with pytest.raises(DataError, match=r"but also has \[9\]"):
        dice_cross_entropy(from_whole(logits(8, 6, 4), (2,), cutter((4,))), y, Terms())


def test_a_volume_that_no_gradient_is_wanted_of() -> None:
    x, y = logits(8, 6, 4).detach(), torch.zeros(2, 1, 8, 6, 4, dtype=torch.uint8)
    with torch.inference_mode():
        loss = dice_cross_entropy(from_whole(x, (2,), cutter((2,))), y, Terms())
    torch.testing.assert_close(loss, dice_cross_entropy(x, y, Terms()))


def test_logits_whose_dims_were_permuted() -> None:
    """The gradient of permuted logits may have no view with the voxels in one dim."""
    y = torch.randint(0, 3, (2, 1, 4, 6, 8), dtype=torch.uint8)
    x = logits(8, 6, 4)
    (gradient,) = torch.autograd.grad(dice_cross_entropy(x.transpose(2, 4), y, Terms()), x)
    (wanted,) = torch.autograd.grad(dice_cross_entropy(x.transpose(2, 4).contiguous(), y, Terms()), x)
    torch.testing.assert_close(gradient, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("stranger", [3, 255])
def test_a_label_that_is_no_class_makes_loss_and_gradient_nan(stranger: int) -> None:
    x = torch.randn(2, 3, 6, 9, 11, device="cuda").bfloat16().contiguous(memory_format=torch.channels_last_3d)
    x.requires_grad_()
    y = torch.zeros(2, 1, *x.shape[2:], device="cuda", dtype=torch.uint8)
    y[1, 0, 2, 3, 4] = stranger
    loss = dice_cross_entropy(x, y, Terms(include_background=False))
    loss.backward()
    assert loss.isnan()
    assert x.grad[1].isnan().any()
