"""nnU-Net's cascade: from its two configs to predictions of both stages."""

import nibabel
import numpy as np
import pytest
import torch
from monai.data import MetaTensor

import volseg
from volseg.data.synthetic import make_task
from volseg.errors import ConfigError, DataError
from volseg.experiment import configure, cross_validate, export, load_config, predict, train
from volseg.planning.plan import name_first_stage, write_config
from volseg.transforms.augmentation.own import ChangedMasks, _dilate
from volseg.transforms.preprocessing import build_preprocessing

QUICK = [
    *("training.epochs=1", "training.iterations=2", "training.validate_every=null", "device=cpu", "split.num_folds=2"),
    *("inference.mirror=false", "inference.overlap=0", "evaluation.distances=false", "logging.loggers=[]"),
]
NARROW = "network={name: UNet, channels: [4, 8], strides: [2], num_res_units: 1}"


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    """Return data set, cross-validation of the first stage, and run of the second one."""
    folder = tmp_path_factory.mktemp("cascade")
    root = make_task(folder / "Task00_Synthetic", num_cases=4, num_test=1)
    planned = configure(root, preset="cascade", gpu_memory=0.01)
    file = write_config(planned, folder / "two.yaml")
    first, second = (
        load_config(path, [*QUICK, NARROW, f"output={folder / path.stem}"]) for path in (name_first_stage(file), file)
    )
    assert second.data.previous_stage.name == first.name
    second = load_config(file, [*QUICK, NARROW, f"output={folder / 'two'}", f"data.previous_stage={first.folder}"])
    with pytest.raises(DataError, match=r"lacks the validated label maps of 2 of 2 cases.*volseg cross-validate"):
        train(second)
    cross_validate(first)
    return root, first, train(second).folder


def test_the_first_stage_sees_a_quarter_of_a_case_or_more(stages):
    root, first, run = stages
    second = run.config()
    spacings = [
        next(step.spec()["spacing"] for step in of.preprocessing if step.name == "Spacing") for of in (first, second)
    ]
    assert all(low > fine for low, fine in zip(*spacings, strict=True))
    planned = configure(root, preset="cascade", gpu_memory=0.01)
    shares = [np.prod(of.geometry.patch) / np.prod(of.geometry.median_shape) for of in (planned, planned.first_stage)]
    assert shares[0] < 0.25 <= shares[1]
    with pytest.raises(ConfigError, match="nnU-Net plans no cascade"):
        configure(root, preset="cascade")


def test_a_prediction_runs_the_first_stage_by_itself(stages, tmp_path):
    root, first, run = stages
    [image] = sorted((root / "imagesTs").glob("*.nii.gz"))
    predict(run, image, tmp_path / "out").require_all()
    alone = predict(first.folder, image, tmp_path / "first", postprocessing=False)
    low, again = (nibabel.load(folder / image.name) for folder in (tmp_path / "out/previous_stage", alone.folder))
    assert np.array_equal(low.dataobj, again.dataobj)
    in_memory = volseg.load(run)(image).labels
    file, stale = tmp_path / "out" / image.name, tmp_path / "out/previous_stage" / image.name
    file.unlink()
    nibabel.save(nibabel.Nifti1Image(np.zeros(low.shape, np.uint8), low.affine), stale)  # as of another image
    predict(run, image, tmp_path / "out", skip_existing=True).require_all()
    assert stale.read_bytes() == alone.label_maps[stale.name.split(".")[0]].read_bytes()
    written = np.asarray(nibabel.load(file).dataobj)
    assert np.array_equal(in_memory.as_tensor()[0].numpy(), written)
    assert volseg.validate(run, output=tmp_path / "validated").score >= 0


def test_the_second_network_depends_on_the_first_stage(stages):
    _, _, run = stages
    model = volseg.load(run)
    network = model._trained.models[0]
    image = torch.randn(1, 1 + len(model.task.stage_labels), 16, 16, 16)
    other = image.clone()
    other[:, -1] += 1
    assert not torch.equal(network(image), network(other))


