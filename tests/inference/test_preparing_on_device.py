"""A GPU prepares cases as the CPU does, and is not used where it may not be."""

import copy

import pytest
import torch
from monai.data import MetaTensor

from volseg.errors import GridError
from volseg.inference import prefetching
from volseg.inference.prefetching import prepare_on, suits
from volseg.transforms.preprocessing import build_preprocessing

CT = [
    {"name": "Orientation", "axcodes": "RAS"},
    {"name": "Spacing", "spacing": [1.1, 0.9, 1.3]},
    {"name": "ClipZScore", "lower": -2, "upper": 2.5, "mean": 0.3, "std": 0.7},
    {"name": "Pad", "multiple": 8},
]
GPU = torch.device("cuda")


@pytest.fixture
def read():
    """Return a case as from a reader, with flipped and permuted axes."""
    affine = torch.tensor([[0, -0.8, 0, 30], [1.1, 0, 0, -7], [0, 0, 1.5, 2], [0, 0, 0, 1]], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    return {"case": "ct", "image": MetaTensor(torch.randn(1, 21, 24, 17, generator=generator), affine=affine)}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_device_prepares_what_the_cpu_prepares(read, device):
    preprocessing = build_preprocessing(CT)
    expected = preprocessing(copy.deepcopy(read))["image"]
    got = prepare_on(torch.device(device), read, preprocessing)["image"]
    assert read == {}, "what was read is held beside what is made of it"
    assert got.device.type == device
    assert got.meta.keys() == expected.meta.keys()
    assert torch.equal(got.affine, expected.affine)
    assert got.meta["padding"] == expected.meta["padding"]
    # In float64, rounded to float32 once: products and sums that are rounded together may end at its neighbour.
    torch.testing.assert_close(
        got.as_tensor().cpu(), expected.as_tensor(), rtol=0, atol=2.5e-7 if device != "cpu" else 0
    )


@pytest.mark.gpu
def test_intensities_alone_are_the_same_bits_on_a_gpu(read):
    preprocessing = build_preprocessing([CT[0], CT[2]])
    expected = preprocessing(copy.deepcopy(read))["image"].as_tensor()
    assert torch.equal(prepare_on(GPU, read, preprocessing)["image"].as_tensor().cpu(), expected)


def test_an_image_without_room_on_the_device_is_prepared_on_the_cpu(read, monkeypatch):
    asked = []

    def count_free_bytes(device):
        asked.append(device)
        return 4 * 24 * read["image"].numel() - 1

    monkeypatch.setattr(prefetching, "count_free_bytes", count_free_bytes)
    preprocessing = build_preprocessing(CT)
    expected = preprocessing(copy.deepcopy(read))["image"].as_tensor()
    got = prepare_on(torch.device("meta"), read, preprocessing)["image"]  # which holds no voxels
    assert asked
    assert torch.equal(got.as_tensor(), expected)
    with pytest.raises(GridError, match="case ct: "):
        prepare_on(torch.device("cpu"), {"case": "ct", "image": got[:, :0]}, preprocessing)


def test_what_a_device_computes_otherwise_stays_on_the_cpu():
    assert suits(build_preprocessing(CT), GPU)
    assert not suits(build_preprocessing(CT), torch.device("cpu"))
    assert not suits(lambda case: case, GPU)
    for step in (
        {"name": "ZScore"},
        {"name": "ClipZScore", "percentiles": [1, 99], "mean": 0, "std": 1},
        {"name": "ClipZScore", "lower": 0, "upper": 1},
        {"name": "Spacing", "spacing": [1, 1, 4], "thick_slices": "nearest"},
        {"name": "CropForeground"},
    ):
        assert not suits(build_preprocessing([step]), GPU), step
