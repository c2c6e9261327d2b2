import numpy as np
import pytest

from volseg.data.cases import Task
from volseg.data.checks import task as checks_of_task
from volseg.data.checks.kinds import Problem
from volseg.data.checks.reading import check_case, check_cases, require_sound
from volseg.data.layouts import load_task
from volseg.data.synthetic import make_task
from volseg.errors import DataError

RNG = np.random.default_rng(0)
IMAGE = RNG.standard_normal((6, 7, 8)).astype(np.float32)
LABEL = RNG.integers(0, 3, IMAGE.shape).astype(np.uint8)


@pytest.fixture
def task(tmp_path):
    return Task(
        name="Test",
        root=tmp_path,
        modalities=("MRI",),
        labels={0: "background", 1: "Anterior", 2: "Posterior"},
        training=(),
        test=(),
    )


@pytest.fixture
def case(save):
    """Return a function that writes a case and returns it."""

    def write(image=IMAGE, label=LABEL, name="a", label_affine=None):
        at = {} if label_affine is None else {"affine": label_affine}
        return {
            "case": name,
            "image": save(image, f"{name}_image.nii.gz"),
            "label": save(label, f"{name}_label.nii.gz", **at),
        }

    return write


def only(problems: list[Problem]) -> Problem:
    assert len(problems) == 1, problems
    return problems[0]


def changed(array, value):
    """Return a copy of ``array`` as float32 with one voxel replaced."""
    copy = array.astype(np.float32)
    copy[1, 2, 3] = value
    return copy


def test_sound_cases(case, task, affine):
    assert check_case(case(), task) == []
    assert check_case({key: value for key, value in case().items() if key != "label"}, task) == []  # to predict
    assert check_case(case(label=LABEL.astype(np.float32)), task) == []
    assert check_case(case(label_affine=affine + 1e-3 * np.eye(4)), task) == []  # a rounded header


def test_an_absent_and_a_truncated_file(case, task):
    bad = case()
    bad["label"].unlink()
    bad["image"].write_bytes(bad["image"].read_bytes()[:-100])
    truncated, absent = check_case(bad, task)
    assert (truncated.file, absent.file, absent.case) == (bad["image"], bad["label"], "a")
    assert "a_image.nii.gz is truncated or damaged" in truncated.message
    assert absent.message == f"{bad['label']} does not exist; check the path"


NAN = "contains 1 NaN or infinite voxel(s)"
BAD = {
    "nan": ("image", changed(IMAGE, np.nan), f"{NAN}, the first at (c, i, j, k) = (0, 1, 2, 3)"),
    "beyond float32": ("image", changed(IMAGE, 0).astype(np.float64) * 1e300, "NaN or infinite voxel(s)"),
    "constant": ("image", np.full_like(IMAGE, 7), "is constant: every voxel is 7; export the image again"),
    "channels": ("image", np.stack([IMAGE, IMAGE], -1), "has 2 channel(s) (a time series?), but the task declares 1"),
    "undeclared": ("label", changed(LABEL, 5), "contains 5 in 1 voxel(s), but the task declares [0, 1, 2]; correct"),
    "fraction": ("label", changed(LABEL, 0.5), "contains values that are not integers (0.5); it was probably"),
    "label channels": ("label", np.stack([LABEL, LABEL], -1), "has 2 channels; a label map needs one channel"),
    "shape": ("label", LABEL[:, :-1], "has the shape (6, 6, 8), but its image has (6, 7, 8); resample it onto the"),
}


@pytest.mark.parametrize(("field", "voxels", "message"), BAD.values(), ids=BAD)
def test_a_bad_file_is_named_with_what_is_wrong(case, task, field, voxels, message):
    bad = case(**{field: voxels})
    problem = only(check_case(bad, task))
    assert problem.file == bad[field]
    assert problem.message.startswith(f"{bad[field]} ")
    assert message in problem.message


def test_a_label_that_is_shifted_or_turned_about_its_corner(case, task, affine):
    shifted, turned = affine.copy(), affine.copy()
    shifted[1, 3] += 0.45
    turned[:3, 2] = [0.1, 0.0, 2.5]  # a shear: only the far end leaves its place
    for place, message in (
        (shifted, "0.45 mm away from its image (allowed: 0.08 mm, 0.1 voxel)"),
        (turned, "0.7 mm away"),
    ):
        assert f"is up to {message}" in only(check_case(case(label_affine=place), task)).message


def test_all_bad_cases_at_once_in_order(case, task):
    good, wrong, double = (
        case(name="a"),
        case(label=changed(LABEL, 9), name="b"),
        case(np.ones_like(IMAGE), LABEL + 1, "c"),
    )
    seen = []
    problems = check_cases([good, wrong, double], task, workers=2, progress=lambda: seen.append(1))
    assert [problem.case for problem in problems] == ["b", "c", "c"]
    assert len(seen) == 3
    with pytest.raises(DataError) as caught:
        require_sound(problems)
    lines = str(caught.value).splitlines()
    assert lines[0] == "2 case(s) cannot be used:"
    assert lines[1].startswith("  b: ")
    assert len(lines) == 5
    assert "data.skip_bad" in lines[-1]
    require_sound([])


@pytest.mark.real_data
def test_the_real_cases_are_sound(msd_task04):
    task = load_task(msd_task04)
    assert check_cases(task.training, task) == []


@pytest.mark.parametrize(("free", "threads"), [(0, 1), (10**15, 3)])
def test_no_more_cases_are_read_at_a_time_than_memory_holds(tmp_path, monkeypatch, free, threads):
    task = load_task(make_task(tmp_path / "task", num_cases=2, num_test=0))
    monkeypatch.setattr(checks_of_task, "available_bytes", lambda: free)
    asked = []

    def map_alone(function, items, workers):
        asked.append(workers)
        return map(function, items)

    monkeypatch.setattr(checks_of_task, "map_in_threads", map_alone)
    checks_of_task.check_task(task, workers=3)
    assert asked == [threads]
