"""Data sets whose faults passed the check, stopped it, were misnamed, or were silently trained on."""

import gzip
import importlib
import json
import logging
import os
import shutil
import ssl
import time
import urllib.error
import urllib.request
from collections import Counter
from dataclasses import replace
from unittest import mock

import nibabel
import numpy as np
import pytest
import SimpleITK
import torch
import yaml
from monai.data import MetaTensor
from planted_faults import POINTER, Planter, draw_task, moved, save, scaled, write_manifest
from tiny_trainings import as_a_new_process

from tests.experiment.conftest import CONFIG
from volseg.data import (
    check_cases,
    check_task,
    fetching,
    load_task,
    make_task,
    read_volume,
    repair_task,
    summarise_remarks,
)
from volseg.data.case_store import case_cache
from volseg.data.case_store.cache_folder import list_entries
from volseg.data.case_store.case_cache import CaseCache
from volseg.data.case_store.preparing import prepare_together
from volseg.data.case_store.preprocessed import write_case
from volseg.data.case_store.volume_cache import VolumeCache
from volseg.data.cases import read_splits
from volseg.data.checks.reading import check_case, read_case
from volseg.data.download import download
from volseg.data.patches import PatchBatches
from volseg.data.readers import SUFFIXES
from volseg.errors import DataError, GridError, NonFiniteLossError, ReaderError
from volseg.experiment import load_config, train
from volseg.planning.fingerprint import CaseSizes, Fingerprint, keep_fingerprint, load_fingerprint, take_fingerprint
from volseg.planning.plan import plan
from volseg.transforms import resampling
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
    """The error gave a distance of 22.8 mm and advised copying the affine, which mirrors the label."""
    case = Planter(root, "case_00")
    before = np.asarray(nibabel.load(case.label).dataobj)
    reorder(case.label, *ORDERS[order])
    problem = problem_of(root)
    assert problem.kind == "label-reordered"
    assert "is in the same place as its image, but stores its voxels in another axis order" in problem.message
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
    assert grid.distance(other.reorder(*grid.find_axis_order(other))) == 0
    for apart in ([1, 1, 1, 1], [1, 1, 1.5, 1], [-1, 1, 1, 1]):  # the same, coarser, mirrored in place
        assert grid.find_axis_order(Grid((4, 5, 6), affine @ torch.diag(torch.tensor(apart).double()))) is None


def test_values_next_to_integers_are_printed_in_full(root):
    """A label times 1.0000001 was refused for its values 1 and 2, "probably resampled"."""
    Planter(root, "case_00").change("label", lambda voxels: voxels * np.float32(1.0000001))
    message = problem_of(root).message
    assert "(1.0000001, 2.0000002)" in message
    assert "volseg data check DATA_SET --fix DIR" in message
    assert "resampled" not in message


POINTED = (lambda content: POINTER, "is a Git LFS pointer, .*git lfs pull")
DISGUISES = {
    ".nii.gz": (gzip.decompress, "is called .gz, but not compressed with gzip; rename it to"),
    ".nii": (lambda content: content, r"is compressed with gzip, .* rename it to volume.nii.gz"),
    ".nrrd": POINTED,
    ".mha": POINTED,
}


@pytest.mark.parametrize("suffix", DISGUISES)
def test_a_file_that_is_not_what_its_name_says_is_named_as_what_it_is(root, tmp_path, suffix):
    """They were called truncated, but fetching them again gives the same files."""
    change, message = DISGUISES[suffix]
    path = tmp_path / f"volume{suffix}"
    path.write_bytes(change((root / "imagesTr" / "case_00.nii.gz").read_bytes()))
    with pytest.raises(ReaderError, match=message):
        read_volume(path)


SLIPS = {"lables": "labels", "modalty": "modality", "region": "regions", "traning": "training", "ignored": "ignore"}


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_in_a_manifest_is_named_with_the_key_that_was_meant(root, slip):
    """A misspelt key silently had no effect."""
    declared = json.loads((root / "dataset.json").read_text(encoding="utf-8"))
    meant = {"training": [], "ignore": 2}.get(SLIPS[slip], {})
    declared = {slip if key == SLIPS[slip] else key: value for key, value in declared.items()} | {slip: meant}
    (root / "dataset.json").write_text(json.dumps(declared), encoding="utf-8")
    with pytest.raises(DataError, match=f"the key '{slip}' is not known; did you mean '{SLIPS[slip]}'"):
        load_task(root)


