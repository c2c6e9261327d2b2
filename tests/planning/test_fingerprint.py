"""The statistics of a data set, and the changes that recompute them."""

import json
import os
import shutil

import nibabel
import numpy as np
import pytest

from volseg.data import load_task
from volseg.data.synthetic import make_task
from volseg.errors import DataError
from volseg.planning.fingerprint import (
    Fingerprint,
    fingerprint_path,
    keep_fingerprint,
    load_fingerprint,
    take_fingerprint,
)


@pytest.fixture
def write(tmp_path):
    """Return a function that writes a task of two channels from (image, label, affine) of each case."""

    def write_task(cases, **declared):
        root = tmp_path / "Task77_Drawn"
        (root / "imagesTr").mkdir(parents=True)
        (root / "labelsTr").mkdir()
        names = []
        for number, (image, label, affine) in enumerate(cases):
            names.append(f"case_{number}.nii.gz")
            nibabel.save(nibabel.Nifti1Image(image, affine), root / "imagesTr" / names[-1])
            nibabel.save(nibabel.Nifti1Image(label, affine), root / "labelsTr" / names[-1])
        manifest = {
            "modality": {"0": "CT", "1": "PET"},
            "labels": {"0": "background", "1": "organ", "2": "tumour"},
            "training": [{"image": f"imagesTr/{name}", "label": f"labelsTr/{name}"} for name in names],
        } | declared
        (root / "dataset.json").write_text(json.dumps(manifest), encoding="utf-8")
        return load_task(root)

    return write_task


def draw_case(shape=(12, 10, 8), seed=0):
    rng = np.random.default_rng(seed)
    image = rng.normal(100, 20, (*shape, 2)).astype(np.float32)
    label = np.zeros(shape, np.uint8)
    label[2:6, 2:6, 2:6] = 1
    label[4:6, 4:6, 4:6] = 2
    return image, label


def test_shape_and_spacing_are_along_ras_after_cropping(write):
    image, label = draw_case()
    image[:3] = 0
    image[..., 7:, :] = 0
    image[0, 0, 0, 1] = 0  # both channels count
    affine = np.array([[0, 0, -2.5, 0], [0.5, 0, 0, 0], [0, 1.5, 0, 0], [0, 0, 0, 1.0]])  # axes point to A, S, L
    label[:3] = 0
    label[3, 3, 3] = 1
    (case,) = take_fingerprint(write([(image, label, affine)])).fingerprint.cases
    assert case.shape == (7, 9, 10)
    assert case.spacing == pytest.approx((2.5, 0.5, 1.5))
    assert case.kept == pytest.approx(9 * 10 * 7 / (12 * 10 * 8))
    assert case.voxels == {value: int((label == value).sum()) for value in (0, 1, 2)}


def test_intensities_are_those_of_the_foreground(write):
    cases = [(*draw_case(seed=seed), np.eye(4)) for seed in range(3)]
    found = take_fingerprint(write(cases)).fingerprint.intensities
    assert len(found) == 2
    for channel, told in enumerate(found):
        voxels = np.concatenate([image[label > 0, channel] for image, label, _ in cases])
        # 600,000 draws: a mean is off by 20 / sqrt(600,000) = 0.03, seeded, so the bounds need no room for bad luck
        assert told.mean == pytest.approx(voxels.mean(), abs=0.1)
        assert told.std == pytest.approx(voxels.std(), rel=5e-3)
        assert (told.min, told.max) == (voxels.min(), voxels.max())
        # Each of the 192 voxels has a share of 0.52 %, about the percentile: one of the two outermost at either end.
        ordered = np.sort(voxels)
        assert ordered[0] <= told.percentile_00_5 <= ordered[1]
        assert ordered[-2] <= told.percentile_99_5 <= ordered[-1]
        assert told.median == pytest.approx(np.median(voxels), abs=0.5)


def test_every_case_counts_alike_however_large_its_foreground(write):
    image, label = draw_case()
    bright, dot = np.full_like(image, 500), np.zeros_like(label)
    bright[0, 0, 0] = 499
    dot[3, 3, 3] = 1
    found = take_fingerprint(write([(image, label, np.eye(4)), (bright, dot, np.eye(4))])).fingerprint
    assert found.intensities[0].mean == pytest.approx((image[label > 0, 0].mean() + 500) / 2, abs=0.1)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_task(tmp_path_factory.mktemp("made") / "Task00_Synthetic", num_cases=6, num_test=0)


