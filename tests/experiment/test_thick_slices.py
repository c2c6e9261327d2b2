"""A data set of few slices, from its plan to a trained network that predicts."""

import json

import nibabel
import numpy as np
import pytest
from torch import nn

from volseg import experiment
from volseg.data import load_task
from volseg.experiment.prediction.sources import load_trained
from volseg.planning.fingerprint import take_fingerprint
from volseg.planning.plan import plan, write_config

QUICK = [
    *("training.epochs=1", "training.iterations=1", "patch.batch=2", "augmentation={margin: 0.0}"),
    *("inference.mirror=false", "evaluation.distances=false", "logging.loggers=[]"),
]


@pytest.mark.parametrize(("depth", "preset"), [(1, "unet"), (1, "resenc"), (1, "vnet"), (9, "vnet")])
def test_no_kernel_reads_beyond_a_single_slice_and_a_patch_is_as_thick_as_a_case(tmp_path, depth, preset):
    root = tmp_path / "Task99_Thick"
    cases = []
    for number in range(3):
        cases.append({kind: f"./{kind}sTr/case_{number}.nii.gz" for kind in ("image", "label")})
        image = np.random.default_rng(number).normal(100, 10, (28, 20, depth)).astype(np.float32)
        label = np.zeros(image.shape, np.uint8)
        label[8:20, 5:15, depth // 4 : depth - depth // 4] = 1
        for kind, voxels in (("image", image + 50 * label), ("label", label)):
            (root / f"{kind}sTr").mkdir(parents=True, exist_ok=True)
            nibabel.save(nibabel.Nifti1Image(voxels, np.diag([1.5, 1.5, 10.0, 1.0])), root / cases[-1][kind])
    told = {"name": "Thick", "modality": {"0": "MRI"}, "labels": {"0": "background", "1": "heart"}, "training": cases}
    (root / "dataset.json").write_text(json.dumps(told), encoding="utf-8")
    planned = plan(take_fingerprint(load_task(root)).fingerprint, preset, root=root)
    file = write_config(planned, tmp_path / "thick.yaml")
    folder = experiment.train(experiment.load_config(file, [*QUICK, f"output={tmp_path / 'run'}"])).folder.path

    [network] = load_trained(folder).models
    kernels = {module.kernel_size[2] for module in network.modules() if isinstance(module, nn.Conv3d)}
    assert max(kernels) == (1 if depth == 1 else 5)
    assert experiment.load_config(folder / "config.yaml").patch.size[2] == (1 if depth == 1 else 10)
    predicted = experiment.predict(folder, root / cases[0]["image"], tmp_path / "out").require_all()
    assert nibabel.load(tmp_path / "out" / "case_0.nii.gz").shape == (28, 20, depth), predicted
