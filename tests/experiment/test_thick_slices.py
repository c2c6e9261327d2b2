"""A data set of thick slices, from its plan by ``--preset vnet`` to a trained network."""

import nibabel
import numpy as np
import pytest
from torch import nn

from volseg import experiment
from volseg.data import load_task
from volseg.experiment import train
from volseg.experiment.prediction.sources import load_trained
from volseg.models import VNet
from volseg.planning import plan, take_fingerprint, write_config

QUICK = [
    *("training.epochs=1", "training.iterations=1", "patch.batch=2", "augmentation={margin: 0.0}"),
    *("inference.mirror=false", "evaluation.distances=false", "logging.loggers=[]"),
]


def run_on(folder, depth, preset):
    """Return the folder of a training on three cases of some slices."""
    root = folder / "Task99_Thick"
    for kind in ("imagesTr", "labelsTr"):
        (root / kind).mkdir(parents=True)
    affine = np.diag([1.5, 1.5, 10.0, 1.0])
    for number in range(3):
        draw = np.random.default_rng(number)
        image = draw.normal(100, 10, (28, 20, depth)).astype(np.float32)
        label = np.zeros(image.shape, np.uint8)
        label[8:20, 5:15, depth // 4 : depth - depth // 4] = 1
        nibabel.save(nibabel.Nifti1Image(image + 50 * label, affine), root / "imagesTr" / f"case_{number}.nii.gz")
        nibabel.save(nibabel.Nifti1Image(label, affine), root / "labelsTr" / f"case_{number}.nii.gz")
    (root / "dataset.json").write_text(
        '{"name": "Thick", "modality": {"0": "MRI"}, "labels": {"0": "background", "1": "heart"}, "training": ['
        + ", ".join(
            f'{{"image": "./imagesTr/case_{number}.nii.gz", "label": "./labelsTr/case_{number}.nii.gz"}}'
            for number in range(3)
        )
        + '], "test": [], "numTraining": 3, "numTest": 0, "tensorImageSize": "3D"}',
        encoding="utf-8",
    )
    planned = plan(take_fingerprint(load_task(root)).fingerprint, preset, root=root)
    config = experiment.load_config(write_config(planned, folder / "thick.yaml"), [*QUICK, f"output={folder / 'run'}"])
    return train(config).folder.path


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return the folder of a training on three cases of nine slices."""
    return run_on(tmp_path_factory.mktemp("thick"), 9, "vnet")


@pytest.mark.parametrize("preset", ["unet", "resenc", "vnet"])
def test_no_kernel_reads_beyond_a_single_slice(tmp_path, preset):
    folder = run_on(tmp_path, 1, preset)
    [network] = load_trained(folder).models
    kernels = {module.kernel_size[2] for module in network.modules() if isinstance(module, nn.Conv3d)}
    assert kernels == {1}
    config = experiment.load_config(folder / "config.yaml")
    assert config.patch.size[2] == 1
    [case, *_] = sorted(folder.parent.glob("*/imagesTr/*.nii.gz"))
    predicted = experiment.predict(folder, case, tmp_path / "out").require_all()
    assert nibabel.load(tmp_path / "out" / case.name).shape == (28, 20, 1), predicted


def test_its_network_is_flat_and_its_patch_as_thick_as_a_case(run):
    trained = load_trained(run)
    [network] = trained.models
    net = getattr(network, "net", network)
    assert isinstance(net, VNet)
    assert net.strides == ((1, 1, 1), (2, 2, 1), (2, 2, 1), (2, 2, 2), (2, 2, 1))
    assert net.kernels == ((5, 5, 1), (5, 5, 1), (5, 5, 5), (5, 5, 5), (5, 5, 5))
    assert experiment.load_config(run / "config.yaml").patch.size == (32, 32, 10)