@pytest.fixture
def task(made, tmp_path, monkeypatch):
    monkeypatch.setenv("VOLSEG_CACHE", str(tmp_path / "cache"))
    return load_task(shutil.copytree(made, tmp_path / made.name))


def test_threads_change_nothing(task):
    done = []
    one, four = (
        take_fingerprint(task, workers=workers, progress=lambda: done.append(1)).fingerprint for workers in (1, 4)
    )
    assert one == four
    assert len(done) == 2 * 6
    assert Fingerprint.from_json(json.loads(json.dumps(one.to_json()))) == one


def test_bad_cases_are_told_at_once_or_left_out(task):
    for case in task.training[:2]:
        case["image"].write_bytes(case["image"].read_bytes()[:1000])
    with pytest.raises(DataError, match=r"(?s)^2 case\(s\) cannot be used.*_001: .*_002: .* with --skip-bad$"):
        take_fingerprint(task)
    taken = take_fingerprint(task, skip_bad=True)
    assert [case.case for case in taken.fingerprint.cases] == [case["case"] for case in task.training[2:]]
    assert [told.partition(":")[0] for told in taken.left_out] == ["synthetic_001", "synthetic_002"]
    keep_fingerprint(taken, task, skip_bad=True)
    assert load_fingerprint(task, skip_bad=True) == taken
    assert load_fingerprint(task) is None  # without the bad ones it is another one


def test_no_sound_case_is_an_error(task):
    for case in task.training:
        case["image"].write_bytes(b"")
    with pytest.raises(DataError, match="no labelled case of Task00_Synthetic can be used"):
        take_fingerprint(task, skip_bad=True)


def touch_nothing(task):
    pass


def move_folder(task):
    root = task.root.rename(task.root.with_name("Elsewhere")).rename(task.root)
    assert root == task.root


def rewrite_in_place(task):
    """Change a byte in the middle, but neither the size of the file nor its date; its time of change cannot be set."""
    file = task.training[3]["image"]
    told, content = file.stat(), bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    while file.stat().st_ctime_ns == told.st_ctime_ns:  # the clock of some file systems ticks every 10 ms
        file.write_bytes(content)
        os.utime(file, ns=(told.st_atime_ns, told.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (told.st_size, told.st_mtime_ns)


def touch_label(task):
    os.utime(task.training[0]["label"], (1, 1))


def leave_out_a_case(task):
    file = task.root / "dataset.json"
    manifest = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**manifest, "training": manifest["training"][:-1]}), encoding="utf-8")


def rename_label(task):
    file = task.root / "dataset.json"
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace('"1": "', '"1": "other '), encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        (touch_nothing, True),
        (move_folder, True),
        (rewrite_in_place, False),
        (touch_label, False),
        (rename_label, False),
        (leave_out_a_case, False),
    ],
)
def test_it_is_kept_until_something_changes(task, change, kept):
    taken = take_fingerprint(task)
    assert keep_fingerprint(taken, task) == fingerprint_path(task)
    change(task)
    assert load_fingerprint(load_task(task.root)) == (taken if kept else None)


def test_where_nothing_can_be_written_it_is_said(task, tmp_path, caplog):
    (tmp_path / "cache").write_text("", encoding="utf-8")
    assert keep_fingerprint(take_fingerprint(task), task) is None
    assert "the fingerprint of Task00_Synthetic cannot be stored" in caplog.text


def test_without_a_cache_none_is_kept(task, monkeypatch):
    monkeypatch.setenv("VOLSEG_CACHE", "none")  # once an AssertionError, at the start of `volseg train FOLDER`
    assert keep_fingerprint(take_fingerprint(task), task) is None
    assert load_fingerprint(task) is None


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"key": 1}', "null"])
def test_a_damaged_one_is_taken_anew(task, content, caplog):
    place = fingerprint_path(task)
    place.parent.mkdir(parents=True)
    place.write_text(content, encoding="utf-8")
    assert load_fingerprint(task) is None
    assert content == '{"key": 1}' or "is not a fingerprint" in caplog.text


def test_the_share_of_the_largest_component_is_that_of_structures_in_the_case(write):
    image, label = draw_case()
    label[10, 8, 6] = 1  # beside 64 - 8 voxels
    first, second = take_fingerprint(
        write([(image, label, np.eye(4)), (image, np.zeros_like(label), np.eye(4))])
    ).fingerprint.cases
    assert first.largest == {"organ": 56 / 57, "tumour": 1.0}
    assert second.largest == {}
