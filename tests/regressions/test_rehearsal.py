"""What was wrong with the rehearsal of a call on shapes: what its result depends on, and what it cannot tell."""

import copy
from typing import Any

import pytest
import torch
from networks import Apply
from torch import Tensor, nn

from volseg.errors import UnsupportedOperatorError
from volseg.parallel import ModelParallel


def spatial(net: nn.Module, **options: Any) -> ModelParallel:
    return ModelParallel(copy.deepcopy(net), strategy="spatial", devices=["cpu", "cpu:1"], **options)


def volume() -> Tensor:
    return torch.randn(2, 3, 7, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def test_the_default_dtype_changes_between_two_calls() -> None:
    """The dtype of the first call was expected of the second, which was refused as a mistake of ours."""

    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        first = torch.where(x > 0, 1.0, 0.0)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            return first, torch.where(x > 0, 1.0, 0.0)
        finally:
            torch.set_default_dtype(before)

    net = Apply(forward)
    for expected, found in zip(net(volume()), spatial(net)(volume()), strict=True):
        torch.testing.assert_close(found.full_tensor(), expected, rtol=0, atol=0)


def test_how_often_to_repeat_is_read_off_a_tensor() -> None:
    """The sizes cannot be told without values: torch's RuntimeError about meta tensors."""
    net = Apply(lambda x: x.repeat_interleave(torch.tensor([1, 0, 2]), 1))
    with pytest.raises(UnsupportedOperatorError, match="one count"):
        spatial(net)(volume())
    with pytest.warns(UserWarning, match="runs on the gathered volume"):
        found = spatial(net, on_unsupported="gather")(volume()).full_tensor()
    torch.testing.assert_close(found, net(volume()), rtol=0, atol=0)
