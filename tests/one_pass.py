"""One pass of a network as it is, and of a copy on slabs or by kernels of our own: outputs and gradients are equal."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from volseg.parallel import FastKernels, ModelParallel
from volseg.parallel.spatial.volume import ShardedVolume

TWO = ["cpu", "cpu:1"]

WAYS: dict[str, Callable[[nn.Module], ModelParallel]] = {
    "fast": lambda net: FastKernels(net, "cpu"),
    "cut": lambda net: ModelParallel(net, strategy="spatial", devices=TWO),
    "recomputed": lambda net: ModelParallel(net, strategy="spatial", devices=TWO, checkpoint="all"),
    "tiled": lambda net: ModelParallel(net, strategy="spatial", devices=TWO, checkpoint="tiled"),
    "offloaded": lambda net: ModelParallel(net, strategy="spatial", devices=TWO, offload=True),
}


class RunLayers(nn.Module):
    """Layers as attributes, and a function of the module and its input as ``forward``."""

    def __init__(self, run: Callable[[Any, Tensor], Any], **layers: nn.Module | nn.Parameter) -> None:
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.run = run

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def whole(output: Any) -> Tensor:
    """Return a volume that may lie in slabs as one tensor."""
    return output.full_tensor() if isinstance(output, ShardedVolume) else output


def assert_same_values(
    got: Mapping[str, Tensor | None], wanted: Mapping[str, Tensor | None], rtol: float = 1e-9, atol: float = 1e-9
) -> None:
    """Compare tensors by name; a gradient that the plain network does not have is none, or zero."""
    assert got.keys() == wanted.keys()
    for name, expected in wanted.items():
        ours = got[name]
        if expected is None or ours is None:
            assert ours is None or not ours.any(), name
            assert expected is None, name
        else:
            torch.testing.assert_close(ours, expected, rtol=rtol, atol=atol, msg=lambda text, n=name: f"{n}: {text}")


def assert_same_gradients(plain: nn.Module, wrap: Callable[[nn.Module], nn.Module], *size: int) -> None:
    """Compare outputs and all gradients, the input's too, of a loss that weights every voxel differently."""
    other, found = copy.deepcopy(plain), []
    for net, model in ((plain, plain), (other, wrap(other))):
        x = torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        output = whole(model(x))
        (output * torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape).sin()).sum().backward()
        found.append({"output": output, "x": x.grad} | {name: p.grad for name, p in net.named_parameters()})
    assert_same_values(found[1], found[0])
