"""A module that is run on copies keeps its own tensors, however often each of them stands in it."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from volseg.models.grids import probe_grid_rule, run_on_copies


class SharesAll(nn.Module):
    """A module under two names, and a weight in two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv3d(1, 1, 3, padding=1), nn.BatchNorm3d(1))
        self.again = nn.ModuleList([self.first])
        self.tied = nn.Conv3d(1, 1, 3, padding=1)
        self.tied.weight = self.first[0].weight

    def forward(self, x: Tensor) -> Tensor:
        return self.tied(self.again[0](x))


def test_every_place_gets_its_own_tensor_back():
    net = SharesAll()
    own = {(name, key): id(tensor) for name, part in net.named_modules() for key, tensor in part._parameters.items()}
    values = {key: tensor.clone() for key, tensor in net.state_dict().items()}
    for copy, device in ((partial(torch.empty_like, device="meta"), "meta"), (torch.clone, "cpu")):
        with torch.no_grad():
            output = run_on_copies(net, copy, torch.randn(1, 1, 4, 4, 4, device=device))
        assert output.device.type == device
        after = {
            (name, key): id(tensor) for name, part in net.named_modules() for key, tensor in part._parameters.items()
        }
        assert after == own
        assert all(net.state_dict()[key].equal(value) for key, value in values.items())


def test_a_module_that_fails_keeps_its_own_too():
    net = SharesAll()
    with pytest.raises(RuntimeError):
        run_on_copies(net, partial(torch.empty_like, device="meta"), torch.randn(1, 1, 4, 4, 4))
    assert net.tied.weight is net.first[0].weight
    assert net.tied.weight.device.type == "cpu"


def test_asking_for_the_grid_leaves_shared_modules_alone():
    """The first answer left such layers on the meta device: the network could not be trained."""
    net = SharesAll()
    assert probe_grid_rule(net).divisors == (1, 1, 1)
    assert {tensor.device.type for tensor in (*net.parameters(), *net.buffers())} == {"cpu"}
