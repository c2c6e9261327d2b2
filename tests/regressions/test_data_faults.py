"""Faults of data sets and files that passed unnamed, or were named as something else."""

import gzip
import json
import os
import shutil
import time

import nibabel
import numpy as np
import pytest
import torch
from planted_faults import POINTER, Planter, draw_task, save, scaled

from volseg.data import check_task, load_task, read_volume, repair_task
from volseg.data.case_store import case_cache
from volseg.data.case_store.cache_folder import list_entries
from volseg.data.case_store.case_cache import CaseCache
from volseg.data.case_store.preparing import prepare_together
from volseg.data.case_store.stored_case import write_case
from volseg.data.case_store.volume_cache import VolumeCache
from volseg.data.checks.reading import check_case, read_case
from volseg.data.patches import PatchBatches
from volseg.errors import ConfigError, DataError, NonFiniteLossError, ReaderError
from volseg.experiment.prediction.sources import load_trained
from volseg.transforms.grid import Grid
from volseg.transforms.preprocessing import build_preprocessing
from volseg.workflow.checks import EpochLosses


@pytest.fixture
def root(tmp_path):
    return draw_task(tmp_path / "Task90_Drawn", num_cases=6, num_test=0)


def problem_of(root, name="case_00"):
    task = load_task(root)
    [case] = [case for case in task.training if case["case"] == name]
    [problem] = check_case(case, task)
    return problem


ORDERS = {"reversed": ((0, 1, 2), (0,)), "turned": ((2, 0, 1), ()), "turned and reversed": ((1, 2, 0), (0, 2))}


def reorder(path, dims, flipped):
    """Store a volume with its dims in another order, some of them reversed after that; nothing moves in the patient."""
    stored = nibabel.load(path)
    voxels = np.flip(np.asarray(stored.dataobj).transpose(dims), flipped)
    turn = np.eye(4)[:, [*dims, 3]]
    for axis in flipped:
        turn[:, 3] += turn[:, axis] * (voxels.shape[axis] - 1)
        turn[:, axis] *= -1
    save(path, np.ascontiguousarray(voxels), stored.affine @ turn)


@pytest.mark.parametrize("order", ORDERS)
def test_a_label_in_another_axis_order_is_reordered_without_loss(root, tmp_path, order):
    """It was said to lie up to 22.8 mm away, with the advice to copy the image's affine, which mirrors the label."""
    case = Planter(root, "case_00")
    before = np.asarray(nibabel.load(case.label).dataobj)
    reorder(case.label, *ORDERS[order])
    problem = problem_of(root)
    assert problem.kind == "label-reordered"
    assert "lies in the same place as its image, and stores its voxels in another axis order" in problem.message
    repaired = repair_task(check_task(load_task(root)), tmp_path / "repaired")
    written = nibabel.load(repaired.root / "labelsTr" / "case_00.nii.gz")
    np.testing.assert_array_equal(np.asarray(written.dataobj), before)
    np.testing.assert_array_equal(written.affine, nibabel.load(case.image).affine)
    assert repaired.left_out == ()


def test_a_grid_that_is_reordered_is_found_from_both_sides():
    affine = torch.diag(torch.tensor([1.0, 1.5, 3.0, 1.0], dtype=torch.float64))
    grid = Grid((4, 5, 6), affine)
    other = grid.reorder((2, 0, 1), (1,))
    assert other.shape == (6, 4, 5)
    dims, flipped = grid.find_axis_order(other)
    assert grid.distance(other.reorder(dims, flipped)) == 0
    assert grid.find_axis_order(grid) is None
    assert grid.find_axis_order(Grid((4, 5, 6), affine @ torch.diag(torch.tensor([-1.0, 1, 1, 1]).double()))) is None


def test_values_next_to_integers_are_printed_in_full(root):
    """A label times 1.0000001 was refused for its values 1 and 2, "probably resampled"."""
    Planter(root, "case_00").change("label", lambda voxels: voxels * np.float32(1.0000001))
    message = problem_of(root).message
    assert "(1.0000001, 2.0000002)" in message
    assert "volseg data check --fix" in message
    assert "resampled" not in message


DISGUISES = {
    "plain as .nii.gz": (".nii.gz", gzip.decompress, "is not compressed by gzip, as its name says; rename it to"),
    "gzip as .nii": (".nii", lambda content: content, r"is compressed by gzip, .* rename it to volume.nii.gz"),
    "pointer": (".nii.gz", lambda content: POINTER, "is a pointer of Git LFS, .*git lfs pull"),
    "pointer, plain": (".nii", lambda content: POINTER, "is a pointer of Git LFS, .*git lfs pull"),
    "pointer, NRRD": (".nrrd", lambda content: POINTER, "is a pointer of Git LFS, .*git lfs pull"),
    "pointer, MetaImage": (".mha", lambda content: POINTER, "is a pointer of Git LFS, .*git lfs pull"),
}


