"""What was wrong with volumes whose cut dim was merged with its neighbours: seven planes lie unevenly on three shards.

Everything is compared with the plain network in float64, on real copies.
"""

import copy
from collections.abc import Callable

import pytest
import torch
from beside_plain import RunLayers, compare
from torch import Tensor, nn

from volseg.errors import UnsupportedOperatorError
from volseg.parallel import ModelParallel
from volseg.parallel.verification.comparison import TOLERANCE

DEVICES = ["cpu", "cpu:1", "cpu:2"]


def make_net(function: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return a convolution, and a function of its output."""
    torch.manual_seed(0)
    return RunLayers(lambda net, x: function(net.layer(x)), layer=nn.Conv3d(2, 4, 3, padding=1)).double()


def spatial(plain: nn.Module) -> ModelParallel:
    return ModelParallel(copy.deepcopy(plain), strategy="spatial", devices=DEVICES)


def volume() -> Tensor:
    return torch.randn(2, 2, 7, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


PICKS = {
    "list": [1, 0],
    "list along dim 1": (slice(None), [1, 3]),
    "mask": torch.tensor([False, True]),
    "two lists": ([0, 1], [2, 1]),
}
FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "flatten(2)": lambda y: y.flatten(2),
    "flatten(1, 2)": lambda y: y.permute(0, 3, 2, 1, 4).flatten(2, 3),
    "outer": lambda y: y.permute(0, 3, 1, 2, 4).flatten(2, 3),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("pick", PICKS)
def test_volumes_assigned_to_picked_entries(form: str, pick: str) -> None:
    """``tokens[[1, 0]] = other[[1, 0]]`` asked for the value in planes: torch's RuntimeError about slabs of other
    sizes, and a refusal where channels lie in front of the planes."""

    def forward(y: Tensor) -> Tensor:
        tokens, other = FORMS[form](y) * 1.0, FORMS[form](y.sin())
        tokens[PICKS[pick]] = other[PICKS[pick]]
        tokens[PICKS[pick]] *= 2
        return tokens

    plain = make_net(forward)
    errors = compare(plain, spatial(plain), [volume()], steps=2)
    wrong = {name: error for name, error in errors.items() if not error <= TOLERANCE}
    assert not wrong, wrong


def test_transposing_a_vector() -> None:
    """``y.flatten().T`` raised an IndexError, where torch only warns."""
    plain = make_net(lambda y: y.flatten().T)
    with pytest.raises(UnsupportedOperatorError, match="vector"):
        spatial(plain)(volume())
