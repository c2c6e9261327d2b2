"""`ZScore` gives the bits that MONAI's `NormalizeIntensity` gives, whatever the order of the voxels in memory."""

from itertools import permutations

import pytest
import torch
from monai.data import MetaTensor
from monai.transforms import NormalizeIntensity

from volseg.transforms.intensities import ZScore

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
def test_zscore_is_monais(order, channels, nonzero):
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
