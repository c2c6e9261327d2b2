"""The residual encoder is nnU-Net's: parameters, initial values, grids; its outputs are compared in equivalence."""

import pytest
import torch
from torch import nn

from volseg.errors import ConfigError
from volseg.models.fit_grid import FitGrid
from volseg.models.grids import grid_rule
from volseg.models.networks import build_network
from volseg.models.residual_encoder import ResEncUNet

SMALL = {"strides": [1, (2, 2, 1), 2], "kernel_size": [(3, 3, 1), 3, 3], "filters": [4, 8, 8], "blocks": [1, 2, 2]}


def test_it_is_planned_for_the_patch():
    with torch.device("meta"):
        net = build_network({"name": "ResEncUNet"}, in_channels=2, out_channels=3, patch_size=(40, 56, 40))
    assert [len(stage) for stage in net.encoder] == [1, 3, 4, 6]
    assert net.strides == [(1, 1, 1), (2, 2, 2), (2, 2, 2), (2, 2, 2)]


def test_a_block_begins_as_its_skip():
    net = ResEncUNet(1, 2, **SMALL)
    block = net.encoder[2][1]
    x = torch.rand(1, 8, 4, 4, 4)
    assert torch.equal(block(x), x)  # what is positive passes the activation
    assert all(
        (layer.bias == 0).all() for layer in net.modules() if isinstance(layer, nn.Conv3d) and layer.bias is not None
    )


def test_heads_are_fed_while_training_only():
    four = {"strides": [1, 2, 2, 2], "kernel_size": [3] * 4, "filters": [4] * 4, "blocks": [1] * 4}
    net = ResEncUNet(1, 2, **four, deep_supervision=True)
    x = torch.rand(2, 1, 16, 16, 16)
    fine, coarse = net(x)
    assert (fine.shape, coarse.shape) == ((2, 2, 16, 16, 16), (2, 2, 8, 8, 8))
    (fine.sum() + coarse.sum()).backward()
    assert all(parameter.grad is not None for parameter in net.parameters())
    assert net.eval()(x).shape == fine.shape


def test_any_size_fits_its_grid():
    net = ResEncUNet(1, 2, **SMALL)
    assert grid_rule(net).divisors == (4, 4, 2)
    assert FitGrid(net)(torch.rand(1, 1, 13, 10, 5)).shape == (1, 2, 13, 10, 5)


def test_stages_that_disagree_are_refused():
    with pytest.raises(ConfigError, match="for the same number of stages, at least two, got 3, 3, 2 and 3"):
        ResEncUNet(1, 2, **SMALL | {"filters": [4, 8]})
