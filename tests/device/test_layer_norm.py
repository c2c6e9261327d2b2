"""Our layer norm kernels against float64: values, every gradient, and a network that uses them."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernels import DEVICE, INTERPRETED, fewer, with_kernels
from torch import Tensor, nn

from volseg.device import fusions, layer_norm
from volseg.parallel import FastKernels

ROUNDING = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}

SHAPES = [(130, 48), (77, 5), (1, 1), (9, 1000), (4096, 48), (70000, 96), (33, 768)]
"""Lines and channels; the first ones by the interpreter too."""


def assert_near(got: Tensor, wanted: Tensor, rounding: float) -> None:
    """Compare within so much of the largest value."""
    assert got.shape == wanted.shape
    assert float((got.double() - wanted).abs().max()) <= rounding * max(1.0, float(wanted.abs().max()))


@with_kernels
@pytest.mark.parametrize("affine", [(True, True), (True, False), (False, False)], ids=str)
@pytest.mark.parametrize("shape", fewer(SHAPES, 4), ids=str)
@pytest.mark.parametrize(
    "dtypes", [(torch.float32,) * 2, (torch.float16, torch.float32), (torch.float16,) * 2], ids=str
)
def test_kernels_equal_float64(shape: tuple[int, int], affine: tuple[bool, bool], dtypes: tuple[Any, Any]) -> None:
    rows, channels = shape
    given, told = dtypes
    wide = (3 * torch.randn(rows, channels + 3, device=DEVICE) + 20).to(given)
    lines, gradient = wide[:, 1 : channels + 1], torch.randn(rows, channels, device=DEVICE).to(told)
    weight, bias = (torch.randn(channels, device=DEVICE) if has else None for has in affine)
    exact = [None if value is None else value.double().requires_grad_() for value in (lines, weight, bias)]
    wanted = F.layer_norm(exact[0], (channels,), *exact[1:], 1e-5)
    leaves = [value for value in exact if value is not None]
    slopes = iter(torch.autograd.grad(wanted, leaves, gradient.double()))
    out, means, rstds = layer_norm.normalize_lines(lines, weight, bias, 1e-5, told)
    assert out.dtype == told
    rounding = max(ROUNDING[given] if told == given else 0.0, 2e-5)
    assert_near(out, wanted.detach(), rounding)
    found = layer_norm.differentiate_lines(gradient, lines, weight, means, rstds)
    for one, other in zip(found, layer_norm.differentiate_lines(gradient, lines, weight, means, rstds), strict=True):
        assert one.equal(other)  # sums have an order
    for one, value in zip(found, exact, strict=True):
        if value is not None:
            assert_near(one, next(slopes), 2 * ROUNDING[given])


@with_kernels
def test_what_is_no_number_stays_in_its_line() -> None:
    lines = torch.randn(60, 48, device=DEVICE)
    lines[7, 3], lines[9] = torch.nan, 5.0
    out, means, rstds = layer_norm.normalize_lines(lines, None, None, 1e-5, torch.float32)
    assert out[7].isnan().all()
    assert not out[9].any()
    assert out[[row for row in range(60) if row != 7]].isfinite().all()
    of_lines, *_ = layer_norm.differentiate_lines(torch.ones_like(out), lines, None, means, rstds)
    assert of_lines[7].isnan().all()
    assert of_lines[8:].isfinite().all()


class Lines(nn.Module):
    """Layer norms after a projection: of channels, of the last two dims, without weights, of other layouts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv3d(2, 6, 1), nn.Conv3d(6, 2, 1)
        self.norm, self.wide, self.bare = (
            nn.LayerNorm(6),
            nn.LayerNorm((3, 6)),
            nn.LayerNorm(6, elementwise_affine=False),
        )
        self.linear = nn.Linear(6, 6)

    def forward(self, image: Tensor) -> Tensor:
        x = self.first(image).movedim(1, -1)
        x = x + self.linear(self.norm(x))
        x = x * self.wide(x.contiguous()) + self.bare(x)
        return self.last(x.movedim(-1, 1))


@with_kernels
@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("half", [False, True])
def test_a_network_trains_with_them(half: bool, checkpoint: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def noted(name: str) -> None:
        plain = getattr(layer_norm, name)
        monkeypatch.setattr(layer_norm, name, lambda *given: (calls.append(name), plain(*given))[1])

    noted("normalize_lines")
    noted("differentiate_lines")
    if INTERPRETED:  # of a GPU's path, by tensors of a CPU
        monkeypatch.setattr(layer_norm, "takes_lines", lambda tensor, channels: tensor.dtype != torch.float64)
    plain, image = Lines().to(DEVICE), torch.randn(2, 2, 3, 4, 3, device=DEVICE)

    def look(net: nn.Module, call: nn.Module, image: Tensor) -> dict[str, Tensor]:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=half and image.dtype == torch.float32):
            if checkpoint and call is not net:
                output = torch.utils.checkpoint.checkpoint(call, image, use_reentrant=False)
            else:
                output = call(image)
        output.double().square().mean().backward()
        found = {name: p.grad.double() for name, p in net.named_parameters() if p.grad is not None}
        return found | {"output": output.detach().double()}

    ours, theirs = copy.deepcopy(plain), copy.deepcopy(plain)
    got = look(ours, FastKernels(ours, DEVICE), image)
    assert calls == ["normalize_lines"] * (6 if checkpoint else 3) + ["differentiate_lines"] * 3
    with fusions.without("layer norms"):
        torchs = look(theirs, FastKernels(theirs, DEVICE), image)
    wanted = look(plain.double(), plain, image.double())
    for name, value in wanted.items():
        error, other = (float((found[name] - value).norm()) for found in (got, torchs))
        assert error <= 1.5 * other + (1e-2 if half else 1e-5) * float(value.norm()), name
