"""The ten tasks' configs follow the rules, equal nnU-Net's plans, and run on their twins."""

import math
import re

import nibabel
import numpy as np
import pytest
from plan_msd import CONFIGS, TASKS, file_name, plan_task, write_task_config

from volseg import experiment
from volseg.checkpointing.folder import RunFolder
from volseg.config.catalogue import get_public_task
from volseg.data.layouts import load_task
from volseg.data.mock_msd import make_mock_task


def config_of(task, *overrides):
    return experiment.load_config(CONFIGS / file_name(task), overrides)


@pytest.mark.parametrize("task", TASKS)
def test_the_config_is_what_the_rules_make(task, tmp_path):
    """After a change of the rules: ``python datasets/plan_msd.py``."""
    made, committed = (
        re.sub(r"volseg [\d.]+\w*", "volseg", path.read_text(encoding="utf-8"))
        for path in (write_task_config(task, tmp_path), CONFIGS / file_name(task))
    )
    assert made == committed


def test_there_is_no_config_besides():
    assert sorted(path.name for path in CONFIGS.iterdir()) == sorted(map(file_name, TASKS))


@pytest.mark.parametrize("task", TASKS)
def test_the_plan_is_nnunets(task):
    theirs, config = get_public_task(task).manifest["nnunet"], config_of(task)
    [spacing] = [step.spec()["spacing"] for step in config.preprocessing if step.name == "Spacing"]
    assert spacing == pytest.approx(theirs["spacing"], rel=1e-5)  # six digits in both
    assert list(config.patch.size) == theirs["patch"]
    assert config.patch.batch == theirs["batch"]
    network = config.network.spec()
    assert [network[key] for key in ("strides", "kernel_size", "filters")] == [
        theirs[key] for key in ("strides", "kernels", "filters")
    ]
    [median] = {tuple(np.round(plan_task(task).geometry.median_shape))}
    assert list(median) == theirs["fingerprint"]["median_shape_resampled"]


def small(task, root, output):
    """Override the sizes that are slow on a CPU: patches and the network's width."""
    network = config_of(task).network.spec()
    patch = [math.prod(stride[axis] for stride in network["strides"]) for axis in range(3)]
    return [
        f"data.root={root}",
        f"output={output}",
        f"patch.size={patch}",
        f"inference.window={patch}",
        "inference.mirror=false",
        "inference.overlap=0",
        "patch.batch=1",
        f"network.filters={[2] * len(network['filters'])}",
        "training.epochs=1",
        "training.iterations=2",
        "split.num_folds=2",
    ]


UNLIKE = {"Task01_BrainTumour", "Task03_Liver", "Task05_Prostate", "Task08_HepaticVessel"}
"""Channels, voxels, numbers of labels and shapes of the others are like those of one of them."""


@pytest.mark.parametrize("task", [pytest.param(t, marks=() if t in UNLIKE else pytest.mark.slow) for t in TASKS])
def test_the_config_trains_validates_and_predicts_on_its_twin(task, tmp_path):
    """Of a training, a validation and a prediction."""
    root = make_mock_task(tmp_path / task, task, num_cases=2, num_test=1, scale=0.05)
    config = config_of(task, *small(task, root, tmp_path / "run"))
    outcome, twin = experiment.train(config), load_task(root)
    written = experiment.predict(RunFolder(config.folder), [root / "imagesTs"]).require_all()
    assert math.isfinite(outcome.history[-1].losses["loss"])
    assert set(outcome.validated.summary["mean"]) == {str(value) for value in twin.foreground}
    [(name, path)] = written.items()
    [image] = [case["image"] for case in twin.test if case["case"] == name]
    label_map = nibabel.load(path)
    assert label_map.shape == nibabel.load(image).shape[:3]
    assert set(np.unique(label_map.dataobj)) <= set(twin.labels)
