"""A change in place does not affect a volume that torch has copied."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from beside_plain import RunLayers
from torch import Tensor, nn

from volseg.parallel import ModelParallel


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

    def rectify(net: nn.Module, image: Tensor) -> tuple[Tensor, Tensor]:
        features = image * 1.0
        result = F.relu(operator(features), inplace=True)
        return result.sum((2, 3, 4)), 2 * features

    torch.manual_seed(0)
    image, net = torch.randn(1, 2, 16, 4, 4), RunLayers(rectify)
    sharded = ModelParallel(net, devices=["cpu"] * shards, strategy="spatial")
    (total, features), expected = sharded(image), net(image)
    torch.testing.assert_close((total, features.full_tensor()), expected)
