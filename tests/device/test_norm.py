"""Triton's norm kernels against plain torch in float64, in both layouts, also in buffers with room for a halo."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernels import DEVICE, with_kernels

from volseg.device import triton_tiles
from volseg.device.norm import exchanged, passes, reference, statistics
from volseg.device.norm.activation import Activation, Term
from volseg.device.norm.grouping import Grouping
from volseg.device.norm.reference import Running
from volseg.device.torch_internals import get_version


@pytest.mark.parametrize(
    ("kind", "parameter"),
    [("none", 0), ("leaky", 0.1), ("elu", 1.3), ("prelu", 0), ("sigmoid", 0), ("silu", 0), ("gelu", 0)],
)
def test_derivatives_are_those_of_the_activations(kind: Any, parameter: float) -> None:
    x = torch.linspace(-3, 3, 50, dtype=torch.float64).reshape(1, 2, 25).requires_grad_()
    slope = torch.tensor([0.3, -0.2], dtype=torch.float64) if kind == "prelu" else None
    activation = Activation(kind, parameter)
    activation.apply(x, slope).sum().backward()
    torch.testing.assert_close(activation.derivative(x.detach(), slope), x.grad)


@with_kernels
def test_weights_need_not_be_dense() -> None:
    x, sums = (torch.randn(shape, device=DEVICE) for shape in [(2, 7, 3, 4, 5), (3, 2, 2, 7)])
    mean, rstd, share = torch.randn(2, 7, device=DEVICE), torch.rand(2, 7, device=DEVICE), torch.ones((), device=DEVICE)
    every_second, one = torch.randn(14, device=DEVICE)[::2], torch.randn(1, device=DEVICE).expand(7)
    for weight, bias in ((every_second, one), (one, every_second)):
        results = [
            (
                exchanged.exchange_coefficients(x, share, own_weight, own_bias, 1e-5, None),
                exchanged.exchange_backward_coefficients(sums, mean, rstd, own_weight, 60, None),
            )
            for own_weight, own_bias in ((weight, bias), (weight.clone().contiguous(), bias.clone().contiguous()))
        ]
        torch.testing.assert_close(*results, rtol=0, atol=0)


@with_kernels
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("channels", [1, 13, 130])
def test_running_statistics_move_as_torchs(batch: int, channels: int) -> None:
    x = torch.randn(batch, channels, 3, 5, 2, device=DEVICE) * 3 + 7
    ours, theirs = ((torch.rand(channels, device=DEVICE), torch.rand(channels, device=DEVICE)) for _ in range(2))
    for to, source in zip(theirs, ours, strict=True):
        to.copy_(source)
    versions = [get_version(buffer) for buffer in ours]
    share, grouping = torch.ones(1, 1, 1, device=DEVICE), Grouping(over_batch=True)
    exchanged.exchange_coefficients(x, share, None, None, 1e-5, None, grouping, Running(*ours, 0.3))
    exact = [buffer.double() for buffer in theirs]
    F.batch_norm(x.double(), *exact, None, None, True, 0.3)
    for got, wanted in zip(ours, exact, strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-6)
    assert all(get_version(buffer) > version for buffer, version in zip(ours, versions, strict=True))


@with_kernels
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    ("dtype", "mean", "deviation"),
    [(torch.float32, 1e4, 1e-2), (torch.bfloat16, 1e4, 1e-2), (torch.bfloat16, 1e4, 100), (torch.float32, 0, 1)],
)
def test_variances_far_from_zero(monkeypatch, dtype, mean, deviation, last):
    monkeypatch.setattr(triton_tiles, "TILE", 256)  # a program goes through many tiles
    torch.manual_seed(0)
    x = (torch.randn(1, 5, 16, 15, 17, dtype=torch.float64) * deviation + mean).to(DEVICE, dtype)
    x = x.contiguous(memory_format=torch.channels_last_3d) if last else x
    got, exact = statistics.moments(x).double(), reference.moments(x.double())
    # Means are rounded to float32 in each part, and where parts are joined: near 10,000 by a place or two of its last
    # digit (2^-10), a tenth of the deviation, whose square is added to the variance. It is less than any norm's eps.
    torch.testing.assert_close(got[0], exact[0], rtol=4e-7, atol=1e-6)
    torch.testing.assert_close(got[1], exact[1], rtol=1e-5 if mean else 1e-6, atol=2 * 2**-20 if mean else 0)
    assert statistics.moments(x).double().equal(got)


@with_kernels
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("voxels", [1, 7, 31, 32, 33, 128, 129, 500])
def test_statistics_of_tiles_that_are_not_full(monkeypatch: pytest.MonkeyPatch, voxels: int, last: bool) -> None:
    monkeypatch.setattr(triton_tiles, "TILE", 128)  # 32 places for each of 4 channels
    x = torch.randn(2, 4, 1, 1, voxels, device=DEVICE) * 3 + 20
    x = x.contiguous(memory_format=torch.channels_last_3d) if last else x
    torch.testing.assert_close(statistics.moments(x).double(), reference.moments(x.double()), rtol=1e-5, atol=1e-6)
    gradient, (mean, scale, shift) = torch.randn_like(x), torch.rand(3, 2, 4, device=DEVICE)
    sums = passes.gradient_sums(gradient, Term(x, mean, scale, shift, Activation("leaky", 0.1))).sum(0)
    wide = [value.double() for value in (gradient, x, mean, scale, shift)]
    torch.testing.assert_close(
        sums.double(), reference.gradient_sums(wide[0], Term(*wide[1:], Activation("leaky", 0.1))), rtol=1e-4, atol=1e-3
    )


@with_kernels
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("place", [0, 40, 499])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy's, of infinities
def test_what_is_not_finite_spoils_its_own_channel(monkeypatch, value, place, last):
    monkeypatch.setattr(triton_tiles, "TILE", 128)
    x = torch.randn(2, 3, 1, 1, 500, device=DEVICE)
    spoilt = x.clone()
    spoilt[1, 1, 0, 0, place] = value
    x, spoilt = (v.contiguous(memory_format=torch.channels_last_3d) if last else v for v in (x, spoilt))
    got, clean, wanted = statistics.moments(spoilt), statistics.moments(x), reference.moments(spoilt)
    assert got[1].isnan().equal(wanted[1].isnan())
    assert not got[0, 1, 1].isfinite()
    others = wanted[1].isfinite()
    assert got[:, others].equal(clean[:, others])
