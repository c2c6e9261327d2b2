from functools import partial

import pytest
import torch
from torch import nn

from volseg.errors import CheckpointError
from volseg.models.networks import build_network
from volseg.models.weights import trace_dependent_dims, transfer_weights

SPECS = {
    "UNet": {"name": "UNet", "channels": [4, 8, 16], "strides": [2, 2]},
    "DynUNet": {"name": "DynUNet", "deep_supervision": True, "filters": [4, 8, 8, 8]},
    "SegResNet": {"name": "SegResNet", "init_filters": 8},
    "BasicUNet": {"name": "BasicUNet", "features": [4, 4, 8, 8, 16, 4]},
}


def build(spec, channels, classes):
    return build_network(spec, in_channels=channels, out_channels=classes, patch_size=(32, 32, 32))


def followers(spec, channels, classes):
    stems = trace_dependent_dims(lambda number: build(spec, number, classes), channels)
    return {"stems": stems, "heads": trace_dependent_dims(lambda number: build(spec, channels, number), classes)}


@pytest.mark.parametrize("spec", SPECS.values(), ids=list(SPECS))
def test_other_labels_and_channels_renew_heads_adapt_stems_and_take_the_rest(spec):
    old, new = build(spec, 1, 3), build(spec, 2, 5)
    before = {name: tensor.clone() for name, tensor in new.state_dict().items()}
    transfer = transfer_weights(new, old.state_dict(), **followers(spec, 2, 5))
    source, now = old.state_dict(), new.state_dict()
    assert transfer.new
    assert all(source[name].shape != now[name].shape for name in (*transfer.new, *transfer.adapted))
    assert all(torch.equal(now[name], before[name]) for name in transfer.new)
    assert all(torch.equal(now[name], source[name]) for name in transfer.taken)
    assert {*transfer.taken, *transfer.adapted, *transfer.new} == set(now)
    assert transfer.left == ()


def test_an_image_of_two_channels_alike_gives_what_one_of_them_gave():
    spec = SPECS["UNet"]
    old, new = build(spec, 1, 3).eval(), build(spec, 2, 3).eval()
    transfer = transfer_weights(new, old.state_dict(), **followers(spec, 2, 3))
    assert transfer.adapted
    assert transfer.new == ()
    image = torch.randn(1, 1, 16, 16, 16)
    # Round-off of sums over two channels in place of one.
    torch.testing.assert_close(new(image.expand(-1, 2, -1, -1, -1)), old(image), rtol=1e-4, atol=1e-5)


def test_heads_that_fit_are_renewed_where_labels_mean_something_else():
    spec = SPECS["UNet"]
    old, new = build(spec, 1, 3), build(spec, 1, 3)
    both = followers(spec, 1, 3)
    assert transfer_weights(new, old.state_dict(), **both).new == ()
    renewed = transfer_weights(new, old.state_dict(), **both, renew_heads=True).new
    assert set(renewed) == set(both["heads"])


class Block(nn.Module):
    def __init__(self, in_channels, out_channels, width=4):
        super().__init__()
        self.stem = nn.Conv3d(in_channels, width, 3)
        self.body = nn.Conv3d(width, width, 3)
        self.head = nn.Conv3d(width, out_channels, 1)


FOLLOW = {
    "stems": {"stem.weight": frozenset({1})},
    "heads": {name: frozenset({0}) for name in ("head.weight", "head.bias")},
}


def test_what_does_not_fit_is_listed_and_refused_unless_asked_for():
    weights = {**Block(1, 2, width=8).state_dict(), "more": torch.zeros(1)}
    del weights["body.bias"]
    network = Block(1, 2)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    with pytest.raises(CheckpointError) as refused:
        transfer_weights(network, weights, **FOLLOW)
    said = str(refused.value)
    assert "stem.weight is 8x1x3x3x3, but 4x1x3x3x3 in the network" in said
    assert "body.bias 4 is missing" in said
    assert "training.start_strict" in said
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    transfer = transfer_weights(network, {**weights, "body.bias": torch.ones(4)}, **FOLLOW, strict=False)
    assert transfer.taken == ("body.bias", "head.bias")
    assert transfer.left == ("more",)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"other": torch.zeros(1)}, "none of the weights fit this network"),
        ({"body.bias": torch.tensor([0.0, float("nan"), 0.0, 0.0])}, "not finite, first in body.bias"),
    ],
)
def test_weights_of_nothing_and_of_no_number_are_refused(weights, message):
    with pytest.raises(CheckpointError, match=message):
        transfer_weights(Block(1, 2), weights, **FOLLOW, strict=False)


def test_a_network_that_takes_certain_numbers_alone_is_built_with_one_of_them():
    found = trace_dependent_dims(lambda number: build({"name": "VNet"}, number, 2), 2)  # 16 must be divisible by it
    assert found["in_tr.conv_block.conv.weight"] == {1}

    def build_one(number):
        if number != 3:
            raise ValueError("three alone")
        return Block(number, 2)

    with pytest.raises(CheckpointError, match="cannot be built with another number"):
        trace_dependent_dims(build_one, 3)
    assert trace_dependent_dims(partial(Block, out_channels=2), 1) == {"stem.weight": {1}}
