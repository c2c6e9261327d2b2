"""Cases are checked while they are prepared: each file is read once, and all bad cases are reported at once."""

import shutil
import weakref

import numpy as np
import pytest
import torch
from monai.data import MetaTensor

from volseg.data.case_store.preparing import prepare_together
from volseg.data.case_store.preprocessed import prepare_all, preprocess
from volseg.data.layouts import load_task
from volseg.data.synthetic import make_task
from volseg.data.threads import map_in_threads
from volseg.errors import DataError, GridError
from volseg.transforms.preprocessing import build_preprocessing


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_task(tmp_path_factory.mktemp("data") / "Task00_Synthetic", num_cases=4, num_test=0)


@pytest.fixture
def task(made, tmp_path):
    """Return a task whose files a test may damage."""
    return load_task(shutil.copytree(made, tmp_path / made.name))


@pytest.fixture
def preprocessing():
    return build_preprocessing([{"name": "Orientation"}, {"name": "ZScore"}])


def truncate(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def test_cases_are_those_of_preparing_alone_from_one_reading(task, preprocessing, reads):
    seen = []
    prepared = prepare_together(
        task.training[:3], task.training[3:], task, preprocessing, workers=2, progress=lambda: seen.append(1)
    )
    assert reads == {case[field]: 1 for case in task.training for field in ("image", "label")}
    assert len(seen) == 4
    assert prepared.problems == []
    wanted = [
        *prepare_all(task.training[:3], preprocessing),
        *prepare_all(task.training[3:], preprocessing, keep_reference=True),
    ]
    for case, expected in zip([*prepared.training, *prepared.validation], wanted, strict=True):
        assert case.keys() == expected.keys()
        for field in case.keys() & {"image", "label", "reference"}:
            assert torch.equal(case[field], expected[field])
            assert torch.equal(case[field].affine, expected[field].affine)
        assert case["case"] == expected["case"]
    assert [case["case"] for case in prepared.validation if "reference" in case] == [task.training[3]["case"]]
    assert not any("reference" in case for case in prepared.training)


def test_a_sound_case_that_cannot_be_preprocessed_comes_after_the_bad_ones(task):
    nowhere = build_preprocessing([{"name": "CropForeground", "above": 1e9}])
    first = task.training[0]["case"]
    with pytest.raises(GridError, match=rf"^case {first}: .* no voxel that exceeds 1000000000.0"):
        prepare_together(task.training, (), task, nowhere)
    truncate(task.training[3]["image"])
    with pytest.raises(DataError, match=r"^1 case\(s\) cannot be used"):
        prepare_together(task.training, (), task, nowhere)


def test_bits_do_not_depend_on_the_number_of_cores():
    """One process used 16 threads for a mean, two processes one each, and their images differed."""
    generator = torch.Generator().manual_seed(0)
    volumes = [torch.randn(1, 35, 51, 35, generator=generator) * 37 + 120 for _ in range(8)]
    before = torch.get_num_threads()

    def means(threads, steps):
        torch.set_num_threads(threads)
        found = list(map_in_threads(lambda volume: volume.mean(), volumes, workers=2))
        found += [prepare_alone({"image": volume}, steps)["image"] for volume in volumes]
        assert torch.get_num_threads() == threads
        return torch.stack(found)

    def prepare_alone(case, steps):
        return preprocess(case, case, steps, keep_reference=False)

    def normalise(case):
        return {"image": case["image"].mean()}

    try:
        torch.set_num_threads(4)
        plain = torch.stack([volume.mean() for volume in volumes])
        found = [means(threads, normalise) for threads in (1, 4)]
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)
    assert not torch.equal(plain, found[0][:8]), "torch sums in one order by itself: nothing was tested"


def test_what_was_read_is_forgotten_once_it_is_resampled():
    """It was held until the case was prepared: of a CT of a thousand planes a gigabyte."""
    preprocessing, alive = build_preprocessing([{"name": "Spacing", "spacing": [2, 2, 2]}]), []
    voxels = np.random.default_rng(0).normal(size=(1, 9, 8, 7)).astype(np.float32)
    held = weakref.ref(voxels)  # which torch.from_numpy refers to
    read = {"case": "ct", "image": MetaTensor(torch.from_numpy(voxels), affine=torch.eye(4, dtype=torch.float64))}
    del voxels

    def look(case):
        alive.append(held() is not None)
        return case

    remember, resample, *rest = preprocessing.transforms
    preprocessing.transforms = (look, remember, look, resample, look, *rest)
    preprocess(read, {"case": "ct"}, preprocessing, keep_reference=False)
    assert alive == [True, True, False]
    assert read == {}
