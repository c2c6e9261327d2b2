"""Folds are ordinary runs, the summary repeats their scores, and nothing is trained twice."""

import json
import math
import os
import shutil

import numpy as np
import pytest
import torch
from ready_python import acting_when
from training_hooks import At, press_ctrl_c
from typer.testing import CliRunner

from tests.experiment.conftest import latest
from volseg.cli import app
from volseg.data.layouts import load_task
from volseg.errors import ConfigError, DataError, NonFiniteLossError
from volseg.evaluation.intervals import mean_intervals
from volseg.evaluation.summary import read_summary, write_summary
from volseg.experiment import RunFolder, cross_validate, cross_validation, launching, train
from volseg.experiment.launching import choose_gpus
from volseg.experiment.several_runs import plan_folds
from volseg.reporting import write_brief

pytestmark = pytest.mark.usefixtures("ready_python")

SHORT = ("training.epochs=1", "training.iterations=1")
"""As in the cross-validation that the tests share."""


@pytest.fixture
def quick(configured):
    """Return a config whose folds train in less than a second."""
    return lambda *overrides: configured(*SHORT, *overrides)


@pytest.fixture
def planned(quick, task):
    """Return the folds of the quick config."""
    return lambda *overrides: plan_folds(quick(*overrides), load_task(task))


@pytest.fixture
def finished(cross_validated, planned):
    """Return a function from numbers of folds to finished folds, copied to the quick config's output."""

    def copy(*numbers):
        folds = [planned()[number] for number in numbers]
        for fold in folds:
            shutil.copytree(cross_validated / f"fold_{fold.number}", fold.folder.path)
        return [fold.folder for fold in folds]

    return copy


def test_every_case_is_predicted_once_and_gathered(cross_validated, task):
    folder = cross_validated
    ids = [case["case"] for case in load_task(task).training]
    gathered = read_summary(folder / "summary.json")
    files = [case["prediction_file"] for case in gathered["metric_per_case"]]
    assert [os.path.basename(file) for file in files] == [f"{name}.nii.gz" for name in ids]
    assert all(os.path.exists(file) for file in files)

    of_folds = [read_summary(folder / f"fold_{k}" / "validation" / "summary.json") for k in range(3)]
    dice = {
        case["prediction_file"]: [case["metrics"][label]["Dice"] for label in "12"]
        for summary in of_folds
        for case in summary["metric_per_case"]
    }
    assert len(dice) == len(ids)
    table = np.array([dice[file] for file in files])
    labels, overall = mean_intervals(table)
    written = json.loads((folder / "cross_validation.json").read_text(encoding="utf-8"))
    assert list(written["labels"]) == ["Anterior", "Posterior", "mean"]
    for name, interval in zip(written["labels"], [*labels, overall], strict=True):
        result = written["labels"][name]
        assert (result["mean"], result["std"]) == pytest.approx((interval.mean, interval.std))
        assert (result["low"], result["high"]) == (interval.low, interval.high)
    assert written["labels"]["Anterior"]["of_folds"] == [summary["mean"]["1"]["Dice"] for summary in of_folds]
    for label, name in (("1", "Anterior"), ("2", "Posterior")):
        for metric in ("Dice", "HD95", "volume_diff_ml"):
            found = written["scores"][name][metric]
            assert found["of_folds"] == [
                None if math.isnan(value) else value for value in (one["mean"][label][metric] for one in of_folds)
            ]
            assert {"mean", "median"} <= found.keys()
    assert written["scores"]["Anterior"]["Dice"]["low"] == written["labels"]["Anterior"]["low"]
    mean = sum(summary["foreground_mean"]["Dice"] for summary in of_folds) / 3
    assert written["labels"]["mean"]["mean_of_folds"] == pytest.approx(mean)
    assert written["mean_dice"] == pytest.approx(gathered["foreground_mean"]["Dice"])
    assert all(fold["seconds"] > fold["seconds_training"] > 0 for fold in written["folds"])
    assert written["config"]["training"]["iterations"] == 1
    assert written["environment"]["libraries"]["torch"] == torch.__version__
    assert (folder / "report.md").read_text(encoding="utf-8") == write_brief(folder)