@pytest.mark.parametrize("disguise", DISGUISES)
def test_a_file_that_is_not_what_its_name_says_is_named_as_what_it_is(root, tmp_path, disguise):
    """These were called truncated or damaged, and were to be fetched again, which would bring the same file."""
    suffix, change, message = DISGUISES[disguise]
    path = tmp_path / f"volume{suffix}"
    path.write_bytes(change((root / "imagesTr" / "case_00.nii.gz").read_bytes()))
    with pytest.raises(ReaderError, match=message):
        read_volume(path)


SLIPS = {"lables": "labels", "modalty": "modality", "region": "regions", "traning": "training", "ignored": "ignore"}


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_in_a_manifest_is_named_with_the_key_that_was_meant(root, slip):
    """A key that is nearly one that is read had no effect, and nothing said so."""
    declared = json.loads((root / "dataset.json").read_text(encoding="utf-8"))
    meant = {"training": [], "ignore": 2}.get(SLIPS[slip], {})
    declared = {slip if key == SLIPS[slip] else key: value for key, value in declared.items()} | {slip: meant}
    (root / "dataset.json").write_text(json.dumps(declared), encoding="utf-8")
    with pytest.raises(DataError, match=f"the key '{slip}' is not known; did you mean '{SLIPS[slip]}'"):
        load_task(root)


def test_keys_that_are_not_read_may_be_called_anything(root):
    declared = json.loads((root / "dataset.json").read_text(encoding="utf-8"))
    further = ("relase", "licence", "reference", "description", "tensorImageSize", "numTraining", "numTest", "label")
    (root / "dataset.json").write_text(json.dumps(declared | dict.fromkeys(further, 6)), encoding="utf-8")
    assert len(load_task(root).training) == 6


ODD_KEYS = {
    "region": "abdomen",
    "dataset_id": 4,
    "labelled_by": "two radiologists",
    "labeled": True,
    "num_training": 6,
    "tests": 0,
    "latest": "1.1",
    "tester": "A. B.",
}


def test_a_key_that_holds_something_else_than_the_one_it_resembles_is_no_slip(root):
    """Data sets that say how many cases they have (``num_training``), or by whom they are labelled, were refused."""
    declared = json.loads((root / "dataset.json").read_text(encoding="utf-8"))
    (root / "dataset.json").write_text(json.dumps(declared | ODD_KEYS), encoding="utf-8")
    assert len(load_task(root).training) == 6


def test_a_model_of_nnunet_1_is_named(tmp_path):
    """It was said to have no fold_0 and to hold fold_0, in one sentence."""
    (tmp_path / "fold_0").mkdir()
    (tmp_path / "plans.pkl").touch()
    (tmp_path / "fold_0" / "model_final_checkpoint.model").touch()
    with pytest.raises(ConfigError, match=r"is a model folder of nnU-Net 1 .* predict with nnU-Net 1 itself"):
        load_trained(tmp_path)


def test_huge_voxels_are_found_and_are_no_matter_of_the_learning_rate(root):
    """One voxel of 1e38 made the loss NaN, and the error said to lower the learning rate."""

    def set_hot(voxels):
        hot = voxels.astype(np.float32)
        hot[3, 4, 5] = 1e38
        return hot

    Planter(root, "case_00").change("image", set_hot)
    [finding] = check_task(load_task(root)).findings
    assert (finding.case, finding.kind, finding.message) == ("case_00", "huge-values", "up to 1e+38")
    losses = EpochLosses(["loss"])
    losses.begin_batch(["case_00"])
    with pytest.raises(
        NonFiniteLossError, match=r"cases: case_00. Look at the images of these cases first .* then lower"
    ):
        losses.require_finite({"loss": torch.tensor(float("nan"))})


def test_a_preprocessed_image_that_is_not_finite_is_refused_before_the_training():
    image, label = torch.zeros(1, 4, 4, 4), torch.zeros(1, 4, 4, 4, dtype=torch.uint8)
    image[0, 1, 2, 3] = float("nan")
    with pytest.raises(DataError, match="case hot: its preprocessed image holds NaN or infinite values"):
        VolumeCache([{"case": "hot", "image": image, "label": label}])


OTHER_LABELS = {
    "declared values": lambda label: label,
    "values of another task": lambda label: np.where(label == 1, 40, label * 3),
    "one structure": lambda label: (label > 0).astype(np.uint8),
}


