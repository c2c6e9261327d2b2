"""Checkpoints in a network's own code, whose blocks were computed again otherwise than they had been: torch counts.

Gates and upsampled volumes have kernels of ours while the network runs, and had torch's where a block of it was
computed again: no forward pass runs then. And within a block that ``checkpoint=`` recomputes, a norm's result that the
network's own checkpoint saved had lost how to write it.
"""

import copy
from collections.abc import Callable
from typing import Any

import plain_kernels
import pytest
import torch
import torch.nn.functional as F
from beside_plain import WAYS, RunLayers, assert_same_values
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from volseg.device import broadcast_mul, upsample2x
from volseg.parallel.spatial.convolution import plan
from volseg.parallel.spatial.operators import pointwise, resize
from volseg.parallel.verification.comparison import whole

Run = Callable[[RunLayers, Tensor], Tensor]


def make_net(run: Run) -> RunLayers:
    """Return convolutions and a norm, and what is done with them."""
    torch.manual_seed(0)
    first, second = nn.Conv3d(2, 4, 3, padding=1), nn.Conv3d(4, 4, 3, padding=1)
    norm, psi = nn.InstanceNorm3d(4, affine=True), nn.Conv3d(4, 1, 1)
    joined, last = nn.Conv3d(8, 4, 3, padding=1), nn.Conv3d(4, 2, 3, padding=1)
    layers = {"first": first, "second": second, "norm": norm, "psi": psi, "joined": joined, "last": last}
    return RunLayers(lambda net, x: net.last(run(net, net.first(x))), **layers).double()


def again(block: Callable[..., Tensor], *given: Tensor) -> Tensor:
    return checkpoint(block, *given, use_reentrant=False)


def double(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2, mode="trilinear")


RUNS: dict[str, Run] = {
    "a gate": lambda net, x: again(lambda x: net.second(x) * net.psi(x).sigmoid(), net.norm(x).relu()),
    "a gate at the end": lambda net, x: again(lambda x: x * net.psi(x).sigmoid(), x),
    "upsampled": lambda net, x: again(lambda x: net.second(double(x)), x),
    "upsampled before": lambda net, x: again(net.second, double(x)),
    "upsampled, normed": lambda net, x: again(net.second, net.norm(double(x)).relu()),
    "upsampled, gated": lambda net, x: again(lambda x: double(x) * net.psi(double(x)).sigmoid(), x),
    "normed": lambda net, x: again(net.second, net.norm(x).relu()),
    "joined": lambda net, x: again(net.joined, torch.cat([net.norm(x), x], 1)),
    "upsampled, joined": lambda net, x: again(net.joined, torch.cat([double(net.norm(x)), double(x)], 1)),
}


@pytest.fixture(autouse=True)
def _kernels_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a CPU take the kernels' way by their plain forms, with tiles of a few voxels."""

    def gather_gradient(gradient: Tensor, shape: Any, part: Any, linear: bool) -> Tensor:
        with torch.enable_grad():
            slab = torch.zeros(shape, dtype=gradient.dtype, requires_grad=True)
            doubled = plain_kernels.double(slab, part, linear)
        return torch.autograd.grad(doubled, slab, gradient)[0]

    monkeypatch.setattr(broadcast_mul, "multiply", torch.mul)
    monkeypatch.setattr(broadcast_mul, "differentiate", plain_kernels.differentiate_product)
    monkeypatch.setattr(pointwise, "_has_kernel", lambda volume: True)
    monkeypatch.setattr(upsample2x, "double", plain_kernels.double)
    monkeypatch.setattr(upsample2x, "gather_gradient", gather_gradient)
    monkeypatch.setattr(resize, "_takes", lambda volume: True)
    monkeypatch.setattr(plan, "TILE_ELEMENTS", 64)


def observe(net: nn.Module, call: nn.Module, x: Tensor, *, half: bool = False) -> dict[str, Tensor]:
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        output = call(x)
    output = whole(output)
    output.double().square().mean().backward()
    found = {name: p.grad.double() for name, p in net.named_parameters() if p.grad is not None}
    return found | {"output": output.detach().double()}


@pytest.mark.parametrize("way", ["fast", "two", "two, recomputed", "two, tiled"])
@pytest.mark.parametrize("name", RUNS)
def test_blocks_were_computed_again_otherwise(name: str, way: str) -> None:
    plain, x = make_net(RUNS[name]), torch.rand(1, 2, 8, 4, 4, dtype=torch.float64)
    ours, narrow = copy.deepcopy(plain), copy.deepcopy(plain).float()
    wanted, got = observe(plain, plain, x), observe(ours, WAYS[way](ours), x)
    assert_same_values(got, wanted, atol=1e-11)
    # The type of what is upsampled is autocast's. What is computed in bfloat16 has two or three digits.
    rounded = observe(narrow, WAYS[way](narrow), x.float(), half=True)
    for each, value in wanted.items():
        assert float((rounded[each] - value).norm()) <= 0.05 * float(value.norm()) + 0.01, each
