"""Cases that passed the check, or stopped it, and trained something else than was meant.

A header in micrometres trained on brains of one voxel, one in metres asked for 560 TB in the middle of the preparing;
files whose sform and qform mirror each other, and the same patient in training and validation, were not mentioned.
"""

import shutil

import nibabel
import numpy as np
import pytest
import torch
import yaml
from monai.data import MetaTensor

from volseg import experiment
from volseg.data import check_cases, inspect_cases, load_task, make_task, summarise_remarks
from volseg.data.case_store.preparing import prepare_together
from volseg.errors import DataError, GridError
from volseg.transforms.preprocessing import build_preprocessing


@pytest.fixture
def task(tmp_path):
    return load_task(make_task(tmp_path / "Task00_Made", num_cases=5, num_test=0))


@pytest.fixture
def preprocessing():
    return build_preprocessing([{"name": "Orientation"}, {"name": "ZScore"}])


def change(path, *, affine=None, voxels=None, qform=None):
    """Write a file again with another affine, other voxels or another qform."""
    image = nibabel.load(path)
    affine = image.affine if affine is None else affine
    changed = nibabel.Nifti1Image(np.asanyarray(image.dataobj) if voxels is None else voxels, affine)
    changed.header.set_xyzt_units("mm")
    changed.set_sform(affine, code=1)
    changed.set_qform(affine if qform is None else qform, code=1)
    nibabel.save(changed, path)


def scaled(affine, factor):
    return np.diag([factor, factor, factor, 1.0]) @ affine


