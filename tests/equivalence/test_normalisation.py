"""Our intensities against MONAI's where both do the same, and against nnU-Net's formulas."""

from itertools import permutations

import numpy as np
import pytest
import torch
from monai.data import MetaTensor
from monai.transforms import NormalizeIntensity, ScaleIntensityRange

from volseg.transforms.intensities import ZScore
from volseg.transforms.preprocessing import build_preprocessing


def run(voxels, component):
    return build_preprocessing([component])({"case": "x", "image": MetaTensor(voxels)})["image"].as_tensor()


@pytest.fixture(params=[1.0, 1.6e6])  # the largest intensities in Task04 lie between 112 and 1.6e6
def voxels(request):
    voxels = torch.rand(2, 9, 10, 11) * request.param
    voxels[:, :3] = 0
    return voxels


def test_zscore_is_nnunets(voxels):
    image = voxels.double().numpy()
    axes = (1, 2, 3)
    expected = (image - image.mean(axes, keepdims=True)) / image.std(axes, keepdims=True)
    # Moments of 990 voxels in float32 against float64.
    np.testing.assert_allclose(run(voxels, {"name": "ZScore"}).numpy(), expected, atol=2e-6)


def test_clip_zscore_is_monais_scaling_of_a_range(voxels):
    lower, upper = 0.2 * voxels.max().item(), 0.7 * voxels.max().item()
    expected = ScaleIntensityRange(lower, upper, 0.0, 1.0, clip=True)(voxels)
    ours = run(voxels, {"name": "ClipZScore", "lower": lower, "upper": upper, "mean": lower, "std": upper - lower})
    torch.testing.assert_close(ours, torch.as_tensor(expected), atol=1e-6, rtol=0)  # two roundings in float32


def test_clip_zscore_is_nnunets_for_ct():
    hounsfield = torch.randn(1, 9, 10, 11) * 500
    expected = (hounsfield.double().numpy().clip(-17, 201) - 99.40) / 39.36  # MSD Task03 in nnU-Net's plans
    ours = run(hounsfield, {"name": "ClipZScore", "lower": -17, "upper": 201, "mean": 99.40, "std": 39.36})
    np.testing.assert_allclose(ours.numpy(), expected, atol=1e-6)  # float32 against float64


SHAPE = (3, 17, 9, 33)


def make_image(order, dtype):
    """Channels of all sizes, one constant and one with zeros, that lie in memory in some order."""
    voxels = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)) * 300 + 1000
    voxels[1] = 7
    voxels[2, :, 4:] = 0
    back = sorted(range(4), key=order.__getitem__)
    voxels = voxels.to(dtype).permute(order).contiguous().permute(back)
    image = MetaTensor(voxels, affine=torch.diag(torch.tensor([1.0, 2, 3, 1]).double()), meta={"qform_code": 2})
    image.applied_operations = [{"class": "Before"}]
    return image


@pytest.mark.parametrize("order", [*permutations(range(4))])
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
