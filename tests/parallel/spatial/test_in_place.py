"""A slab changed in place behind a convolution is refused as torch refuses it, or not changed where torch copies."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from in_group import in_group
from torch import Tensor, nn

from volseg.parallel import ModelParallel


class ChangedAroundAConvolution(nn.Module):
    """A norm's result, in a buffer with room for its halo, changed before a convolution and after."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.norm = nn.Conv3d(1, 2, 3, padding=1), nn.InstanceNorm3d(2)
        self.behind = nn.Conv3d(2, 2, 3, padding=1)

    def forward(self, image: Tensor) -> Tensor:
        features = self.norm(self.before(image))
        features.add_(1.0)
        result = self.behind(features)
        features.mul_(2.0)
        return result + features


def refusal() -> str:
    network = ModelParallel(ChangedAroundAConvolution(), strategy="spatial")
    try:
        result = network(torch.ones(1, 1, 8, 4, 4) + torch.arange(8.0).reshape(8, 1, 1))
        (result if type(result) is Tensor else result.full_tensor()).square().sum().backward()
    except RuntimeError as fault:
        return str(fault)
    return "none"


def test_a_convolutions_input_changed_in_place_is_refused() -> None:
    for found in in_group(2, refusal):
        assert "modified by an inplace operation" in found


class Rectified(nn.Module):
    """An operator that leaves voxels where they are, and an activation in place behind it."""

    def __init__(self, operator: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.operator = operator

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        features = image * 1.0
        result = F.relu(self.operator(features), inplace=True)
        return result.sum((2, 3, 4)), 2 * features


@pytest.mark.parametrize(
    "operator",
    [
        lambda x: F.pad(x, [0] * 6),
        lambda x: F.pad(x, [0] * 6, mode="replicate"),
        lambda x: F.pad(x, [0, 0, 0, 0, 1, 1]),
        lambda x: x.roll(0, 2),
        lambda x: x.roll(16, 2),
        lambda x: F.interpolate(x, size=x.shape[2:]),
        lambda x: F.max_pool3d(x, 1),
        lambda x: x[:, :, :],
    ],
    ids=["pad", "replicate", "pad along the cut", "roll", "roll all round", "interpolate", "pool", "slice"],
)
@pytest.mark.parametrize("shards", [1, 2, 4])
def test_what_torch_copies_is_not_changed(operator: Callable[[Tensor], Tensor], shards: int) -> None:
    torch.manual_seed(0)
    image = torch.randn(1, 2, 16, 4, 4)
    sharded = ModelParallel(Rectified(operator), devices=["cpu"] * shards, strategy="spatial")
    (total, features), expected = sharded(image), Rectified(operator)(image)
    torch.testing.assert_close((total, features.full_tensor()), expected)
