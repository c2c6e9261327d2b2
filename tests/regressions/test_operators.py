"""Calls that returned wrong numbers without a word, each beside the plain network in float64, on real copies.

All of them were found by an independent attack on version 0.1, and are right since every call is bound to torch's own
signature and rehearsed on shapes before slabs are touched.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from made_up_networks import Apply
from torch import Tensor, nn
from torch.torch_version import TorchVersion
from torch.utils._pytree import tree_leaves

from volseg.errors import UnsupportedOperatorError
from volseg.parallel import ModelParallel
from volseg.parallel.verification.comparison import whole

DEVICES = ["cpu", "cpu:1"]
VOLUME = torch.randn(2, 3, 12, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
OTHER = torch.rand(VOLUME.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def spatial(function: Callable[[Tensor], Any], **settings: Any) -> ModelParallel:
    return ModelParallel(Apply(function), strategy="spatial", devices=DEVICES, **settings)


def step(run: Callable[[Tensor], Any], volume: Tensor) -> list[Tensor]:
    """Return the outputs and the input's gradient."""
    image = volume.clone().requires_grad_()
    leaves = [whole(leaf) for leaf in tree_leaves(run(image))]
    for leaf in leaves:
        if leaf.requires_grad:
            weights = torch.linspace(1, 2, leaf.numel(), dtype=leaf.dtype).reshape(leaf.shape)
            (leaf * weights).sum().backward(retain_graph=True)
    return [*leaves, image.grad if image.grad is not None else torch.zeros(())]


def assert_equal(function: Callable[[Tensor], Any], volume: Tensor = VOLUME, **settings: Any) -> None:
    torch.testing.assert_close(step(spatial(function, **settings), volume), step(function, volume))


CALLS = [
    # axis=, keepdims=, x1= and x2= were ignored: cat joined along the batch, mean reduced over everything.
    lambda x: torch.cat([x, x], axis=1),
    lambda x: x.mean(axis=1),
    lambda x: x.mean(axis=(2, 3), keepdims=True),
    lambda x: x.std(axis=(2, 3, 4)),
    lambda x: x.max(axis=1),
    lambda x: torch.sum(x, axis=2),
    lambda x: torch.softmax(x, axis=1),
    lambda x: torch.mul(x1=x, x2=x),
    # A matrix norm was taken for a vector's, a vector of quantiles and keepdim moved the cut; the last two crashed.
    lambda x: torch.linalg.norm(x, 2, dim=(3, 4)),
    lambda x: torch.quantile(x, torch.tensor([0.2, 0.8], dtype=x.dtype), dim=4),
    lambda x: torch.quantile(x, 0.3, dim=1, keepdim=True),
    lambda x: F.normalize(x, dim=(2, 3, 4)),
    lambda x: torch.where(x > 1),
]


@pytest.mark.parametrize("function", CALLS)
def test_arguments_that_were_ignored_or_not_thought_of(function: Callable) -> None:
    assert_equal(function)


def test_numpys_names_along_the_cut() -> None:
    # These ran slab by slab: each slab's softmax summed to one.
    assert_equal(lambda x: torch.softmax(x, axis=2))
    with pytest.raises(UnsupportedOperatorError, match="dim=2"):
        spatial(lambda x: x.cumsum(axis=2))(VOLUME)


@pytest.mark.parametrize("loss", [F.mse_loss, F.l1_loss, F.huber_loss])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_weights_of_losses(loss: Callable, reduction: str) -> None:
    # mse_loss(weight=) divided by the count instead of the weights' sum, l1_loss ignored the weight.
    assert_equal(lambda x: loss(x, OTHER, weight=OTHER, reduction=reduction))


def test_an_unknown_reduction() -> None:
    # "average" was taken for the mean.
    with pytest.raises(ValueError, match="average is not a valid value for reduction"):
        F.mse_loss(spatial(nn.Identity())(VOLUME), OTHER, reduction="average")


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + F.max_pool3d(x, (2, 1, 1)),
        lambda x: F.mse_loss(x, x[:, :, :6]),
        lambda x: F.binary_cross_entropy_with_logits(x, OTHER[:, :, :6]),
        lambda x: F.conv3d(x, torch.ones(2, 3, 3, 3, 3, dtype=x.dtype), padding="same", stride=2),
        lambda x: F.max_pool3d(x, 2, stride=0),
    ],
)
def test_what_torch_refuses(function: Callable) -> None:
    # Sizes that do not fit were broadcast against slabs, where they may fit; a stride with padding="same" was taken.
    for run in (function, spatial(function)):
        with pytest.raises((RuntimeError, ValueError)) as caught:
            run(VOLUME)
        assert not isinstance(caught.value, UnsupportedOperatorError)


