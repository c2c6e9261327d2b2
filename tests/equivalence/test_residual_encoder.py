"""Our residual encoder U-Net equals nnU-Net's, recorded by ``tests/oracles/nnunet_residual_encoder.py``."""

import json
from pathlib import Path

import pytest
import torch

from volseg.models.residual_encoder import ResEncUNet

RECORDED = json.loads(Path(__file__).with_name("residual_encoder.json").read_text(encoding="utf-8"))


def build(strides, kernel_sizes, filters, blocks):
    return ResEncUNet(
        2, 3, strides=strides, kernel_size=kernel_sizes, filters=filters, blocks=blocks, deep_supervision=True
    )


def fill(tensor, number):
    places = torch.arange(tensor.numel(), dtype=torch.float64).view(tensor.shape)
    return torch.sin(1 + number + 0.7 * places)


@pytest.mark.parametrize("name", list(RECORDED["networks"]))
def test_same_weights_give_the_same_output(name):
    recorded = dict(RECORDED["networks"][name])
    expected = recorded.pop("outputs")
    net = build(**recorded).double()
    with torch.no_grad():
        for number, parameter in enumerate(net.parameters()):
            parameter.copy_(fill(parameter, number))
        outputs = net(fill(torch.empty(RECORDED["shape"]), 0))
    assert len(outputs) == len(expected)
    for output, values in zip(outputs, expected, strict=True):
        # 12 digits are recorded; float64 sums in another order
        kept = output.flatten()[:: RECORDED["every"]]
        torch.testing.assert_close(kept, torch.tensor(values, dtype=torch.float64), rtol=1e-9, atol=1e-9)


def test_it_has_as_many_parameters():
    large = dict(RECORDED["large"])
    count = large.pop("parameters")
    with torch.device("meta"):
        net = build(**large)
    assert sum(parameter.numel() for parameter in net.parameters()) == count
