"""A slab at a time comes out as MONAI makes it at once."""

import numpy as np
import pytest
import torch
from monai.data import MetaTensor
from monai.transforms import Spacingd

from volseg.transforms import resampling
from volseg.transforms.preprocessing import spacing

FIELDS = ("image", "label")
GRIDS = {
    "coarser": ((17, 20, 9), (0.7, 0.8, 2.5), (1.0, 1.1, 3.1)),
    "finer": ((12, 13, 14), (2.0, 2.1, 2.2), (1.3, 1.1, 0.9)),
    "one plane": ((1, 13, 14), (5.0, 2.0, 2.0), (5.0, 1.3, 1.7)),
    "mixed": ((31, 9, 12), (1.0, 3.0, 0.6), (1.7, 1.3, 0.6)),
    "unchanged": ((5, 6, 7), (1.0, 1.0, 1.0), (1.0, 1.0, 1.0)),
}


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("slab_voxels", [1, 1000, 1 << 17])
def test_it_is_monais_resampling(grid, slab_voxels, monkeypatch):
    monkeypatch.setattr(resampling, "SLAB_VOXELS", slab_voxels)
    shape, sides, target = GRIDS[grid]
    affine = torch.eye(4, dtype=torch.float64)
    turned, _ = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))
    affine[:3, :3] = turned @ torch.diag(torch.tensor(sides, dtype=torch.float64))
    affine[:3, 3] = torch.tensor([3.0, -70.0, 11.0])
    case = {
        "image": MetaTensor(torch.randn(2, *shape), affine=affine.clone(), meta={"kept": 1}),
        "label": MetaTensor(torch.randint(0, 4, (1, *shape)).float(), affine=affine.clone()),
    }
    monai = Spacingd(FIELDS, pixdim=target, mode=("bilinear", "nearest"), padding_mode="border")(dict(case))
    ours = spacing(FIELDS, spacing=target)(dict(case))
    for field in FIELDS:
        assert ours[field].dtype == monai[field].dtype == torch.float32
        assert ours[field].shape == monai[field].shape
        assert torch.equal(ours[field].affine, monai[field].affine)
        assert ours[field].meta.keys() == monai[field].meta.keys()
    # A product of matrices may sum in another order where it has fewer rows: the last bit of a coordinate.
    torch.testing.assert_close(ours["image"].as_tensor(), monai["image"].as_tensor(), rtol=0, atol=1e-5)
    assert torch.equal(ours["label"].as_tensor(), monai["label"].as_tensor())


@pytest.mark.parametrize("flip", [False, True])
def test_planes_that_come_and_go_leave_the_same_bits(flip, monkeypatch):
    turned, _ = torch.linalg.qr(torch.eye(3, dtype=torch.float64) + 0.02 * torch.randn(3, 3, dtype=torch.float64))
    affine = torch.eye(4, dtype=torch.float64)
    affine[:3, :3] = turned @ torch.diag(torch.tensor([-1.0 if flip else 1.0, 0.9, 1.1], dtype=torch.float64))
    image = MetaTensor(torch.randn(2, 60, 31, 37), affine=affine)
    target = torch.diag(torch.tensor([1.3, 1.2, 1.0, 1.0], dtype=torch.float64))
    target[:3, 3] = affine[:3, 3] + torch.tensor([-58.0 if flip else -3.0, 1.0, 0.0])
    settings = (target, [50, 29, 35], "bilinear", "border", False, np.float64)
    hold, held = resampling._ExactPlanes.hold, []

    def watched(planes, start, stop):
        hold(planes, start, stop)
        held.append(planes.held)

    monkeypatch.setattr(resampling._ExactPlanes, "hold", watched)
    monkeypatch.setattr(resampling, "SLAB_VOXELS", 1)
    at_once = resampling.SlabResample()(image, *settings)
    monkeypatch.setattr(resampling, "TOGETHER_VOXELS", 1)
    assert resampling.SlabResample()(image, *settings).as_tensor().equal(at_once.as_tensor())
    assert len(held) == 1 + 50
    assert max(map(len, held[1:])) < 15
    assert at_once.std() > 0.1