def test_a_fold_is_the_run_that_train_makes(quick, cross_validated, tmp_path):
    alone = train(quick("split.fold=1", f"output={tmp_path / 'alone'}"))
    fold = RunFolder(cross_validated / "fold_1")
    assert fold.split() == alone.folder.split()
    torch.testing.assert_close(latest(fold.path).model, latest(alone.folder.path).model, rtol=0, atol=0)
    assert read_summary(fold.validation / "summary.json")["mean"] == alone.validated.summary["mean"]


def test_finished_folds_are_kept_and_the_rest_joins_them(quick, finished, tmp_path, caplog):
    [kept] = finished(2)
    checkpoint = kept.checkpoints / "latest.pt"
    written_at = checkpoint.stat().st_mtime_ns
    assert [fold.number for fold in cross_validate(quick(), folds=[2]).folds] == [2]
    assert "only fold(s) 2 of 3 are finished." in (tmp_path / "run" / "report.md").read_text(encoding="utf-8")
    caplog.set_level("INFO")
    second = cross_validate(quick("data.keep=memory"), folds=[2, 0])  # where the data lie is no other experiment
    assert "fold 2 is already finished" in caplog.text
    assert [fold.number for fold in second.folds] == [0, 2]
    assert checkpoint.stat().st_mtime_ns == written_at


def test_a_fold_that_another_machine_finishes_meanwhile_is_in_the_table(quick, finished, monkeypatch):
    monkeypatch.setattr(cross_validation, "train", lambda *given, **options: (finished(1), train(*given, **options)))
    crossed = cross_validate(quick(), folds=[0])
    assert [fold.number for fold in crossed.folds] == [0, 1]  # once the last machine's folds alone


def test_a_fold_that_was_begun_goes_on_only_when_asked(quick, planned, tmp_path):
    fold = planned("training.epochs=2")[1]
    with pytest.raises(KeyboardInterrupt):
        train(fold.config, hooks=[At(1, 1, press_ctrl_c)])
    config = quick("training.epochs=2")
    with pytest.raises(ConfigError, match=r"fold_1 was started but not finished; continue with --resume"):
        cross_validate(config)
    assert not (tmp_path / "run" / "fold_0").exists()  # refused before anything is trained
    crossed = cross_validate(config, folds=[1], resume=True)
    assert [record.epoch for record in crossed.folds[0].history] == [0, 1]


@pytest.fixture
def begun(planned, task):
    """Return the first fold, started but without a checkpoint."""
    fold = planned()[0]
    fold.folder.begin(fold.config, load_task(task), fold.split, {"environment.json": {}})
    return fold


def test_a_fold_without_a_checkpoint_begins_anew(begun, quick):
    assert [f.number for f in cross_validate(quick(), folds=[0], resume=True).folds] == [0]


@pytest.mark.usefixtures("begun")
def test_the_same_data_by_another_path_are_the_same(quick, task, monkeypatch):
    monkeypatch.chdir(task.parent)
    plan_folds(quick(f"data.root={task.name}"), load_task(task))[0].require_same()


@pytest.mark.usefixtures("begun")
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.lr=0.5", r"fold_0 was started with another config: optimizer\.lr: 0\.01 -> 0\.5"),
        # `train --resume` may extend a run; folds of different lengths are no cross-validation.
        ("training.epochs=2", r"fold_0 was started with another config: training\.epochs: 1 -> 2"),
    ],
)
def test_folds_of_another_config_are_refused(override, message, planned, quick):
    with pytest.raises(ConfigError, match=message):
        cross_validate(quick(override), folds=[1], resume=True)
    assert not planned()[1].folder.path.exists()


def test_folds_of_other_cases_are_refused(planned, quick, task, tmp_path):
    fold = planned()[0]
    fold.folder.begin(fold.config, load_task(task), planned()[1].split, {"environment.json": {}})
    with pytest.raises(DataError, match=r"the cases no longer match .*fold_0/split\.json"):
        cross_validate(quick())


def test_a_fold_that_was_trained_on_is_refused(finished, quick):
    [fold] = finished(0)
    train(quick("training.epochs=2", f"output={fold.path}"), resume=True)
    with pytest.raises(ConfigError, match=r"fold_0 was started with another config: training\.epochs: 2 -> 1"):
        cross_validate(quick(), folds=[0])


