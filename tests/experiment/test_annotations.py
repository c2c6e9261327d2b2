"""A whole experiment on realistic labels: a tiny training, its scores and label maps, another validation."""

import json
import math
import shutil
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
from annotated_tasks import make_annotated_task

from volseg.data.case_store.preparing import prepare_together
from volseg.data.labels import num_indices
from volseg.data.layouts import load_task
from volseg.errors import ConfigError, DataError
from volseg.evaluation.summary import evaluate_files, read_structure, read_summary
from volseg.experiment import load_config, predict, train, validate
from volseg.experiment.building import build_batches, build_scoring, preprocessing_of

HEADS = {"regions": 2, "sparse": 3, "partial": 3, "gaps": 3}
KEYS = {"regions": ["(1, 4)", "4"], "sparse": ["1", "2"], "partial": ["1", "2"], "gaps": ["7", "500"]}
NAMES = {"regions": ["Whole", "Tail"]}
WRITTEN = {"regions": {0, 1, 4}, "sparse": {0, 1, 2}, "partial": {0, 1, 2}, "gaps": {0, 7, 500}}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Return the folder of six cases annotated in a way; the first is a healthy control."""
    made = {}

    def make(annotation):
        if annotation not in made:
            root = make_annotated_task(tmp_path_factory.mktemp(annotation) / "Task", annotation, num_cases=6)
            control = sorted((root / "labelsTr").glob("*.nii.gz"))[0]
            image = nibabel.load(control)
            nibabel.save(nibabel.Nifti1Image(np.zeros(image.shape, np.uint8), image.affine), control)
            made[annotation] = root
        return made[annotation]

    return make


def configured(config_file, root, *overrides):
    coarse = "preprocessing=[{name: Orientation}, {name: Spacing, spacing: [3, 3, 3]}, {name: ZScore}]"
    return load_config(config_file, [f"data.root={root}", coarse, "training.epochs=1", *overrides])


@pytest.mark.parametrize("annotation", WRITTEN)
def test_train_validate_and_predict(annotation, tasks, config_file, tmp_path):
    root = tasks(annotation)
    metric = "metrics=[{name: DiceMetric, output: further}]"
    network = "network={name: DynUNet, filters: [4, 8, 8], strides: [1, 2, 2], deep_supervision: true}"
    config = configured(config_file, root, metric, network, "inference.window=[8,16,16]", "inference.mirror=true")
    outcome = train(config)
    assert math.isfinite(outcome.history[-1].losses["loss"])
    task = outcome.folder.task()
    assert task.num_outputs == HEADS[annotation]
    names = NAMES.get(annotation, ["Anterior", "Posterior"])
    assert outcome.validated is not None
    measured = [f"{kind}/{name}" for kind in ("dice", "hd95", "assd", "volume_diff_ml", "undefined") for name in names]
    further = ["further", *(f"further/{name}" for name in names)]
    scores = [key for key in outcome.validated.scores if not key.startswith("undefined/further")]
    assert scores == [*measured, *further]
    report = (outcome.folder.path / "report.md").read_text(encoding="utf-8")
    assert all(f"| {name} " in report for name in names)

    summary = read_summary(outcome.folder.validation / "summary.json")
    assert list(summary["mean"]) == KEYS[annotation]
    cases = {case["case"]: case for case in load_task(root).training}
    for judged in summary["metric_per_case"]:
        case = cases[judged["prediction_file"].rpartition("/")[2].removesuffix(".nii.gz")]
        again = evaluate_files(
            judged["prediction_file"],
            case["label"],
            task.structures,
            ignore=task.ignore,
            values=task.class_values,
            labelled=case.get("labelled"),
            scoring=build_scoring(config, task),
        )
        for key, metrics in judged["metrics"].items():
            torch.testing.assert_close(metrics, again.metrics[read_structure(key)], equal_nan=True, rtol=0, atol=0)
        values = set(np.unique(nibabel.load(judged["prediction_file"]).get_fdata()).astype(int).tolist())
        assert values <= WRITTEN[annotation]

    repeated = validate(outcome.folder, overwrite=True)
    assert json.dumps(repeated.summary["mean"]) == json.dumps(outcome.validated.summary["mean"])
    written = predict(outcome.folder, [cases[summary_case(summary)]["image"]], tmp_path / "predictions").label_maps
    first = summary["metric_per_case"][0]["prediction_file"]
    assert [path.read_bytes() for path in written.values()] == [Path(first).read_bytes()]


@pytest.mark.parametrize("annotation", ["regions", "sparse", "partial"])
def test_a_loss_that_knows_nothing_of_it_is_refused_before_anything_is_read(annotation, tasks, config_file):
    config = configured(config_file, tasks(annotation), "losses=[{name: GeneralizedDiceFocalLoss}]")
    with pytest.raises(ConfigError, match="GeneralizedDiceFocalLoss does not support label maps with"):
        train(config)
    assert not config.folder.exists()


def test_what_label_maps_hold_stays_while_a_run_goes_on(tasks, config_file, tmp_path):
    root = tmp_path / "Task"
    shutil.copytree(tasks("regions"), root)
    config = configured(config_file, root)
    train(config)
    manifest = json.loads((root / "dataset.json").read_text(encoding="utf-8"))
    manifest["regions"] = {"Whole": ["Anterior", "Posterior"], "Head": ["Posterior"]}  # another name for the same
    (root / "dataset.json").write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(DataError, match="regions, in their order"):
        train(config.model_copy(update={"training": config.training.model_copy(update={"epochs": 2})}), resume=True)


def test_batches_of_any_annotation_hold_nothing_that_means_nothing(tasks, config_file):
    """Moved, scaled and cropped labels keep the task's numbers, and sparse ones contain annotated voxels."""
    for annotation in WRITTEN:
        config = configured(config_file, tasks(annotation), "patch.batch=4", "augmentation.rotation.probability=1.0")
        task = load_task(config.data.root)
        prepared = prepare_together(task.training, [], task, preprocessing_of(config))
        batch = next(build_batches(config, task, prepared.training, torch.device("cpu")).epoch(0))
        assert int(batch["label"].max()) < num_indices(task)
        if annotation == "sparse":
            ignored = batch["label"] == task.num_classes
            assert ignored.any()
            assert not ignored.flatten(1).all(1).any()


def summary_case(summary):
    return summary["metric_per_case"][0]["prediction_file"].rpartition("/")[2].removesuffix(".nii.gz")
