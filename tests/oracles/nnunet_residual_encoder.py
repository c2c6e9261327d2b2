"""Write ``tests/equivalence/residual_encoder.json``: outputs of nnU-Net's own residual encoder U-Net.

Needs dynamic_network_architectures, which the tests do not:
``python tests/oracles/nnunet_residual_encoder.py``. Weights
and input are sines of the place at which a number stands, so that none has to be stored.
"""

import json
from importlib.metadata import version
from pathlib import Path

import torch
from dynamic_network_architectures.architectures.unet import ResidualEncoderUNet
from torch import nn

NETWORKS = {
    "isotropic": {"strides": [1, 2, 2], "kernel_sizes": [3, 3, 3], "filters": [4, 8, 8], "blocks": [1, 2, 2]},
    "thick slices": {
        "strides": [[1, 1, 1], [2, 2, 1], [2, 2, 1], [2, 2, 2]],
        "kernel_sizes": [[3, 3, 1], [3, 3, 1], [3, 3, 3], [3, 3, 3]],
        "filters": [3, 6, 8, 8],
        "blocks": [1, 3, 1, 2],
    },
}
"""Small ones whose output is kept."""

LARGE = {
    "strides": [1, 2, 2, 2, 2, 2],
    "kernel_sizes": [3] * 6,
    "filters": [32, 64, 128, 256, 320, 320],
    "blocks": [1, 3, 4, 6, 6, 6],
}
"""The one of a patch of 128 x 128 x 128, whose parameters are counted."""

SHAPE = (2, 2, 8, 16, 8)


def build(strides, kernel_sizes, filters, blocks):
    """Return nnU-Net's network of two channels and three classes, as its planner builds it."""
    return ResidualEncoderUNet(
        2, len(strides), filters, nn.Conv3d, kernel_sizes, strides, blocks, 3, [1] * (len(strides) - 1),
        conv_bias=True, norm_op=nn.InstanceNorm3d, norm_op_kwargs={"eps": 1e-5, "affine": True}, nonlin=nn.LeakyReLU,
        nonlin_kwargs={"inplace": True}, deep_supervision=True,
    )  # fmt: skip


def list_parameters(net):
    """Return the parameters in the order of their use, the encoder's first, without the head that nothing trains."""
    heads = list(net.decoder.seg_layers)[:0:-1] or list(net.decoder.seg_layers)
    decoder = [*net.decoder.transpconvs, *net.decoder.stages, *heads]
    return [*net.encoder.parameters(), *(parameter for part in decoder for parameter in part.parameters())]


def fill(tensor, number):
    """Fill a tensor with sines of the number of the tensor and of the place in it."""
    places = torch.arange(tensor.numel(), dtype=torch.float64).view(tensor.shape)
    return torch.sin(1 + number + 0.7 * places)


def main():
    """Run each small network, count the large one."""
    recorded = {}
    for name, shape in NETWORKS.items():
        net = build(**shape).double()
        with torch.no_grad():
            for number, parameter in enumerate(list_parameters(net)):
                parameter.copy_(fill(parameter, number))
            outputs = net(fill(torch.empty(SHAPE), 0))
        kept = [[float(f"{value:.12g}") for value in output.flatten()[::7].tolist()] for output in outputs[:-1]]
        recorded[name] = {**shape, "outputs": kept}
    with torch.device("meta"):
        large = build(**LARGE)
    content = {
        "versions": {name: version(name) for name in ("dynamic_network_architectures", "torch")},
        "shape": SHAPE,
        "every": 7,
        "networks": recorded,
        "large": {**LARGE, "parameters": sum(parameter.numel() for parameter in list_parameters(large))},
    }
    path = Path(__file__).parents[2] / "tests/equivalence/residual_encoder.json"
    path.write_text(json.dumps(content) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