def test_a_fold_that_patience_ended_is_finished(planned):
    """A score that is no number ends no patience."""
    # No learning: no validation is better than the first.
    fold = planned("training.epochs=9", "training.patience=2", "optimizer.lr=0", "training.ema=null")[0]
    train(fold.config)
    result = fold.result()
    assert result is not None
    assert len(result.history) == 3
    checkpoint = fold.folder.checkpoints / "latest.pt"
    for scores, is_finished in (((math.nan, 0.5, 0.4), False), ((0.5, math.nan, math.nan), True)):
        content = torch.load(checkpoint, weights_only=True)
        for record, score in zip(content["history"], scores, strict=True):
            record["score"] = score
        torch.save(content, checkpoint)
        assert (fold.result() is not None) == is_finished


def test_a_summary_of_other_cases_is_refused_and_a_label_that_is_nowhere_is_null_in_json(finished, quick):
    [fold] = finished(0)
    file = fold.validation / "summary.json"
    summary = read_summary(file)
    for of in (*(case["metrics"] for case in summary["metric_per_case"]), summary["mean"]):
        of["2"]["Dice"] = math.nan
    write_summary(summary, file)
    text = (cross_validate(quick(), folds=[0]).folder / "cross_validation.json").read_text(encoding="utf-8")
    assert "NaN" not in text
    assert json.loads(text)["labels"]["Posterior"]["low"] is None
    name = os.path.basename(summary["metric_per_case"].pop()["prediction_file"]).removesuffix(".nii.gz")
    write_summary(summary, file)
    with pytest.raises(DataError, match=rf"has 1 cases, but fold 0 validates 2; .* is {name}\. Write it again"):
        cross_validate(quick(), folds=[0])


@pytest.mark.parametrize(
    ("overrides", "options", "message"),
    [
        (["split.validation=none"], {}, "needs cases to validate on, but split.validation is none"),
        ([], {"folds": [0, 3]}, "the split has folds 0 to 2, got 3"),
        (["network.name=UNett"], {}, "did you mean 'UNet'"),
        (["parallel={strategy: spatial, devices: 2}"], {"gpus": 2}, "processes on one GPU each, but .* is spatial"),
        (["device=cuda"], {"gpus": 999}, "--gpus 999 (asks for more than the|needs GPUs)"),
    ],
)
def test_what_cannot_be_cross_validated_is_refused(quick, tmp_path, overrides, options, message):
    with pytest.raises(ConfigError, match=message):
        cross_validate(quick(*overrides), **options)
    assert not (tmp_path / "run").exists()


def test_the_folds_of_a_split_file(quick, task, tmp_path):
    names = [case["case"] for case in load_task(task).training]
    path = tmp_path / "splits.json"
    first = {"train": names[2:], "val": names[:2]}

    def write(*splits):
        path.write_text(json.dumps(splits), encoding="utf-8")
        return quick(f"split.file={path}")

    config = write(first, {"train": names[:4], "val": names[4:]})
    validated = [fold.split.validation for fold in plan_folds(config, load_task(task))]
    assert validated == [tuple(names[:2]), tuple(names[4:])]
    for splits, message in (
        ([first, {"train": names[2:], "val": names[1:2]}], rf"{names[1]} is .* of folds 0 and 1 of .*splits\.json"),
        ([{"train": names, "val": []}], r"fold 0 of .*splits\.json has no case to validate"),
    ):
        with pytest.raises(ConfigError, match=message):
            cross_validate(write(*splits))


def test_the_folder_of_a_plain_run_is_left_alone(quick, tmp_path):
    RunFolder(tmp_path / "run").path.mkdir()
    (tmp_path / "run" / "config.yaml").touch()
    with pytest.raises(ConfigError, match="contains a single run; choose another folder"):
        cross_validate(quick())


def test_a_fold_that_diverges_does_not_keep_the_others(quick, planned, caplog):
    diverging = quick("optimizer.lr=1.0e+30", "training.clip=null", "training.iterations=9")
    with pytest.raises(NonFiniteLossError):
        cross_validate(diverging, folds=[0, 1])
    assert [f"fold {k} failed" in caplog.text for k in (0, 1)] == [True, True]