def test_a_cascade_is_not_exported(stages, tmp_path):
    for kind, name in (("archive", "model.zip"), ("torchscript", "model.pt")):
        with pytest.raises(ConfigError, match="a cascade cannot be exported"):
            export(stages[2].path, tmp_path / name, to=kind)


def test_masks_lie_where_the_label_map_does():
    """On a grid with exchanged and rotated axes, another spacing and another origin."""
    affine = np.diag([2.0, 2.0, 2.0, 1.0])
    image = MetaTensor(torch.zeros(1, 6, 5, 4), affine=torch.tensor(affine))
    turned = np.array([[0, 0, -1.0, 10], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 1]])  # 1 mm, from 0 to 10 mm
    label = torch.zeros(1, 9, 7, 11)
    label[0, 4, 2, 6] = 7  # at 4, 4, 2 mm
    steps = build_preprocessing([{"name": "PreviousStage", "labels": [3, 7]}])
    joined = steps({"case": "a", "image": image, "stage": MetaTensor(label, affine=torch.tensor(turned))})["image"]
    assert joined.shape == (3, 6, 5, 4)
    assert joined.as_tensor().nonzero().tolist() == [[2, 2, 2, 1]]


def test_masks_lie_where_the_label_map_of_a_tilted_gantry_does():
    """Spacing straightens the image; its masks were read along single axes, many voxels away."""
    affine = torch.eye(4, dtype=torch.float64)
    affine[1, 2] = 0.4
    label = MetaTensor(torch.zeros(1, 8, 16, 16), affine=affine)
    label[:, 2:6, 4:10] = 7
    steps = build_preprocessing([{"name": "Spacing", "spacing": [1, 1, 1]}, {"name": "PreviousStage", "labels": [7]}])
    image, mask = steps({"case": "a", "image": label, "stage": label})["image"].as_tensor()
    assert torch.equal(image > 3.5, mask > 0)


def test_masks_are_the_same_whatever_float32_made_of_the_affine():
    """As in the label map's file: of equally near voxels, a fifth were others than in memory."""
    rows = [[0.36, 0.48, -0.8, 50.1], [-0.8, 0.6, 0, -70.3], [0.48, 0.64, 0.6, 9.7], [0, 0, 0, 1]]
    turned = torch.tensor(rows, dtype=torch.float64)
    voxels = torch.randint(2, (1, 31, 31, 31), generator=torch.Generator().manual_seed(0)).float()
    exact, rounded = (MetaTensor(voxels, affine=affine) for affine in (turned, turned.float().double()))
    steps = build_preprocessing([{"name": "Spacing", "spacing": [1.5] * 3}, {"name": "PreviousStage", "labels": [1]}])
    first, second = (steps({"case": "a", "image": exact, "stage": of})["image"] for of in (exact, rounded))
    assert first.equal(second)


def test_masks_are_changed_as_often_as_nnunet_does_and_stay_masks():
    image = torch.zeros(3, 24, 24, 24)
    image[0] = torch.randn(24, 24, 24)
    image[1, 2:8, 2:8, 2:8] = image[1, 14:20, 14:20, 14:20] = image[2, 8:14, 2:8, 2:8] = 1
    label = torch.zeros(1, 24, 24, 24)
    change, generator = ChangedMasks(2), torch.Generator().manual_seed(0)
    made = [change(image, label, generator)[0] for _ in range(300)]
    assert all(torch.equal(one[0], image[0]) and set(one[1:].unique().tolist()) <= {0, 1} for one in made)
    assert all((one[1] + one[2]).max() <= 1 for one in made)
    share = sum(not torch.equal(one, image) for one in made) / 300
    assert abs(share - (1 - (1 - 0.4 * 0.75) * (1 - 0.2 * 0.75))) < 0.09  # as for both masks a half


def test_a_ball_is_what_dilation_adds_to_a_voxel():
    mask = torch.zeros(9, 9, 9, dtype=torch.bool)
    mask[0, 4, 4] = True
    squares = [(d**2 + (h - 4) ** 2 + (w - 4) ** 2) for d in range(9) for h in range(9) for w in range(9)]
    assert _dilate(mask, 3).flatten().tolist() == [square <= 9 for square in squares]