@pytest.mark.filterwarnings("ignore:.*runs on the gathered volume")
@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x.detach() * 1).put_(torch.tensor([0]), torch.zeros(1, dtype=x.dtype)),
        lambda x: torch.cumsum(x.detach(), 2, out=x.detach() * 1),
        lambda x: setattr(x * 1, "data", OTHER),
    ],
)
def test_gather_mode_loses_no_effect(function: Callable) -> None:
    # The gathered copy was changed, hooked or written to, and the volume stayed as it was.
    with pytest.raises(UnsupportedOperatorError, match=r"lost|in place"):
        spatial(function, on_unsupported="gather")(VOLUME.clone().requires_grad_())


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.amax((2, 3, 4)),
        lambda x: x.amin((0, 2)),
        lambda x: x.max(),
        pytest.param(
            lambda x: torch.aminmax(x),
            marks=pytest.mark.skipif(
                torch.__version__ < TorchVersion("2.9"), reason="torch 2.8 has no derivative of it"
            ),
        ),
        lambda x: F.adaptive_max_pool3d(x, 1),
        lambda x: F.adaptive_max_pool3d(x, (3, 2, 2)),
        lambda x: F.adaptive_max_pool3d(x, (1, 2, 3)),
        lambda x: torch.linalg.vector_norm(x, float("inf"), (2, 3)),
    ],
)
def test_ties(function: Callable) -> None:
    # Each slab's extremum got a share, or the first along the cut instead of the first in memory.
    assert_equal(function, VOLUME.mul(2).round())


def test_the_variance_of_complex_volumes_and_out_are_refused() -> None:
    # The variance was complex, and what out= named was not written to.
    with pytest.raises(UnsupportedOperatorError, match="complex"):
        spatial(lambda x: x.var((2, 3, 4)))(VOLUME.to(torch.complex128))
    with pytest.raises(UnsupportedOperatorError, match="out="):
        spatial(lambda x: torch.sum(x, (2, 3), out=torch.zeros(2, 3, 6, dtype=x.dtype)))(VOLUME)


@pytest.mark.parametrize("axes", ["D", "H", "W"])
@pytest.mark.parametrize("factor", [1.3, 1.01, (1.05, 1.3, 0.5)])
@pytest.mark.parametrize("mode", ["trilinear", "nearest", "nearest-exact"])
def test_a_factor_that_leaves_the_size(mode: str, factor: Any, axes: str) -> None:
    # torch copies planes along a dim whose size stays, though the factor is not one; nearest planes it moves all the
    # same, of an uncut dim we did not. torch's gradient of the latter goes elsewhere: in training they are refused.
    volume = VOLUME[:, :, :3, :3, :3].contiguous()
    with torch.no_grad():
        run = spatial(lambda x: F.interpolate(x, scale_factor=factor, mode=mode), axes=axes)
        torch.testing.assert_close(whole(run(volume)), F.interpolate(volume, scale_factor=factor, mode=mode))
    if mode == "trilinear":
        assert_equal(lambda x: F.interpolate(x, scale_factor=factor, mode=mode), volume, axes=axes)


def test_a_gradient_of_nearest_planes_that_torch_sends_elsewhere_is_refused() -> None:
    volume = torch.randn(1, 1, 15, dtype=torch.float64).reshape(1, 1, 15, 1, 1).requires_grad_()
    plain = F.interpolate(volume, scale_factor=(1.01, 1, 1), mode="nearest")
    (gradient,) = torch.autograd.grad(plain.sum(), volume)
    assert (plain.diff(dim=2) == 0).any(), "no plane is taken twice any more: drop the refusal"
    assert (gradient == 1).all(), "torch's gradient is that of its values now: drop the refusal"
    with pytest.raises(UnsupportedOperatorError, match="goes to other planes than it reads"):
        spatial(lambda x: F.interpolate(x, scale_factor=(1.01, 1, 1), mode="nearest"), axes="D")(volume)


def test_a_tensor_into_which_a_volume_was_scattered_is_not_read() -> None:
    # It was emptied: its sum was nought, without a word. Its result goes on, as in MONAI's one_hot.
    def scattered(x: Tensor) -> tuple[Tensor, Tensor]:
        codes = torch.zeros(1, 3, *x.shape[2:], dtype=x.dtype)
        return codes.scatter_(1, (x[:, :1] > 0).long(), 1.0), codes

    volume = torch.randn(1, 1, 7, 4, 4, dtype=torch.float64)
    result, written = spatial(scattered)(volume)
    torch.testing.assert_close(result.full_tensor(), scattered(volume)[0])
    for read in (lambda: written.sum(), lambda: written + 1, lambda: written.shape, lambda: written.numpy()):
        with pytest.raises(UnsupportedOperatorError, match=r"go on with the result, as in y = y\.scatter_"):
            read()