def test_published_results_stand_beside_ones_own(quick, finished, task, tmp_path):
    finished(0)
    root = tmp_path / "Task04_Hippocampus"
    shutil.copytree(task, root)
    crossed = cross_validate(quick(f"data.root={root}"), folds=[0])
    report = (crossed.folder / "report.md").read_text(encoding="utf-8")
    (row,) = [line for line in report.splitlines() if "nnU-Net 3d_fullres" in line]
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    source = "Project-MONAI/tutorials, modules/dynunet_pipeline/README.md"
    assert cells == ["nnU-Net 3d_fullres", "5-fold cross-validation", "260", "0.8975", "0.8807", "0.8891", source]
    assert "0.90 " in report  # the test set's two digits stay two
    assert "0.895 " in report
    assert "may be easier or harder: results compare only roughly." in report
    written = json.loads((tmp_path / "run" / "cross_validation.json").read_text(encoding="utf-8"))
    assert written["published"][0]["dice"] == {"1": 0.8975, "2": 0.8807}


def test_processes_train_what_they_can_and_tell_what_failed(config_file, planned, task, tmp_path):
    broken = planned()[1]
    broken.folder.begin(broken.config, load_task(task), broken.split, {"environment.json": {}})
    broken.folder.checkpoints.mkdir()
    (broken.folder.checkpoints / "latest.pt").write_bytes(b"")
    arguments = [part for value in SHORT for part in ("--set", value)]
    arguments += ["--set", "device=cpu", "--folds", "0", "1", "--gpus", "2", "--resume"]
    result = CliRunner().invoke(app, ["cross-validate", str(config_file), *arguments], catch_exceptions=False)
    assert result.exit_code == 1
    assert "Incomplete: only fold(s) 0 of 3 are finished." in result.output
    log = tmp_path / "run" / "fold_1.log"
    assert f"fold 1 failed with exit code 1; the last lines of {log}:" in result.output
    assert "latest.pt is damaged, or torch.save of torch 1.6 or later did not write it" in result.output
    written = json.loads((tmp_path / "run" / "cross_validation.json").read_text(encoding="utf-8"))
    assert [fold["fold"] for fold in written["folds"]] == [0]
    assert list(written["failures"]) == ["1"]
    # The process was given the very fold, and its time is all included.
    assert planned()[0].result() is not None
    assert written["folds"][0]["seconds"] > written["folds"][0]["seconds_training"]


def test_ctrl_c_reaches_the_processes_which_save(quick, planned):
    endless = ("training.epochs=100000", "training.validate_every=100000", "device=cpu")
    fold = planned(*endless)[0]
    has_begun = (fold.folder.path / "history.jsonl").exists
    with acting_when(has_begun, press_ctrl_c), pytest.raises(KeyboardInterrupt):
        cross_validate(quick(*endless), folds=[0], gpus=2)
    saved = latest(fold.folder.path)
    assert saved.epoch + saved.position > 0


def test_without_gpus_processes_share_the_cpu_where_the_config_says_so(quick, monkeypatch):
    assert choose_gpus(quick("device=cpu"), 3) == [None, None, None]
    monkeypatch.setattr(launching, "count_gpus", lambda: 0)
    with pytest.raises(ConfigError, match=r"--gpus 3 needs GPUs, but none is visible; leave it out to use .*=cpu"):
        choose_gpus(quick(), 3)


def test_a_fold_on_several_gpus_starts_its_own_processes(quick):
    config = quick("parallel.data=2", "device=cpu")
    crossed = cross_validate(config, folds=[0])
    assert [fold.number for fold in crossed.folds] == [0]
    assert "2 replicas of the network" in (config.folder / "fold_0.log").read_text(encoding="utf-8")
    with pytest.raises(ConfigError, match=r"processes on one GPU each, .* on 2 GPU\(s\); leave out --gpus"):
        choose_gpus(config, 2)


def test_numbers_after_config_without_folds_are_refused(config_file):
    result = CliRunner().invoke(app, ["cross-validate", str(config_file), "0", "1"])
    assert result.exit_code == 2
    assert "got 0 after CONFIG; choose folds with --folds" in result.output
