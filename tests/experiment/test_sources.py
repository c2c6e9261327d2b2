"""What can be predicted with: a run, the finished folds of a cross-validation, several runs; and what cannot."""

import json
import logging
import shutil

import pytest
import torch

from volseg.errors import CheckpointError, ConfigError
from volseg.experiment import RunFolder
from volseg.experiment.prediction.sources import load_trained
from volseg.workflow import load_checkpoint


@pytest.fixture
def folds(cross_validated):
    """Return the folders of three runs; they may not be changed."""
    return [cross_validated / f"fold_{number}" for number in range(3)]


@pytest.fixture
def changed(folds, tmp_path):
    """Return a copy of the first run whose file holds another text."""

    def change(name, before, after):
        copy = tmp_path / "changed"
        shutil.copytree(folds[0], copy)
        text = (copy / name).read_text(encoding="utf-8")
        assert before in text
        (copy / name).write_text(text.replace(before, after), encoding="utf-8")
        return copy

    return change


def parameters(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_a_cross_validation_is_an_ensemble_of_its_folds(cross_validated, folds, caplog):
    with caplog.at_level(logging.INFO):
        trained = load_trained(cross_validated)
    assert f"{cross_validated}: fold(s) 0, 1, 2 of 3 together" in caplog.text
    assert trained.source == cross_validated
    alone = [load_trained(RunFolder(fold)) for fold in folds]
    for one, of_fold in zip(trained.models, alone, strict=True):
        torch.testing.assert_close(parameters(one), parameters(of_fold.models[0]), rtol=0, atol=0)
    assert len({trained.weights, *(one.weights for one in alone)}) == 4


def test_several_runs_are_an_ensemble_too(cross_validated, folds):
    joined = load_trained([str(folds[0]), folds[1], RunFolder(folds[2])])
    assert joined.weights == load_trained(cross_validated).weights
    assert load_trained(folds[:2]).weights != load_trained(folds[1::-1]).weights


def test_a_fold_that_is_not_finished_is_left_out_and_named(cross_validated, tmp_path, caplog):
    copy = shutil.copytree(cross_validated, tmp_path / "cv")
    (copy / "fold_1" / "validation" / "summary.json").unlink()
    assert len(load_trained(copy).models) == 2

    assert "begun and not finished: fold(s) 1" in caplog.text
    config = copy / "fold_2" / "config.yaml"
    config.write_text(config.read_text(encoding="utf-8").replace("epochs: 1", "epochs: 2"), encoding="utf-8")
    (copy / "fold_0" / "checkpoints" / "latest.pt").write_bytes(b"damaged")
    with pytest.raises(ConfigError, match=r"no fold of .*cv is finished \(begun: 0, 1, 2\); go on with them by volseg"):
        load_trained(copy)


def test_the_checkpoint_and_the_settings_hold_for_all(cross_validated, folds):
    best = load_trained(cross_validated, "best", ["inference.mirror=true", "training.precision=fp32"])
    assert best.config.inference.mirror
    assert best.config.training.precision == "fp32"
    state = load_checkpoint(folds[1] / "checkpoints" / "best.pt")
    assert state.progress == (1, 0)
    with pytest.raises(ConfigError, match="checkpoint must be one of latest, best, previous, got 'final'"):
        load_trained(cross_validated, "final")
    with pytest.raises(CheckpointError, match=r"no checkpoint at .*previous\.pt.*by --checkpoint best"):
        load_trained(cross_validated, "previous")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("network.channels=[4]", r"--set network\.channels=\[4\]: network is as it was trained with\. What may be set"),
        ("preprocessing=[]", "preprocessing is as it was trained with"),
        ("training.epochs=3", r"inference\.KEY, device, parallel\.KEY, training\.precision"),
        ("infrence.mirror=true", "unknown key; did you mean 'inference'"),
        ("inference.miror=true", "did you mean 'mirror'"),
        ("inference.overlap=2", "less than 1"),
        ("device", "takes key=value"),
    ],
)
def test_what_the_training_settled_cannot_be_set(folds, override, message):
    with pytest.raises(ConfigError, match=message):
        load_trained(folds[0], overrides=[override])


@pytest.mark.parametrize(
    ("file", "before", "after", "message"),
    [
        ("task.json", '"Anterior"', '"Front"', r"for they differ in labels \("),
        ("config.yaml", "- 1.5", "- 2.0", r"they differ in preprocessing \("),
        ("config.yaml", "mirror: false", "mirror: true", r"they differ in inference \(.*can be set for all by --set"),
    ],
)
def test_runs_that_do_not_go_together_say_in_what(folds, changed, file, before, after, message):
    other = changed(file, before, after)
    with pytest.raises(ConfigError, match=message):
        load_trained([folds[1], other])
    if before == "mirror: false":
        assert len(load_trained([folds[1], other], overrides=["inference.mirror=true"]).models) == 2


def test_regions_in_another_order_are_other_outputs(folds, tmp_path):
    """Their probabilities were averaged, of one region with those of another: equal dicts have any order."""
    runs, values = [], {"whole": [1, 2], "front": [1], "back": [2]}  # three, as the network has outputs
    for number, order in enumerate([("whole", "front", "back"), ("whole", "back", "front")]):
        runs.append(shutil.copytree(folds[0], tmp_path / str(number)))
        task = json.loads((runs[-1] / "task.json").read_text(encoding="utf-8"))
        task["regions"] = {name: values[name] for name in order}
        (runs[-1] / "task.json").write_text(json.dumps(task), encoding="utf-8")
    load_trained(runs[0])
    with pytest.raises(ConfigError, match="they differ in regions, in their order"):
        load_trained(runs)


def test_what_is_none_of_them_is_told_with_what_was_found(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "todo.txt").write_text("train", encoding="utf-8")
    (tmp_path / "empty").mkdir()
    model = tmp_path / "Dataset004_Hippocampus" / "nnUNetTrainer__nnUNetPlans__3d_fullres"
    (model / "fold_0").mkdir(parents=True)
    for name in ("plans.json", "dataset.json"):
        (model / name).write_text("{}", encoding="utf-8")
    for source, message in (
        (tmp_path / "gone", r"gone does not exist; name a run folder"),
        (tmp_path / "notes" / "todo.txt", r"todo\.txt is a file; name a run folder"),
        (tmp_path / "notes", r"it has no config\.yaml; and no cross-validation: .* it holds todo\.txt"),
        (model.parent, f"above nnU-Net 2's model folders; name one of them, such as {model}$"),
        (tmp_path / "empty", r"it is empty; name a run folder"),
        ([], "got none"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_trained(source)
