"""Dice plus cross entropy on shards equals the one on one device; its Triton kernels equal the plain formulas."""

import pytest
import torch
from torch import Tensor

from volseg.device import triton_tiles
from volseg.errors import DataError
from volseg.losses.dice.reference import Terms
from volseg.losses.dice_cross_entropy import choose_backend, dice_cross_entropy, read_at_grid
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
def test_loss_of_slabs_equals_loss_of_the_volume(
    terms: Terms, size: tuple[int, ...], grid: tuple[int, ...], sharded_label: bool, dtype: torch.dtype
) -> None:
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
    with pytest.raises(DataError, match=r"got also \[9\]"):
        dice_cross_entropy(from_whole(logits(8, 6, 4), (2,), cutter((4,))), y, Terms())


def test_a_volume_that_no_gradient_is_wanted_of() -> None:
    x, y = logits(8, 6, 4).detach(), torch.zeros(2, 1, 8, 6, 4, dtype=torch.uint8)
    with torch.inference_mode():
        loss = dice_cross_entropy(from_whole(x, (2,), cutter((2,))), y, Terms())
    torch.testing.assert_close(loss, dice_cross_entropy(x, y, Terms()))


def test_logits_whose_dims_were_permuted() -> None:
    """Their gradient has no view with the voxels in one dim, if it lies as they do."""
    y = torch.randint(0, 3, (2, 1, 4, 6, 8), dtype=torch.uint8)
    x = logits(8, 6, 4)
    (gradient,) = torch.autograd.grad(dice_cross_entropy(x.transpose(2, 4), y, Terms()), x)
    (wanted,) = torch.autograd.grad(dice_cross_entropy(x.transpose(2, 4).contiguous(), y, Terms()), x)
    torch.testing.assert_close(gradient, wanted)


# The kernels.

LAYOUTS = ["contiguous", "channels last", "slab with room"]


def on_gpu(classes: int, layout: str, dtype: torch.dtype) -> Tensor:
    x = 3 * torch.randn(2, classes, 8, 9, 11, device="cuda").to(dtype)
    if layout == "contiguous":
        return x[:, :, 1:7].contiguous()
    x = x.contiguous(memory_format=torch.channels_last_3d)[:, :, 1:7]
    return x if layout == "slab with room" else x.contiguous(memory_format=torch.channels_last_3d)


@pytest.mark.gpu
@pytest.mark.parametrize("terms", TERMS, ids=["plain", "everything"])
@pytest.mark.parametrize("label_dtype", [torch.uint8, torch.int64, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("classes", [2, 3, 20])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_triton_equals_plain(
    layout: str, classes: int, dtype: torch.dtype, label_dtype: torch.dtype, terms: Terms
) -> None:
    assert triton_tiles.available()
    x = on_gpu(classes, layout, dtype)
    exact = x.double()
    y = read_at_grid(torch.randint(0, classes, (2, 1, 12, 9, 22), device="cuda").to(label_dtype), x.shape[2:])
    sums, expected = (choose_backend(volume).sums(volume, y, terms.squared) for volume in (x, exact))
    torch.testing.assert_close(sums.sum(0).double(), expected.sum(0), rtol=1e-5, atol=1e-4)  # float32 sums of 594
    (loss, slopes), (wanted, exact_slopes) = (choose_backend(s).combine(s, terms, x.shape) for s in (sums, expected))
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-5, atol=0)
    torch.testing.assert_close(slopes.double(), exact_slopes, rtol=1e-4, atol=1e-9)
    slopes, exact_slopes = (s.expand(4, *x.shape[:2]) for s in (slopes, exact_slopes))
    gradient = choose_backend(x).gradient(x, y, slopes, terms.squared)
    wanted = choose_backend(exact).gradient(exact, y, exact_slopes, terms.squared)
    rounding = {torch.float32: 1e-4, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
    torch.testing.assert_close(gradient.double(), wanted, rtol=rounding, atol=1e-7)


@pytest.mark.gpu
def test_the_same_bits_each_time() -> None:
    x = on_gpu(3, "channels last", torch.bfloat16)
    y = torch.randint(0, 3, (2, 1, *x.shape[2:]), device="cuda", dtype=torch.uint8)
    losses = [dice_cross_entropy(x, y, Terms()) for _ in range(5)]
    assert all(loss.equal(losses[0]) for loss in losses)


@pytest.mark.gpu
@pytest.mark.parametrize("stranger", [3, 255])
def test_a_label_that_is_no_class_makes_loss_and_gradient_nan(stranger: int) -> None:
    x = on_gpu(3, "channels last", torch.bfloat16).requires_grad_()
    y = torch.zeros(2, 1, *x.shape[2:], device="cuda", dtype=torch.uint8)
    y[1, 0, 2, 3, 4] = stranger
    loss = dice_cross_entropy(x, y, Terms(include_background=False))
    loss.backward()
    assert loss.isnan()
    assert x.grad is not None
    assert x.grad[1].isnan().any()
