"""Our batch effects against MONAI's and PyTorch's on one sample each."""

import dataclasses
import math

import pytest
import torch
from monai.transforms import AdjustContrast, Affine, GaussianSmooth
from torch.nn.functional import interpolate

from volseg.config.augmentation import AugmentationConfig
from volseg.transforms.augmentation import AugmentationParameters, BatchAugmentation
from volseg.transforms.augmentation import batch as intensity


def volumes(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("inverted", [False, True])
@pytest.mark.parametrize("gamma", [0.7, 1.5])
def test_power_law_is_monai_adjust_contrast(gamma, inverted):
    x = volumes(2, 9, 8, 7)
    ours = intensity.power_law(x, torch.tensor([gamma, gamma]), inverted=inverted)
    theirs = AdjustContrast(gamma, invert_image=inverted, retain_stats=True)
    for a, b in zip(ours, x, strict=True):
        # MONAI adds 1e-7 and 1e-8 where we clamp, and takes numpy's biased deviation: 1e-4 of values of order one.
        torch.testing.assert_close(a, theirs(b[None])[0].as_tensor(), atol=1e-4, rtol=1e-4)


def test_contrast_is_the_formula():
    x = volumes(2, 5, 6, 7)
    ours = intensity.stretch_contrast(x, torch.tensor([0.8, 1.25]))
    for a, b, factor in zip(ours, x, (0.8, 1.25), strict=True):
        expected = ((b - b.mean()) * factor + b.mean()).clip(b.min(), b.max())
        torch.testing.assert_close(a, expected)


def test_blur_is_monai_gaussian_smooth_in_the_interior():
    x = volumes(2, 20, 18, 16)
    sigma = torch.tensor([[0.5, 0.8, 1.0], [1.0, 0.6, 0.7]])
    ours = intensity.blur(x, sigma)
    for a, b, s in zip(ours, x, sigma.tolist(), strict=True):
        theirs = GaussianSmooth(s, approx="sampled")(b[None])[0].as_tensor()
        inner = (slice(5, -5),) * 3
        # MONAI's sampled kernel ends at four sigma (6e-5 of the mass) and is normalised by the continuous integral,
        # which differs from the sum of samples by 3 % at sigma 0.5 but by 1e-8 at 1: the sum is divided out here.
        scale = math.prod(_sampled_mass(v) for v in s)
        torch.testing.assert_close(a[inner], theirs[inner] / scale, atol=2e-3, rtol=0)


def _sampled_mass(sigma: float) -> float:
    return sum(math.exp(-0.5 * (k / sigma) ** 2) for k in range(-20, 21)) / (sigma * math.sqrt(2 * math.pi))


@pytest.mark.parametrize("zoom", [0.5, 0.62, 0.77, 0.93, 1.0])
def test_low_resolution_is_torch_interpolate_down_and_up(zoom):
    x = volumes(1, 20, 17, 13)
    ours = intensity.coarsen(x, torch.full((1, 3), zoom))
    kept = [round(zoom * n) for n in x.shape[1:]]
    coarse = interpolate(x[None], size=kept, mode="nearest-exact")
    expected = interpolate(coarse, size=x.shape[1:], mode="trilinear")[0]
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)  # sums in another order


@pytest.mark.parametrize("zoom_only", [True, False])
def test_rotation_and_scaling_are_monai_affine_in_the_interior(zoom_only):
    side = (16, 14, 12)
    config = AugmentationConfig.model_validate({"scaling": {"probability": 1}, "rotation": {"probability": 1}})
    augmentation = BatchAugmentation(config, side, num_classes=2)
    x = volumes(1, 1, *augmentation.source_size)
    angle = 0.0 if zoom_only else 0.4
    parameters = dataclasses.replace(
        AugmentationParameters.identity(1),
        rotation=torch.tensor([[angle, 0.0, 0.0]]),
        scale=torch.tensor([[1.2, 1.2, 1.2]]),
    )
    ours, _ = augmentation.apply(x, torch.zeros_like(x, dtype=torch.uint8), parameters)
    theirs = Affine(
        rotate_params=(angle, 0, 0),
        scale_params=(1.2, 1.2, 1.2),
        spatial_size=side,
        padding_mode="zeros",
        image_only=True,
    )(x[0])
    # 2e-4: both sample the same points; MONAI computes them in another order in float32.
    torch.testing.assert_close(ours[0], theirs.as_tensor(), atol=2e-4, rtol=0)
