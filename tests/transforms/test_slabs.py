"""Slabs of a volume are worked on in threads to the same bits, and errors are raised."""

import threading

import numpy as np
import pytest
import torch
from monai.data import MetaTensor

from volseg.data.volume import as_volume
from volseg.transforms import slabs
from volseg.transforms.preprocessing import build_preprocessing
from volseg.transforms.slabs import run_over_slabs


@pytest.fixture
def threaded(monkeypatch):
    """Take threads for small volumes too, on a machine of one core too."""
    monkeypatch.setattr(slabs, "ALONE_VOXELS", 0)
    monkeypatch.setattr(slabs.os, "cpu_count", lambda: 3)


@pytest.mark.parametrize("depth", [1, 7, 8, 9])
def test_every_plane_is_worked_on_once(threaded, depth):
    seen = np.zeros(depth, dtype=int)
    threads = set()

    def count(slab):
        seen[slab] += 1
        threads.add(threading.current_thread().name)
        assert torch.get_num_threads() == 1

    before = torch.get_num_threads()
    run_over_slabs(count, (depth, 2, 2), 4)
    assert torch.get_num_threads() == before
    assert seen.tolist() == [1] * depth
    assert all(name.startswith("slabs") for name in threads)


def test_the_error_of_a_slab_is_raised(threaded):
    def fail(slab):
        if slab.start == 4:
            raise ValueError("slab 4")

    with pytest.raises(ValueError, match="slab 4"):
        run_over_slabs(fail, (9, 2, 2), 2)


def test_a_case_is_prepared_to_the_same_bits(monkeypatch):
    generator = np.random.default_rng(0)
    voxels = np.asfortranarray(generator.normal(0, 500, (1, 40, 35, 67)).astype(np.float64))
    voxels[0, 3, 4, 5] = 1e300  # beyond float32
    steps = [{"name": "Spacing", "spacing": [1.3, 0.7, 1.1]}]
    steps += [{"name": "ClipZScore", "lower": -900.0, "upper": 900.0, "mean": 10.0, "std": 300.0}]

    def prepared() -> tuple[MetaTensor, MetaTensor]:
        read = as_volume(voxels, np.eye(4), "ct.nii", stored=np.dtype(np.float64))
        return read, build_preprocessing(steps)({"case": "ct", "image": read})["image"]

    alone = prepared()
    monkeypatch.setattr(slabs, "ALONE_VOXELS", 0)
    monkeypatch.setattr(slabs.os, "cpu_count", lambda: 3)
    for one, other in zip(alone, prepared(), strict=True):
        assert torch.equal(one.as_tensor(), other.as_tensor())
    assert alone[0][0, 3, 4, 5].isinf()
