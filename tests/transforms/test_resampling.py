"""Volumes are resampled as by MONAI, and threads compute slabs to the same bits."""

import threading
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from monai.data import MetaTensor
from monai.transforms import Spacingd

from volseg.data.volume import as_volume
from volseg.errors import GridError
from volseg.transforms import resampling, slabs
from volseg.transforms.preprocessing import build_preprocessing
from volseg.transforms.resampling import Spacing
from volseg.transforms.slabs import run_over_slabs

FIELDS = ("image", "label")
GRIDS = {
    "coarser": ((17, 20, 9), (0.7, 0.8, 2.5), (1.0, 1.1, 3.1)),
    "finer": ((12, 13, 14), (2.0, 2.1, 2.2), (1.3, 1.1, 0.9)),
    "one plane": ((1, 13, 14), (5.0, 2.0, 2.0), (5.0, 1.3, 1.7)),
    "mixed": ((31, 9, 12), (1.0, 3.0, 0.6), (1.7, 1.3, 0.6)),
    "a small animal": ((9, 10, 11), (0.03, 0.04, 0.05), (0.02, 0.03, 0.045)),
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
    ours = Spacing(FIELDS, spacing=target)(dict(case))
    for field in FIELDS:
        assert ours[field].dtype == monai[field].dtype == torch.float32
        assert ours[field].shape == monai[field].shape
        assert torch.equal(ours[field].affine, monai[field].affine)
        assert ours[field].meta.keys() == monai[field].meta.keys()
    # A product of matrices may sum in another order where it has fewer rows: the last bit of a coordinate.
    torch.testing.assert_close(ours["image"].as_tensor(), monai["image"].as_tensor(), rtol=0, atol=1e-5)
    assert torch.equal(ours["label"].as_tensor(), monai["label"].as_tensor())


def test_a_case_that_is_not_resampled_needs_no_memory_for_it(monkeypatch):
    monkeypatch.setattr(resampling, "ALWAYS_FITS", 0)
    monkeypatch.setattr(resampling, "available_bytes", lambda: 0)
    affine = torch.diag(torch.tensor([1.0, 0.8, 2.5, 1.0], dtype=torch.float64))
    case = {"image": MetaTensor(torch.rand(1, 2, 3, 4), affine=affine)}
    assert Spacing(FIELDS, spacing=(1.0, 0.8, 2.5))(case)["image"].as_tensor().equal(case["image"].as_tensor())
    with pytest.raises(GridError, match="GiB to resample"):
        Spacing(FIELDS, spacing=(1, 1, 1))(case)


@pytest.fixture
def threaded(monkeypatch):
    """Take threads for small volumes too, on a machine of one core too."""
    monkeypatch.setattr(slabs, "ALONE_VOXELS", 0)
    monkeypatch.setattr(slabs.os, "cpu_count", lambda: 3)


@pytest.mark.parametrize("depth", [1, 7, 8, 9])
def test_every_plane_is_worked_on_once_and_an_error_is_raised(threaded, depth):
    seen, threads = np.zeros(depth, dtype=int), set()

    def count(slab):
        seen[slab] += 1
        threads.add(threading.current_thread().name)
        assert torch.get_num_threads() == 1
        if slab.stop == 9:
            raise ValueError("the last slab")

    before = torch.get_num_threads()
    with pytest.raises(ValueError, match="the last slab") if depth == 9 else nullcontext():
        run_over_slabs(count, (depth, 2, 2), 4)
    assert torch.get_num_threads() == before
    assert seen.tolist() == [1] * depth
    assert all(name.startswith("slabs") for name in threads)


def test_a_case_is_prepared_to_the_same_bits(request):
    generator = np.random.default_rng(0)
    voxels = np.asfortranarray(generator.normal(0, 500, (1, 40, 35, 67)).astype(np.float64))
    voxels[0, 3, 4, 5] = 1e300  # beyond float32
    steps = [{"name": "Spacing", "spacing": [1.3, 0.7, 1.1]}]
    steps += [{"name": "ClipZScore", "lower": -900.0, "upper": 900.0, "mean": 10.0, "std": 300.0}]

    def prepared() -> tuple[MetaTensor, MetaTensor]:
        read = as_volume(voxels, np.eye(4), "ct.nii", stored=np.dtype(np.float64))
        return read, build_preprocessing(steps)({"case": "ct", "image": read})["image"]

    alone = prepared()
    request.getfixturevalue("threaded")
    for one, other in zip(alone, prepared(), strict=True):
        assert torch.equal(one.as_tensor(), other.as_tensor())
    assert alone[0][0, 3, 4, 5].isinf()
