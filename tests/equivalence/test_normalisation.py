"""Our intensities against MONAI's where both do the same, and against nnU-Net's formulas."""

import numpy as np
import pytest
import torch
from monai.data import MetaTensor
from monai.transforms import NormalizeIntensity, ScaleIntensityRange

from volseg.transforms.preprocessing import build_preprocessing


def run(voxels, component):
    return build_preprocessing([component])({"case": "x", "image": MetaTensor(voxels)})["image"].as_tensor()


@pytest.fixture(params=[1.0, 1.6e6])  # the largest intensities in Task04 lie between 112 and 1.6e6
def voxels(request):
    voxels = torch.rand(2, 9, 10, 11) * request.param
    voxels[:, :3] = 0
    return voxels


@pytest.mark.parametrize("nonzero", [False, True])
def test_zscore_is_monais(voxels, nonzero):
    expected = NormalizeIntensity(nonzero=nonzero, channel_wise=True)(voxels.clone())
    assert run(voxels, {"name": "ZScore", "nonzero": nonzero}).equal(torch.as_tensor(expected))


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
