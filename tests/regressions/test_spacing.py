"""The spacing after preprocessing reached neither the network's plan nor the augmentation: every voxel was a cube."""

import json

import nibabel
import numpy as np
import pytest
import torch
from tiny_trainings import config_factory

from volseg import experiment
from volseg.checkpointing.folder import RunFolder
from volseg.data.synthetic import make_task
from volseg.errors import DataError
from volseg.experiment import building, training
from volseg.experiment.network_plan import NetworkPlan
from volseg.experiment.prediction.trained import open_run
from volseg.models import build_network
from volseg.transforms.augmentation import BatchAugmentation
from volseg.transforms.augmentation.spatial import voxel_steps

THICK = (
    "preprocessing=[{name: Orientation}, {name: Spacing, spacing: [2, 2, 4]}, {name: ZScore}]",
    *("patch={size: [16, 16, 8], batch: 1}", "network={name: DynUNet, filters: [2, 2, 2]}"),
    *("augmentation.enabled=true", "split.validation=fold", "training.iterations=1"),
)
WITHOUT = "preprocessing=[{name: Orientation}, {name: ZScore}]"


@pytest.fixture
def config(tmp_path):
    make = config_factory(tmp_path)
    return lambda *overrides: make(tmp_path / "run", *THICK, *overrides)


@pytest.fixture
def augmentations(monkeypatch):
    """Return the list of augmentations that trainings make."""
    made = []
    monkeypatch.setattr(building, "BatchAugmentation", noting(made))
    return made


def noting(made):
    class Noted(BatchAugmentation):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self)

    return Noted


def test_prostate_is_planned_as_nnunet_plans_it():
    """320 x 256 x 20 at 0.62 / 0.62 / 3.6 mm got kernels 3, 3, 3 and strides 2, 2, 2."""
    spec, sizes = {"name": "DynUNet", "filters": [2] * 7}, {"patch_size": (320, 256, 20), "spacing": (0.62, 0.62, 3.6)}
    network = build_network(spec, in_channels=2, out_channels=3, **sizes)
    assert list(network.kernel_size[:3]) == [(3, 3, 1), (3, 3, 1), (3, 3, 3)]
    assert list(network.strides[:4]) == [(1, 1, 1), (2, 2, 1), (2, 2, 1), (2, 2, 2)]


def test_the_spacing_step_reaches_network_and_augmentation(config, augmentations):
    experiment.train(config())
    assert [augmentation.spacing for augmentation in augmentations] == [(2.0, 2.0, 4.0)]
    written = json.loads((config().folder / "network.json").read_text(encoding="utf-8"))
    assert written["spacing"] == [2, 2, 4]
    assert written["network"]["kernel_size"][0] == [3, 3, 1]
    trained = open_run(RunFolder(config().folder)).build()
    assert list(trained.models[0].net.kernel_size[0]) == [3, 3, 1]


def test_thick_slices_are_not_sheared(config, augmentations):
    """A turn about H by 30 degrees on 2 x 2 x 4 mm: lengths in mm stay what they were."""
    experiment.train(config())
    [augmentation] = augmentations
    parameters = augmentation.sample(1, torch.Generator().manual_seed(0))
    parameters.rotation.copy_(torch.tensor([[0.0, torch.pi / 6, 0.0]]))
    parameters.scale.fill_(1)
    # What the plain and the fused reading go by.
    columns, _ = voxel_steps(parameters, augmentation.patch_size, augmentation.spacing)
    mm = columns[0] * torch.tensor([2.0, 2.0, 4.0])
    lengths = mm @ mm.T
    torch.testing.assert_close(lengths, torch.diag(torch.tensor([4.0, 4.0, 16.0])))


def test_without_a_spacing_step_the_datas_median_is_taken_and_kept(config, augmentations, tmp_path):
    """The cases' own sides after orientation; they stand in the run folder, so that other data change nothing."""
    stretched = tmp_path / "Task00_Stretched"
    make_task(stretched, num_cases=4, num_test=0)
    for path in stretched.glob("*/*.nii.gz"):
        image = nibabel.load(path)
        affine = np.diag([1, 1, 3, 1]) @ image.affine  # thick towards the head, whichever voxel axis points there
        nibabel.save(nibabel.Nifti1Image(np.asarray(image.dataobj), affine), path)
    overrides = [f"data.root={stretched}", WITHOUT]
    experiment.train(config(*overrides))
    plan = RunFolder(config().folder).plan()
    assert augmentations[0].spacing == plan.spacing
    d, h, w = plan.spacing
    assert w > 2 * max(d, h)
    assert plan.network["kernel_size"][0] == [3, 3, 1]
    for path in stretched.glob("*/*.nii.gz"):  # the folder, not the data, says which network was trained
        path.unlink()
    assert open_run(RunFolder(config().folder)).build().models[0].net.kernel_size[0] == [3, 3, 1]


def test_resuming_takes_the_plan_of_the_run_folder(config, augmentations):
    experiment.train(config())
    file = config().folder / "network.json"
    plan = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**plan, "spacing": [2, 2, 5]}), encoding="utf-8")
    experiment.train(config("training.epochs=2"), resume=True)
    assert [augmentation.spacing for augmentation in augmentations] == [(2, 2, 4), (2, 2, 5)]


def test_a_run_of_before_keeps_its_network(config, augmentations, monkeypatch):
    """Its folder has no network.json; its network and its batches were made as if voxels were cubes."""
    monkeypatch.setattr(training, "plan_network", lambda *_: NetworkPlan())  # what there was
    experiment.train(config())
    (config().folder / "network.json").unlink()
    monkeypatch.undo()
    monkeypatch.setattr(building, "BatchAugmentation", noting(augmentations))
    assert open_run(RunFolder(config().folder)).build().models[0].net.kernel_size[0] == (3, 3, 3)
    experiment.train(config("training.epochs=2"), resume=True)
    assert [augmentation.spacing for augmentation in augmentations] == [(1, 1, 1), (1, 1, 1)]


def test_a_plan_that_is_none_is_refused(config):
    experiment.train(config())
    (config().folder / "network.json").write_text('{"spacing": [1, 0, 1], "network": {}}', encoding="utf-8")
    with pytest.raises(DataError, match=r"network\.json should hold the spacing"):
        open_run(RunFolder(config().folder)).build()


def test_cases_that_the_plan_does_not_fit_are_remarked_on(config, tmp_path, caplog):
    odd = make_task(tmp_path / "Task00_Odd", num_cases=4, num_test=0)
    for part in ("imagesTr", "labelsTr"):
        image = nibabel.load(odd / part / "synthetic_002.nii.gz")
        affine = image.affine @ np.diag([1, 5, 1, 1])
        nibabel.save(nibabel.Nifti1Image(np.asarray(image.dataobj), affine), odd / part / "synthetic_002.nii.gz")
    experiment.train(config(f"data.root={odd}", WITHOUT))
    assert "1 of 4 cases differ from the median" in caplog.text
    assert "first synthetic_002" in caplog.text


def test_cases_without_any_readable_header_stop_the_plan(config, tmp_path):
    empty = make_task(tmp_path / "Task00_Empty", num_cases=4, num_test=0)
    for path in (empty / "imagesTr").iterdir():
        path.write_bytes(b"")
    with pytest.raises(DataError, match="voxel sides could be read"):
        experiment.train(config(f"data.root={empty}", WITHOUT))
