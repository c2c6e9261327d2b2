import torch
from torch import nn
from torch.nn.functional import interpolate

from volseg.parallel import ModelParallel


class Resizing(nn.Module):
    """Convolution, norm, and a resampling whose planes no slice expresses."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv3d(1, 2, 3, padding=1), nn.InstanceNorm3d(2))

    def forward(self, x):
        return interpolate(self.layers(x), size=(9, 7, 5), mode="trilinear")


def test_a_model_trains_after_it_predicted_in_inference_mode():
    """What is cached between steps must not become an inference tensor, which no backward pass may save."""
    plain = Resizing().double()
    model = ModelParallel(plain, strategy="spatial", devices=["cpu"] * 2)
    x = torch.randn(1, 1, 8, 6, 6, dtype=torch.float64)
    with torch.inference_mode():
        predicted = model(x.clone()).full_tensor()
    trained = model(x)
    trained.square().mean().backward()
    torch.testing.assert_close(trained.full_tensor().detach(), predicted.clone())
    assert plain.layers[0].weight.grad.abs().sum() > 0