@pytest.mark.parametrize(
    ("factor", "said"), [(1e-3, "0.00"), (1e3, "needed: sides of 0.01 to 50 mm"), (40, "less than")]
)
def test_a_wrong_unit_is_named_for_image_and_label(task, factor, said):
    for field in ("image", "label"):
        path = task.training[2][field]
        change(path, affine=scaled(nibabel.load(path).affine, factor))
    if factor == 40:  # sides of 40 mm may be, 5 m of them may not
        voxels = np.random.default_rng(0).integers(1, 3, (200, 8, 8)).astype(np.uint8)
        for field, held in (("image", 3 * voxels), ("label", voxels)):
            change(task.training[2][field], affine=np.diag([40.0, 40, 40, 1]), voxels=held)
    problems = check_cases(task.training, task)
    assert [(problem.case, problem.file) for problem in problems] == [
        (task.training[2]["case"], task.training[2][field]) for field in ("image", "label")
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


def test_sform_and_qform_that_mirror_each_other_are_told(task):
    for case in task.training[:2]:
        affine = nibabel.load(case["image"]).affine
        change(case["image"], qform=np.diag([-1.0, 1, 1, 1]) @ affine)
    shifted = nibabel.load(task.training[3]["image"]).affine.copy()
    shifted[:3, 3] += 0.5 * shifted[:3, 0]
    change(task.training[3]["image"], qform=shifted)
    found = inspect_cases(task.training, task)
    assert found.problems == []
    mirrored, apart = summarise_remarks(found.remarks)
    names = [case["case"] for case in task.training]
    assert mirrored.startswith("2 case(s): sform and qform mirror each other (left-right)")
    assert names[0] in mirrored
    assert names[1] in mirrored
    assert apart.startswith("1 case(s): sform and qform disagree")
    assert f"{names[3]} (up to 0.5" in apart


def test_a_rounded_qform_is_no_remark(task):
    affine = nibabel.load(task.training[0]["image"]).affine
    rounded = affine.copy()
    rounded[:3, 3] += 0.01
    change(task.training[0]["image"], qform=rounded)
    assert inspect_cases(task.training, task).remarks == []


def test_a_single_slice_is_told(task):
    voxels = np.random.default_rng(0).integers(1, 3, (8, 8, 1)).astype(np.uint8)
    for field, held in (("image", 3 * voxels), ("label", voxels)):
        change(task.training[1][field], affine=np.eye(4), voxels=held)
    [line] = summarise_remarks(inspect_cases(task.training, task).remarks)
    said = "the volume is a single slice; is a volume missing?"
    assert line == f"1 case(s): {said}: {task.training[1]['case']} ((8, 8, 1) voxels)"


def copy_image(task, source, target):
    """Store the voxels of a case under another name, and compressed otherwise."""
    for field in ("image", "label"):
        plain = task.training[target][field].with_suffix("")
        nibabel.save(nibabel.load(task.training[source][field]), plain)
        shutil.move(plain, task.training[target][field].with_name(plain.name))
        nibabel.save(nibabel.load(plain), task.training[target][field])
        plain.unlink()


def test_the_same_image_twice_is_told_whatever_it_is_called(task, preprocessing):
    copy_image(task, 0, 3)
    names = [case["case"] for case in task.training]
    [line] = summarise_remarks(inspect_cases(task.training, task).remarks)
    assert line.startswith("1 case(s): the same image stands under several names")
    assert line.endswith(f"{names[0]} (also {names[3]})")
    prepared = prepare_together(task.training[:4], task.training[4:], task, preprocessing)
    assert summarise_remarks(prepared.remarks) == [line]
    assert len(prepared.training) == 4


def test_the_same_image_in_training_and_validation_is_refused_or_left_out_of_training(task, preprocessing):
    copy_image(task, 0, 4)
    names = [case["case"] for case in task.training]
    with pytest.raises(DataError, match=rf"{names[0]}: .* holds the same voxels as the validation case {names[4]}"):
        prepare_together(task.training[:4], task.training[4:], task, preprocessing)
    prepared = prepare_together(task.training[:4], task.training[4:], task, preprocessing, skip_bad=True)
    assert [case["case"] for case in prepared.training] == names[1:4]
    assert [case["case"] for case in prepared.validation] == names[4:]
    assert [problem.case for problem in prepared.problems] == names[:1]


def test_a_run_goes_on_with_the_cases_it_was_begun_with(tmp_path):
    """A case that turned bad between two sittings was left out with one line in the log, and other batches trained."""
    root = make_task(tmp_path / "Task00_Made", num_cases=6, num_test=0)
    values = {
        "name": "tiny",
        "data": {"root": str(root), "skip_bad": True},
        "output": str(tmp_path / "run"),
        "split": {"num_folds": 3},
        "patch": {"size": [16, 16, 16]},
        "network": {"name": "UNet", "channels": [4, 8], "strides": [2]},
        "optimizer": {"name": "SGD", "lr": 0.01},
        "training": {"epochs": 1, "iterations": 1},
    }
    config = tmp_path / "tiny.yaml"
    config.write_text(yaml.safe_dump(values), encoding="utf-8")
    begun = experiment.train(experiment.load_config(config))
    trained = begun.folder.split().training
    file = root / "imagesTr" / f"{trained[0]}.nii.gz"
    sound = file.read_bytes()
    file.write_bytes(sound[:99])
    longer = experiment.load_config(config, ["training.epochs=2"])
    with pytest.raises(DataError, match=rf"other cases than it was begun with: {trained[0]} turned bad\. Restore"):
        experiment.train(longer, resume=True)
    file.write_bytes(sound)
    stored = nibabel.load(file)
    image = np.asarray(stored.dataobj)[::-1].copy()  # other voxels, under the same name
    nibabel.save(nibabel.Nifti1Image(image, stored.affine, stored.header), file)
    with pytest.raises(
        DataError, match=rf"other cases than it was begun with: {trained[0]} hold other voxels\. Restore"
    ):
        experiment.train(longer, resume=True)
    file.write_bytes(sound)
    label = root / "labelsTr" / file.name
    drawn = label.read_bytes()
    map_ = nibabel.load(label)
    voxels = np.asarray(map_.dataobj).copy()
    voxels[tuple(np.argwhere(voxels > 0)[0])] = 0
    nibabel.save(nibabel.Nifti1Image(voxels, map_.affine, map_.header), label)
    with pytest.raises(DataError, match=rf"{trained[0]} hold other voxels"):
        experiment.train(longer, resume=True)
    label.write_bytes(drawn)
    assert len(experiment.train(longer, resume=True).history) == 2

    other = experiment.load_config(config, [f"output={tmp_path / 'other'}"])
    file.write_bytes(sound[:99])
    experiment.train(other)
    again = experiment.load_config(config, [f"output={tmp_path / 'other'}", "training.epochs=2"])
    file.write_bytes(sound)
    with pytest.raises(DataError, match=rf"{trained[0]} were bad and are sound now"):
        experiment.train(again, resume=True)
    file.write_bytes(sound[:99])
    assert len(experiment.train(again, resume=True).history) == 2
    (tmp_path / "other" / "cases.json").write_text("[" * 100_000, encoding="utf-8")
    with pytest.raises(DataError, match=r"cases\.json cannot be read as JSON"):
        experiment.train(
            experiment.load_config(config, [f"output={tmp_path / 'other'}", "training.epochs=3"]), resume=True
        )
