import pytest
import torch
from torch import nn

from volseg.errors import ConfigError
from volseg.models.fit_grid import FitGrid
from volseg.workflow.components import build_optimizer, freeze_parts, group_parameters, list_frozen_norms


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv3d(1, 2, 3, padding=1), nn.BatchNorm3d(2), nn.BatchNorm3d(2, affine=False))
        self.output = nn.Sequential(nn.BatchNorm3d(2), nn.Conv3d(2, 2, 1))

    def forward(self, x):
        return self.output(self.encoder(x))


def test_frozen_parameters_and_the_statistics_of_their_norms_stay_while_the_rest_trains():
    network = FitGrid(Network(), divisors=(1, 1, 1))
    frozen = freeze_parts(network, ["encoder.*"])
    assert frozen == ["encoder.0.weight", "encoder.0.bias", "encoder.1.weight", "encoder.1.bias"]
    network.hold_in_evaluation(list_frozen_norms(network))
    optimizer = build_optimizer({"name": "AdamW", "lr": 0.1}, network, on_gpu=False)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    network.eval()
    network.train()  # as before every epoch
    network(torch.randn(2, 1, 4, 4, 4)).square().mean().backward()
    optimizer.step()
    after = network.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in after if name.startswith("encoder."))
    assert not torch.equal(after["output.0.running_mean"], before["output.0.running_mean"])
    assert not torch.equal(after["output.1.weight"], before["output.1.weight"])


def test_parts_get_their_own_settings_and_the_rest_those_of_all():
    network = Network()
    optimizer = build_optimizer(
        {"name": "SGD", "lr": 0.1}, network, on_gpu=False, parts={"output.1.*": {"lr": 0.2, "momentum": 0.5}}
    )
    rest, part = optimizer.param_groups
    assert (rest["lr"], part["lr"], part["momentum"]) == (0.1, 0.2, 0.5)
    assert [tuple(p.shape) for p in part["params"]] == [(2, 2, 1, 1, 1), (2,)]
    assert len(group_parameters(network, {"*": {"lr": 1.0}})) == 1


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"outputs.*": {"lr": 1.0}}, r"parts: no parameter matches 'outputs\.\*'; did you mean 'output\.\*'"),
        ({"output*": {"lr": 1.0}, "*bias": {"lr": 2.0}}, r"output\.0\.bias is matched by 'output\*' and '\*bias'"),
        ({"output*": {"fused": True}}, "fused must be the same for all parameters"),
        ({"output*": {"learning": 1.0}}, "optimizer SGD has no parameter 'learning'"),
        ({"output*": {"lr": -1.0}}, "Invalid learning rate: -1.0"),
    ],
)
def test_parts_that_mean_nothing_or_two_things_are_refused(parts, message):
    with pytest.raises(ConfigError, match=message):
        build_optimizer({"name": "SGD", "lr": 0.1}, Network(), on_gpu=False, parts=parts)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("encodr.*", r"no parameter matches 'encodr\.\*'; did you mean 'encoder\.\*'"),
        ("output.1", r"no parameter matches 'output\.1'; did you mean 'output\.1\.\*'"),
        ("*", "leave some trainable"),
    ],
)
def test_a_pattern_without_parameters_and_freezing_everything_are_refused(pattern, message):
    with pytest.raises(ConfigError, match=message):
        freeze_parts(Network(), [pattern])