@pytest.mark.parametrize("kind", OTHER_LABELS)
def test_a_label_map_that_is_given_as_an_image_to_predict_is_remarked_on(root, kind):
    """It was predicted with no message; `volseg predict` logs the remarks of each case that it reads."""
    task, case = load_task(root), Planter(root, "case_00")
    stored = nibabel.load(case.label)
    save(case.image, OTHER_LABELS[kind](np.asarray(stored.dataobj)).astype(np.uint8), stored.affine)
    read = read_case({"case": "given", "image": case.image}, task, digests=False)
    assert [(remark.kind, remark.case) for remark in read.remarks] == [("image-like-label", "given")]
    assert read.problems == ()


def test_an_image_of_few_integers_is_no_label_map(root):
    task, case = load_task(root), Planter(root, "case_00")
    case.change("image", lambda voxels: (voxels // 2).astype(np.uint8))
    assert read_case({"case": "given", "image": case.image}, task, digests=False).remarks == ()


def test_lines_that_say_the_same_of_many_cases_are_one(root):
    """A data set of two channels where one is declared printed a line for each case."""
    for number in range(5):
        Planter(root, f"case_{number:02d}").change("image", lambda voxels: np.stack([voxels, voxels[::-1]], -1))
    bad, told = check_task(load_task(root)).lines()
    assert bad.startswith("bad  5 cases  channels  each has 2 channel(s)")
    assert bad.endswith("case_00, case_01, case_02, case_03, case_04")
    assert told == "5 of 6 cases of Task90_Drawn cannot be used (1 ok, 0 to look at, 5 bad)"


def overwrite(path):
    """Change a byte of a volume in place, and put the date of before back."""
    told = path.stat()
    with path.open("r+b") as file:
        file.seek(told.st_size // 2)
        [byte] = file.read(1)
        file.seek(told.st_size // 2)
        file.write(bytes([byte ^ 64]))
    os.utime(path, ns=(told.st_atime_ns, told.st_mtime_ns))


@pytest.fixture
def batches(root, tmp_path):
    task = load_task(root)
    preprocessing = build_preprocessing([{"name": "ZScore"}])
    for _ in range(2):
        cache = CaseCache(tmp_path / "cache", task, preprocessing)
        prepared = prepare_together(task.training, [], task, preprocessing, cache=cache)
    return PatchBatches(VolumeCache(prepared.training, keep="memory"), (12, 14, 10), 2, 30), prepared.training


@pytest.mark.parametrize("moment", ["before", "within"])
def test_a_cached_case_that_is_overwritten_in_place_is_noticed(batches, moment):
    """The weights were others than without that, and the training ended with status 0."""
    loader, cases = batches
    assert len(list(loader.epoch(0))) == 30
    running = loader.epoch(1)
    if moment == "within":
        next(running)
    overwrite(cases[2]["mapped"].path)
    with pytest.raises(DataError, match=r"the prepared case of case_02, was overwritten while it was used: the \w+ in"):
        list(running)


def test_a_cached_case_of_which_only_the_date_is_new_is_used(batches):
    loader, cases = batches
    expected = [batch["image"] for batch in loader.epoch(3)]
    for case in cases:
        case["mapped"].path.touch()
    shutil.copystat(cases[0]["mapped"].path, cases[1]["mapped"].path)
    assert all(torch.equal(batch["image"], image) for batch, image in zip(loader.epoch(3), expected, strict=True))


def test_a_scaled_grid_is_no_other_axis_order(root):
    Planter(root, "case_00").place(scaled(1, 1, 1.5), "label")
    assert problem_of(root).kind == "affine"


def test_threads_that_store_cases_at_once_keep_the_limit(root, tmp_path, monkeypatch):
    """A thread counted the folder without the files that others were writing, which then exceeded data.cache_limit."""
    task, folder = load_task(root), tmp_path / "cache"

    def prepare(spacing, **options):
        steps = build_preprocessing([{"name": "Spacing", "spacing": [spacing] * 3}])
        cache = CaseCache(folder, task, steps, **options)
        prepare_together(task.training, (), task, steps, cache=cache, workers=3)
        assert cache.num_stored == len(task.training)
        return sum(entry.size for entry in list_entries(folder))

    def write_late(*arguments):
        time.sleep(0.2)  # until every thread has begun to write
        write_case(*arguments)

    limit = prepare(1.0)
    for entry in list_entries(folder):
        os.utime(entry.path, (0, 0))
    monkeypatch.setattr(case_cache, "write_case", write_late)
    assert 0 < prepare(1.0 + 2**-20, limit_bytes=limit) <= limit
