"""Fixtures of the tests of convolution kernels."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from volseg.device.convolution.settings import Settings
from volseg.parallel import ModelParallel


@pytest.fixture
def settings() -> Callable[..., Settings]:
    """Return settings of a plain convolution but for what is named."""

    def make(padding: tuple[int, ...] = (0, 0, 0), **changed: Any) -> Settings:
        ones, zeros = (1, 1, 1), (0, 0, 0)
        plain = {"stride": ones, "dilation": ones, "transposed": False, "output_padding": zeros, "groups": 1}
        return Settings(padding=padding, **{**plain, **changed})

    return make


@pytest.fixture
def beside_float64() -> Callable[..., list[tuple[Tensor, Tensor]]]:
    """Train a network for one pass in bfloat16 with our kernels, and plainly in float64: each parameter's gradients."""

    def gradients(net: nn.Module, image: Tensor, dtype: torch.dtype) -> list[Tensor]:
        with torch.autocast(image.device.type, torch.bfloat16, enabled=dtype == torch.float32):
            net(image.to(dtype)).square().mean().backward()
        return [parameter.grad.double() for parameter in net.parameters() if parameter.grad is not None]

    def compare(
        layers: Callable[[], list[nn.Module]], image: Tensor, checkpoint: str | None = None
    ) -> list[tuple[Tensor, Tensor]]:
        nets = []
        for _ in range(2):
            torch.manual_seed(0)
            nets.append(nn.Sequential(*layers()).to(image.device))
        wanted = gradients(nets[0].double(), image, torch.float64)
        parallel = ModelParallel(nets[1], strategy="spatial", devices=[image.device], checkpoint=checkpoint)
        return list(zip(gradients(parallel, image, torch.float32), wanted, strict=True))

    return compare
