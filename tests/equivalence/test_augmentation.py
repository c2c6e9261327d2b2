"""Our batch effects against MONAI's and PyTorch's on one sample each."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from monai.data import MetaTensor
from monai.transforms import AdjustContrast, Affine, GaussianSmooth, NormalizeIntensity
from torch.nn.functional import interpolate

from volseg.config.augmentation import AugmentationConfig
from volseg.transforms.augmentation import AugmentationParameters, BatchAugmentation
from volseg.transforms.augmentation import batch as intensity
from volseg.transforms.intensities import ZScore
from volseg.transforms.preprocessing import build_preprocessing


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


# Our intensities against MONAI's where both do the same, and against nnU-Net's formulas.


def run(voxels, component):
    return build_preprocessing([component])({"case": "x", "image": MetaTensor(voxels)})["image"].as_tensor()


def test_clip_zscore_is_nnunets_for_ct():
    hounsfield = torch.randn(1, 9, 10, 11) * 500
    expected = (hounsfield.double().numpy().clip(-17, 201) - 99.40) / 39.36  # MSD Task03 in nnU-Net's plans
    ours = run(hounsfield, {"name": "ClipZScore", "lower": -17, "upper": 201, "mean": 99.40, "std": 39.36})
    np.testing.assert_allclose(ours.numpy(), expected, atol=1e-6)  # float32 against float64


SHAPE = (3, 17, 9, 33)


def make_image(order, dtype):
    """Make channels of all scales, one constant and one with zeros, in some memory layout."""
    voxels = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)) * 300 + 1000
    voxels[1] = 7
    voxels[2, :, 4:] = 0
    back = sorted(range(4), key=order.__getitem__)
    voxels = voxels.to(dtype).permute(order).contiguous().permute(back)
    image = MetaTensor(voxels, affine=torch.diag(torch.tensor([1.0, 2, 3, 1]).double()), meta={"qform_code": 2})
    image.applied_operations = [{"class": "Before"}]
    return image


CYCLES = [(*range(first, 4), *range(first)) for first in range(4)]


@pytest.mark.parametrize("order", [*CYCLES, *(cycle[::-1] for cycle in CYCLES)])  # each dim at each place
@pytest.mark.parametrize("channels", [None, [0, 2], [1], [2, 1, 0]])
@pytest.mark.parametrize("nonzero", [False, True])
def test_zscore_has_the_bits_of_monais_in_any_order_of_memory(order, channels, nonzero):
    for dtype in (torch.float32, torch.float64, torch.int16):
        image = make_image(order, dtype)
        before = image.as_tensor().clone()
        normalise = NormalizeIntensity(nonzero=nonzero, channel_wise=True)
        expected = image.float().clone()
        if channels is None or len(channels) == len(image):
            expected = normalise(expected)
        else:
            expected[channels] = normalise(expected.as_tensor()[channels])
        found = ZScore(["image"], nonzero=nonzero, channels=channels)({"image": image})["image"]
        assert found.as_tensor().contiguous().numpy().tobytes() == expected.as_tensor().contiguous().numpy().tobytes()
        assert found.stride() == expected.stride()
        assert found.affine.equal(expected.affine)
        assert found.meta.keys() == expected.meta.keys()
        assert found.applied_operations == expected.applied_operations == [{"class": "Before"}]
        assert image.as_tensor().equal(before)