ODD_KEYS = {
    **dict.fromkeys(("relase", "licence", "reference", "tensorImageSize", "numTraining", "numTest", "label"), 6),
    # These resemble a key that is read, and hold something else.
    "region": "abdomen",
    "labelled_by": "two radiologists",
    "labeled": True,
    "num_training": 6,
    "tests": 0,
    "latest": "1.1",
}


def test_a_key_that_holds_something_else_than_the_one_it_resembles_is_no_slip(root):
    """Data sets with keys such as ``num_training`` or a list of annotators were refused."""
    declared = json.loads((root / "dataset.json").read_text(encoding="utf-8"))
    (root / "dataset.json").write_text(json.dumps(declared | ODD_KEYS), encoding="utf-8")
    assert len(load_task(root).training) == 6


def test_a_loss_that_is_no_number_is_first_a_matter_of_the_images():
    """One voxel of 1e38 made the loss NaN, and the error advised a lower learning rate."""
    losses = EpochLosses(["loss"])
    losses.begin_batch(["case_00"])
    with pytest.raises(
        NonFiniteLossError, match=r"cases: case_00. Check the images of these cases first .* then lower"
    ):
        losses.require_finite({"loss": torch.tensor(float("nan"))})


def test_a_preprocessed_image_that_is_not_finite_is_refused_before_the_training():
    image, label = torch.zeros(1, 4, 4, 4), torch.zeros(1, 4, 4, 4, dtype=torch.uint8)
    image[0, 1, 2, 3] = float("nan")
    with pytest.raises(DataError, match="case hot: its preprocessed image contains NaN or infinite values"):
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
    Planter(root, "case_01").change("image", lambda voxels: (voxels // 2).astype(np.uint8))  # few integers
    other = {"case": "other", "image": root / "imagesTr" / "case_01.nii.gz"}
    assert read_case(other, task, digests=False).remarks == ()


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
    with pytest.raises(
        DataError, match=r"the prepared case of case_02, was overwritten while it was used: the content of"
    ):
        list(running)


def test_a_cached_case_of_which_only_the_date_is_new_is_used(batches):
    loader, cases = batches
    expected = [batch["image"] for batch in loader.epoch(3)]
    for case in cases:
        case["mapped"].path.touch()
    shutil.copystat(cases[0]["mapped"].path, cases[1]["mapped"].path)
    assert all(torch.equal(batch["image"], image) for batch, image in zip(loader.epoch(3), expected, strict=True))


def test_threads_that_store_cases_at_once_keep_the_limit(root, tmp_path, monkeypatch):
    """A thread ignored files that others were writing, so that the cache exceeded data.cache_limit."""
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


# Sound data sets that are unlike Task04: the check reports nothing, or one finding for one cause.


SIDE = 28


def ball(shape, centre, radius):
    """Return the voxels inside an ellipsoid."""
    places = (np.indices(shape).T - centre) / radius
    return (np.square(places).sum(-1) < 1).T


def draw_body(rng, shape, noise=8):
    tissue = 300 + 20 * rng.normal(size=tuple(-(-side // 4) for side in shape)).repeat(4, 0).repeat(4, 1).repeat(4, 2)
    tissue = tissue[tuple(map(slice, shape))] + rng.normal(0, noise, shape)
    middle = (np.array(shape) - 1) / 2
    return np.where(ball(shape, middle, 0.9 * middle + 0.5), tissue, 0)


def write_cases(root, cases, **changes):
    names = []
    for number, (image, label, spacing) in enumerate(cases):
        names.append(f"case_{number:02d}")
        affine = np.diag([*spacing, 1.0])
        save(root / "imagesTr" / f"{names[-1]}.nii.gz", image.astype(np.float32), affine)
        save(root / "labelsTr" / f"{names[-1]}.nii.gz", label.astype(np.uint8), affine)
    return write_manifest(root, names, [], **{"labels": {"0": "background", "1": "structure"}, **changes})


def count_kinds(root):
    return Counter(finding.kind for finding in check_task(load_task(root)).findings)


def draw_lesions(rng):
    """Yield cases with one lesion each, of any size, at any place."""
    shape = (SIDE + 8,) * 3
    for _ in range(30):
        image = draw_body(rng, shape)
        lesion = ball(shape, rng.uniform(11, 24, 3), np.exp(rng.uniform(0.3, np.log(9)))) & (image > 0)
        yield image + 100 * lesion, lesion, (1, 1, 1)


def draw_stack(rng, thickness=1):
    shape = (SIDE, SIDE, round(48 / thickness))
    radii = rng.uniform(4, 6, 3) / (1, 1, thickness)
    middle = (np.array(shape) - 1) / 2
    fine = draw_body(rng, (SIDE, SIDE, 48), noise=0)
    image = fine[:, :, :: round(thickness)][:, :, : shape[2]] + rng.normal(0, 8, shape)
    organ = ball(shape, middle + rng.uniform(-1, 1, 3) / (1, 1, thickness), radii)
    return image + 100 * organ, organ, (1, 1, thickness)


def draw_thick(thickness):
    return lambda rng: (draw_stack(rng, thickness if number < 3 else 1) for number in range(40))


def draw_ignored(rng):
    for number in range(30):
        image, organ, spacing = draw_stack(rng)
        label = organ.astype(np.uint8)
        label[:, :, 20:] = np.where(number < 2, 2, label[:, :, 20:])
        yield image, label, spacing


def draw_points(rng):
    """Draw two lesions of one voxel, next to the edge of a mask."""
    for number in range(30):
        image, organ, spacing = draw_stack(rng)
        if number == 0:
            image, organ = np.where(organ, image - 100, image), np.zeros_like(organ)
            organ[10, 12, 20] = organ[17, 12, 30] = True
            image[organ] += 60
        yield image, organ, spacing


def draw_chests(rng):
    """Draw bones and lungs; the first case has lungs only."""
    shape = (SIDE,) * 3
    for number in range(12):
        place = np.array((15, 14, 14)) + rng.uniform(-1, 1, 3)
        bone, lung = (ball(shape, place + np.eye(3)[2] * at, radius) for at, radius in ((-6, 6), (6, 5)))
        bone &= number > 0
        image = np.where(bone, 400, np.where(lung, -700, 40)) + rng.normal(0, 10, shape)
        image[:3] += 400  # another bone, without a label
        yield image, bone + 2 * lung, (1, 1, 1)


BONES = {"labels": {"0": "background", "1": "bone", "2": "lung"}, "modality": {"0": "CT"}}
SOUND = {
    # A small lesion of unusual contrast was reported as shifted by 12 voxels. Where lesions lie anywhere, places say
    # nothing.
    "lesions anywhere": (draw_lesions, 0, {}, lambda kinds: not kinds.keys() & {"label-shifted", "label-mirrored"}),
    "other lesions": (draw_lesions, 1, {}, lambda kinds: not kinds.keys() & {"label-shifted", "label-mirrored"}),
    # Three stacks of 6 mm among 37 of 1 mm had remarks on spacing, noise, unlike slices, jumps and ragged labels.
    "stacks of 6 mm": (draw_thick(6), 0, {}, lambda kinds: kinds == {"spacing": 3}),
    # Of slices twice as thick the spacing was remarked on, although the size of the patient was usual.
    "stacks of 2 mm": (draw_thick(2), 0, {}, lambda kinds: "spacing" not in kinds),
    # Ignored voxels counted as background, so labels were reported as small, and as shifted.
    "ignored voxels": (draw_ignored, 2, {"ignore": 2}, lambda kinds: not kinds),
    # They were reported as a ragged label, and the edge of the mask as an overflow.
    "lesions of a voxel": (draw_points, 3, {}, lambda kinds: not kinds.keys() & {"label-ragged", "wrapped"}),
    # A crop with one of the two structures was reported as dark, and its label as lying on air.
    "lungs without bones": (draw_chests, 4, BONES, lambda kinds: not kinds),
}


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_data_set_has_the_findings_that_it_should(tmp_path, name):
    draw, seed, changes, is_right = SOUND[name]
    kinds = count_kinds(write_cases(tmp_path / "Task60_Sound", draw(np.random.default_rng(seed)), **changes))
    assert is_right(kinds), kinds


# Cases that passed the check and trained something else than was meant: a header in micrometres trained on brains of
# one voxel, one in metres asked for 560 TB in the middle of the preparing.


@pytest.mark.parametrize(
    ("factor", "said"), [(1e-3, "0.00"), (1e3, "needed: sides of 0.01 to 50 mm"), (40, "less than")]
)
def test_a_wrong_unit_is_named_for_image_and_label(root, factor, said):
    planter = Planter(root, "case_02")
    for field in ("image", "label"):
        if factor == 40:  # sides of 40 mm may be, 5 m of them may not
            planter.change(field, lambda voxels: np.tile(voxels, (6, 1, 1)))
        planter.place(scaled(factor, factor, factor), field)
    task = load_task(root)
    problems = check_cases(task.training, task)
    assert [(problem.case, problem.file) for problem in problems] == [
        ("case_02", file) for file in (planter.image, planter.label)
    ]
    assert all(
        said in problem.message and "correct the spacing in the header" in problem.message for problem in problems
    )


def test_a_resampling_that_no_memory_holds_is_refused_before_it_begins():
    case = {
        "case": "large",
        "image": MetaTensor(torch.rand(1, 90, 90, 90), affine=torch.diag(torch.tensor([40.0, 40, 40, 1]))),
    }
    resample = build_preprocessing([{"name": "Spacing", "spacing": [0.5, 0.5, 0.5]}])
    with pytest.raises(GridError) as caught:
        resample(case)
    message = str(caught.value)
    assert message.startswith("case large: image has (90, 90, 90) voxels of 40 x 40 x 40 mm; at the spacing [0.5, 0.5")
    assert "(7200, 7200, 7200) voxels" in message
    assert "choose a coarser spacing" in message


def test_sform_and_qform_that_mirror_each_other_are_told(root):
    turned = {"case_00": scaled(-1, 1, 1), "case_01": scaled(-1, 1, 1), "case_03": moved(0.5, 0, 0)}
    turned |= {"case_04": moved(0.01, 0, 0)}  # rounded: no remark
    for name, turn in turned.items():
        Planter(root, name).turn_qform(turn)
    task = load_task(root)
    found = check_task(task)
    assert found.problems == []
    mirrored, apart = summarise_remarks(found.remarks)
    assert mirrored.startswith("2 case(s): sform and qform mirror each other (left-right)")
    assert "case_00" in mirrored
    assert "case_01" in mirrored
    assert apart.startswith("1 case(s): sform and qform disagree")
    assert "case_03 (up to 0.5" in apart


def test_the_same_image_in_training_and_validation_is_refused_or_left_out_of_training(root):
    """Also under another name, and compressed otherwise."""
    for folder in ("imagesTr", "labelsTr"):
        content = gzip.decompress((root / folder / "case_00.nii.gz").read_bytes())
        (root / folder / "case_04.nii.gz").write_bytes(gzip.compress(content, 1))
    task, preprocessing = load_task(root), build_preprocessing([{"name": "Orientation"}, {"name": "ZScore"}])
    with pytest.raises(DataError, match=r"case_00: .* contains the same voxels as the validation case case_04"):
        prepare_together(task.training[:4], task.training[4:], task, preprocessing)
    prepared = prepare_together(task.training[:4], task.training[4:], task, preprocessing, skip_bad=True)
    assert [case["case"] for case in prepared.training] == ["case_01", "case_02", "case_03"]
    assert [case["case"] for case in prepared.validation] == ["case_04", "case_05"]
    assert [problem.case for problem in prepared.problems] == ["case_00"]


def change_voxels(file, edit):
    """Write a volume with other voxels under the same name."""
    stored = nibabel.load(file)
    voxels = np.asarray(stored.dataobj).copy()
    edit(voxels)
    nibabel.save(nibabel.Nifti1Image(voxels, stored.affine, stored.header), file)


def remove_a_voxel(label):
    label[tuple(np.argwhere(label > 0)[0])] = 0


BETWEEN_SITTINGS = {
    "imagesTr": {
        "are bad now": lambda file: file.write_bytes(file.read_bytes()[:99]),
        "have other voxels": lambda file: change_voxels(file, lambda image: np.copyto(image, image[::-1].copy())),
    },
    "labelsTr": {"have other voxels": lambda file: change_voxels(file, remove_a_voxel)},
}


def test_a_run_goes_on_with_the_cases_it_was_begun_with(folder, tmp_path):
    """A case that turned bad between two sittings was left out with one line in the log, and other batches trained."""

    def run(name, epochs, **options):
        settings = ("data.skip_bad=true", f"training.epochs={epochs}")
        return train(config_of(folder, tmp_path / name, *settings), **options)

    [first, *_] = run("run", 1).folder.split().training
    for part, changes in BETWEEN_SITTINGS.items():
        file = folder / part / f"{first}.nii.gz"
        sound = file.read_bytes()
        for said, change in changes.items():
            change(file)
            with pytest.raises(DataError, match=rf"started with other versions of its cases: {first} {said}\. Restore"):
                run("run", 2, resume=True)
            file.write_bytes(sound)
    assert len(run("run", 2, resume=True).history) == 2

    file = folder / "imagesTr" / f"{first}.nii.gz"
    sound = file.read_bytes()
    file.write_bytes(sound[:99])
    run("other", 1)
    file.write_bytes(sound)
    with pytest.raises(DataError, match=rf"{first} were bad but are valid now"):
        run("other", 2, resume=True)
    file.write_bytes(sound[:99])
    (tmp_path / "other" / "cases.json").write_text("[" * 100_000, encoding="utf-8")
    with pytest.raises(DataError, match=r"cases\.json cannot be read as JSON"):
        run("other", 2, resume=True)


# Data sets of one's own: what was trained on or planned from in silence was not what the folder said.


@pytest.fixture
def folder(tmp_path):
    return make_task(tmp_path / "Task00_Synthetic", num_cases=4, num_test=0)


def config_of(root, output, *more):
    config = {**CONFIG, "data": {"root": str(root)}, "split": {"num_folds": 2}, "augmentation": {"enabled": False}}
    config["training"] = {"epochs": 1, "iterations": 1}
    file = output.parent / "config.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    return load_config(file, [f"output={output}", *more])


def write_table(folder, cases, order=1):
    """Write a table of cases, in their order or backwards, every second one in the second fold."""
    rows = [f"{case['case']},{case['image']},{case['label']},{place % 2}\n" for place, case in enumerate(cases)]
    (folder / "cases.csv").write_text("case,image,label,fold\n" + "".join(rows[::order]), encoding="utf-8")
    return folder / "cases.csv"


def declare(folder, **more):
    file = folder / "dataset.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | more), encoding="utf-8")


def test_a_table_with_folds_trains_with_a_cache(folder, tmp_path):
    """Every training from a table with a column ``fold`` or ``split`` ended by "a prepared case cannot be stored by
    Split": the folds, from which no voxel follows, were part of a stored case's name."""
    cases = load_task(folder).training
    for name, order in (("first", 1), ("other folds", -1)):
        table = write_table(tmp_path, cases, order)
        train(config_of(table, tmp_path / name, f"data.cache={tmp_path / 'cache'}"))
    assert len(list((tmp_path / "cache" / "cases").iterdir())) == len(cases)


def test_regions_in_another_order_get_new_heads(folder, tmp_path):
    """Regions are outputs in their order, and mappings are equal whatever theirs is: a fine-tuning for (back, front)
    kept the head for front as back's."""
    declare(folder, regions={"front": [1], "back": [2]})
    train(config_of(folder, tmp_path / "first"))
    declare(folder, regions={"back": [2], "front": [1]})
    train(config_of(folder, tmp_path / "second", f"training.start_from={tmp_path / 'first'}"))
    assert json.loads((tmp_path / "second" / "start.json").read_text(encoding="utf-8"))["new"]


@pytest.mark.parametrize(
    ("regions", "remedy"),
    [
        ({"core": [2], "whole": [1, 2]}, "'whole', the last of these, is painted over them with 1"),
        ({"one": [1, 3], "other": [2, 3]}, "or add a region of only 3"),
    ],
)
def test_regions_that_would_be_painted_over_are_refused(folder, regions, remedy):
    """A core that is declared before the whole was trained, painted over in every prediction, and scored 0."""
    named = {"0": "background", "1": "a", "2": "b", "3": "c"}
    declare(folder, labels=named, regions=regions)
    with pytest.raises(DataError, match=remedy):
        load_task(folder)
    whole = {"whole": [1, 2, 3], "core": [2, 3], "middle": [3]}
    declare(folder, labels=named, regions=whole)
    assert load_task(folder).output_values == (1, 2, 3)


def test_a_checkpoint_of_a_run_says_what_its_labels_and_channels_are(folder, tmp_path, caplog):
    """Named by its file and not by its folder, a run's labels were not asked for: with the same number of them its
    heads were kept for whatever they are called now, and its validation cases were not looked at."""
    train(config_of(folder, tmp_path / "first"))
    declare(folder, labels={"0": "background", "1": "Posterior", "2": "Anterior"}, modality={"0": "T2"})
    start = f"training.start_from={tmp_path / 'first' / 'checkpoints' / 'latest.pt'}"
    with caplog.at_level(logging.WARNING):
        train(config_of(folder, tmp_path / "second", start, "split.fold=1"))
    assert json.loads((tmp_path / "second" / "start.json").read_text(encoding="utf-8"))["new"]
    assert "2 of this run's 2 validation cases" in caplog.text
    assert "trained on the channels MRI, in this order, but this run has T2" in caplog.text


def write(path, voxels):
    path.parent.mkdir(exist_ok=True)
    SimpleITK.WriteImage(SimpleITK.GetImageFromArray(voxels), str(path))


def test_voxels_beside_a_header_are_part_of_what_was_read(tmp_path):
    """Of a ``.mhd`` only the header was looked at: with other voxels in the ``.raw`` beside it the old fingerprint was
    planned from, and labels were those of before."""
    label, image = tmp_path / "labels" / "a.mhd", np.random.default_rng(0).normal(size=(8, 8, 8)).astype(np.float32)
    structure = np.zeros((8, 8, 8), dtype=np.uint8)
    structure[2:6, 2:6, 2:6] = 1
    write(tmp_path / "images" / "a.mhd", image)
    write(label, structure)
    task = load_task(tmp_path)
    keep_fingerprint(take_fingerprint(task), task)
    assert load_fingerprint(task) is not None
    header = label.stat()
    write(label, 3 * structure)
    os.utime(label, ns=(header.st_atime_ns, header.st_mtime_ns))
    assert load_fingerprint(task) is None
    assert sorted(load_task(tmp_path).labels) == [0, 3]


def test_channels_that_are_numbered_are_taken_by_their_numbers(tmp_path):
    """The columns of a table were channels in the order in which they stand: ``image_1`` before ``image_0`` exchanged
    the two that ``dataset.json`` declares."""
    for number in range(2):
        for kind in ("image", "label"):
            voxels = np.zeros((4, 4, 4), dtype=np.uint8)
            nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4)), tmp_path / f"{kind}{number}.nii.gz")
    declared = {"channel_names": {"0": "T1", "1": "T2"}, "labels": {"background": 0, "tumour": 1}}
    (tmp_path / "dataset.json").write_text(json.dumps(declared), encoding="utf-8")
    table = tmp_path / "cases.csv"
    table.write_text("case,image_1,image_0,label\na,image1.nii.gz,image0.nii.gz,label0.nii.gz\n", encoding="utf-8")
    (case,) = load_task(table).training
    assert [path.name for path in case["image"]] == ["image0.nii.gz", "image1.nii.gz"]


def test_regions_of_two_sides_are_not_mirrored_into_each_other():
    """Only labels were searched for left and right, not regions."""
    case = CaseSizes(case="a", shape=(64, 64, 64), spacing=(1.0, 1.0, 1.0), voxels={0: 1, 1: 1, 2: 1})
    values = {0: "background", 1: "label_1", 2: "label_2", 3: "label_3"}
    regions = {"left lung": (1, 3), "right lung": (2,)}
    planned = plan(Fingerprint(task="Lungs", channels=("CT",), labels=values, cases=(case,), regions=regions))
    assert planned.config().augmentation.mirror.axes == (False, True, True)
    assert planned.config().inference.mirror is False


def key_of(folder, task):
    """Return the name of the first case's cache file."""
    return CaseCache(folder / "cache", task, build_preprocessing([{"name": "ZScore"}])).key_of(task.training[0])


def test_the_reader_of_labels_is_part_of_a_stored_cases_name(folder, tmp_path, monkeypatch):
    """Only readers of images counted, so labels of an own format came from the old reader."""
    (tmp_path / "own_reader.py").write_text("def read(path):\n    raise NotImplementedError\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    task = load_task(folder)
    task = replace(task, training=tuple({**case, "label": tmp_path / "a.own"} for case in task.training))
    (tmp_path / "a.own").write_bytes(b"voxels")
    with as_a_new_process():
        SUFFIXES.register(".own", importlib.import_module("own_reader").read)
        before = key_of(tmp_path, task)
        (tmp_path / "own_reader.py").write_text("def read(path):\n    return None\n", encoding="utf-8")
        assert key_of(tmp_path, task) != before


def test_a_mended_copy_of_a_table_keeps_its_folds(folder, tmp_path):
    """The copy is a folder in MSD's layout, which says no folds: nnU-Net's were made, in which other cases validate
    than in the table."""
    cases = load_task(folder).training
    (tmp_path / "table").mkdir()
    task = load_task(write_table(tmp_path / "table", cases))
    repaired = repair_task(check_task(task), tmp_path / "copy")
    assert read_splits(repaired.splits, [case["case"] for case in load_task(repaired.root).training]) == list(
        task.splits
    )
    assert f"the folds of the table are in {tmp_path / 'copy' / 'splits.json'}" in repaired.lines()[0]


def test_a_server_whose_certificate_is_not_trusted_is_asked_once(tmp_path, monkeypatch):
    """It was asked eight times, over two minutes."""
    fault = urllib.error.URLError(ssl.SSLCertVerificationError(1, "self-signed"))
    fault.reason.verify_message = "self-signed certificate"
    opener = mock.Mock(**{"open.side_effect": fault})
    monkeypatch.setattr(urllib.request, "build_opener", lambda *_: opener)
    with (
        (tmp_path / "part").open("w+b", buffering=0) as part,
        pytest.raises(DataError, match="not trusted: self-signed"),
    ):
        download("https://a.invalid/x.tar", part, tmp_path / "part", md5="0")
    assert opener.open.call_count == 1


def test_a_part_that_its_last_holder_removes_is_opened_again(tmp_path, monkeypatch):
    """The bytes went to a file without a name, and unpacking did not find them."""
    lock, path = fetching._lock, tmp_path / "x.part"

    def removing(part, of):
        monkeypatch.setattr(fetching, "_lock", lock)
        path.unlink()

    monkeypatch.setattr(fetching, "_lock", removing)
    with fetching._only_fetch(path) as part:
        part.write(b"1")
    assert path.read_bytes() == b"1"


def test_the_copy_of_a_large_source_counts_before_resampling(monkeypatch):
    """A volume of a coarser spacing is small, but its source is copied in float64."""
    monkeypatch.setattr(resampling, "ALWAYS_FITS", 1 << 20)
    monkeypatch.setattr(resampling, "available_bytes", lambda: 2 << 20)
    volume = MetaTensor(torch.zeros(1, 72, 72, 72), affine=torch.eye(4, dtype=torch.float64))
    with pytest.raises(GridError, match="GiB to resample"):
        resampling.Spacing(["image"], spacing=[4.0, 4.0, 4.0])({"image": volume})
