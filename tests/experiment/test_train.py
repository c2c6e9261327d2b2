"""From a folder of NIfTI files to a run folder, and on from there."""

import gc
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
from monai.data import MetaTensor
from training_hooks import At, press_ctrl_c, raising

from volseg import Checkpoints, Hook
from volseg.data.cases import folds
from volseg.data.json_files import read_json
from volseg.data.layouts import load_task
from volseg.errors import ConfigError, DataError
from volseg.evaluation.summary import read_summary
from volseg.experiment import RunFolder, format_outcome, load_config, predict, train, validate
from volseg.experiment.prediction.predicting import resolve_images
from volseg.workflow import load_checkpoint


@pytest.fixture
def outcome(trained, configured):
    """Return a copy of the result of training by the config."""
    return replace(trained, folder=RunFolder(shutil.copytree(trained.folder.path, configured().folder)))


def test_a_run_folder_describes_the_run_and_holds_the_fold_s_predictions_on_the_original_grids(trained, task):
    folder, known = trained.folder, load_task(task)
    assert load_config(folder.config_file) == load_config(folder.path.parent / "tiny.yaml")
    assert read_json(folder.path / "environment.json")["libraries"]["torch"] == torch.__version__
    assert folder.task().labels == known.labels
    assert folder.split() == folds([case["case"] for case in known.training], num_folds=3)[0]
    assert {path.name for path in folder.checkpoints.iterdir()} == {"latest.pt", "best.pt"}
    assert "| mean " in (folder.path / "report.md").read_text(encoding="utf-8")
    assert load_checkpoint(folder.checkpoints / "latest.pt").metadata["config"]["name"] == "tiny"

    summary = read_summary(folder.validation / "summary.json")
    assert set(summary) == {"foreground_mean", "mean", "metric_per_case", "labels", "settings"}
    assert set(summary["mean"]) == {"1", "2"}
    images = {case["case"]: nibabel.load(case["image"]) for case in known.training}
    written = {path.name.removesuffix(".nii.gz"): nibabel.load(path) for path in folder.validation.glob("*.nii.gz")}
    assert sorted(written) == list(folder.split().validation)
    for name, prediction in written.items():
        assert prediction.shape == images[name].shape
        np.testing.assert_allclose(prediction.affine, images[name].affine, atol=1e-4)  # both stored as float32


class SeeBeginning(Hook):
    """Record the cases that a training has read and keeps before its first batch."""

    def __init__(self, reads):
        self.reads, self.read, self.held = reads, {}, set()
        self.others = set(map(id, self._volumes()))  # whatever tests before this one have left

    @staticmethod
    def _volumes():
        gc.collect()
        return [found for found in gc.get_objects() if issubclass(type(found), MetaTensor)]

    def on_training_begin(self, training):
        self.read = dict(self.reads)
        volumes = [volume for volume in self._volumes() if id(volume) not in self.others]
        self.held = {Path(volume.meta["filename_or_obj"]) for volume in volumes}


def test_every_file_is_read_once_and_only_validation_cases_are_kept_beside_the_bank(configured, task, reads):
    beginning = SeeBeginning(reads)
    outcome = train(configured("data.keep=device", "data.cache=none", "training.epochs=1"), hooks=[beginning])
    files = {case["case"]: {case["image"], case["label"]} for case in load_task(task).training}
    assert beginning.read == {file: 1 for both in files.values() for file in both}
    split = outcome.folder.split()
    # The run's own predictions are read for the pictures of its report, and nothing of the data.
    predictions = {outcome.folder.validation / f"{name}.nii.gz": 1 for name in split.validation}
    assert reads == {**beginning.read, **predictions}, "a file was read again after the beginning"
    assert beginning.held.isdisjoint(file for name in split.training for file in files[name])
    assert beginning.held.issuperset(file for name in split.validation for file in files[name])


class InValidation(Hook):
    """Press Ctrl-C in the second epoch's validation, and count the predicted cases of all validations."""

    def __init__(self):
        self.judged = 0

    def on_training_begin(self, training):
        def predicted(network, volumes, logits):
            self.judged += not network.training
            if training.epoch == 1 and not network.training:
                press_ctrl_c()

        training.network.register_forward_hook(predicted)


def test_ctrl_c_and_resume_end_where_the_uninterrupted_run_ends(trained, configured, tmp_path):
    """Interrupted in an epoch, then while cases are validated."""
    config, in_validation = configured(f"output={tmp_path / 'interrupted'}"), InValidation()
    latest = config.folder / "checkpoints" / "latest.pt"
    for hook, progress in ((At(0, 2, press_ctrl_c), (0, 2)), (in_validation, (1, 3))):
        with pytest.raises(KeyboardInterrupt):
            train(config, resume=latest.exists(), hooks=[hook])
        assert load_checkpoint(latest).progress == progress
    assert in_validation.judged == len(trained.folder.split().validation) + 1
    resumed = train(config, resume=True)
    one, other = (load_checkpoint(o.folder.checkpoints / "latest.pt") for o in (trained, resumed))
    torch.testing.assert_close(other.model, one.model, rtol=0, atol=0)
    torch.testing.assert_close(other.average["average"], one.average["average"], rtol=0, atol=0)
    assert [(r.losses, r.score) for r in resumed.history] == [(r.losses, r.score) for r in trained.history]
    assert resumed.validated.summary["mean"] == trained.validated.summary["mean"]


def test_a_config_that_no_training_wrote_is_never_replaced(configured, config_file, tmp_path):
    own = tmp_path / "mine" / "config.yaml"
    own.parent.mkdir()
    own.write_bytes(config_file.read_bytes())
    for resume in (False, True):
        with pytest.raises(ConfigError, match=r"mine/config\.yaml would be replaced, but no training wrote it"):
            train(configured(f"output={own.parent}"), resume=resume)
    assert own.read_bytes() == config_file.read_bytes()


def test_a_longer_run_forgets_the_summaries_of_the_shorter_one_and_is_not_made_shorter(outcome, configured):
    """Else an interrupted extension would show the shorter run's Dice as its own."""
    validate(outcome.folder, checkpoint="best")
    summaries = [outcome.folder.path / name / "summary.json" for name in ("validation", "validation_best")]
    train(configured(), resume=True)  # nothing is left to train, so they stay true
    assert all(summary.exists() for summary in summaries)
    with pytest.raises(KeyboardInterrupt):
        train(configured("training.epochs=3"), resume=True, hooks=[At(2, 1, press_ctrl_c)])
    assert not any(path.exists() for path in (*summaries, outcome.folder.path / "report.md"))
    message = r"has trained 2 epochs and 1 batches, but training\.epochs is 2; increase training\.epochs to continue"
    with pytest.raises(ConfigError, match=message):
        train(configured(), resume=True)
    assert outcome.folder.config().training.epochs == 3
    assert len(train(configured("training.epochs=3"), resume=True).history) == 3
    assert [summary.exists() for summary in summaries] == [True, False]


def test_a_summary_made_on_the_way_is_never_taken_for_that_of_the_end(configured):
    class LooksIn(Hook):
        def on_epoch_end(self, training, record):
            if record.epoch == 0:
                # Its thread may not have written it yet.
                next(hook for hook in training.hooks if isinstance(hook, Checkpoints)).finish()
                validate(RunFolder(configured().folder))
            else:
                training.network.register_forward_hook(lost)

    def lost(*arguments):
        raise InterruptedError

    with pytest.raises(InterruptedError):  # in the final validation
        train(configured("training.checkpoint_minutes=0"), hooks=[LooksIn()])
    assert not (configured().folder / "validation" / "summary.json").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without GPUs")
def test_a_run_whose_devices_are_gone_names_the_file_to_mend(outcome, configured):
    file = outcome.folder.config_file
    file.write_text(file.read_text(encoding="utf-8").replace("device: auto", "device: cuda"), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"no GPU is visible; set device to auto or cpu \(in .*run/config\.yaml\)"):
        validate(outcome.folder)
    text = (
        file.read_text(encoding="utf-8")
        .replace("device: cuda", "device: auto")
        .replace("strategy: none", "strategy: spatial")
    )
    file.write_text(text.replace("devices: null", "devices: [cuda:0]"), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"names cuda:0, which does not exist; available: cpu \(in .*config"):
        validate(outcome.folder)


def test_deterministic_mode_refuses_an_operator_that_sums_in_no_order(configured):
    """On a CPU all operators are deterministic, so a hook simulates one that is not."""

    class Puts(Hook):
        def on_batch_begin(self, training, batch):
            torch.zeros(2).put_(torch.tensor([0, 0]), torch.ones(2), accumulate=False)

    message = r"training\.deterministic is true, but put_ does not have a deterministic implementation\. Choose another"
    with pytest.raises(ConfigError, match=message):
        train(configured("training.deterministic=true"), hooks=[Puts()])
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.gpu
def test_deterministic_runs_on_a_gpu_agree_bit_for_bit(config_file, tmp_path):
    """In processes of their own: cuBLAS reads its workspace's size once."""
    states = []
    for name in ("one", "two"):
        command = [sys.executable, "-m", "volseg", "train", str(config_file), "-o", str(tmp_path / name)]
        done = subprocess.run(
            [*command, "--set", "training.deterministic=true"], capture_output=True, encoding="utf-8", check=False
        )
        assert done.returncode == 0, done.stderr
        states.append(load_checkpoint(tmp_path / name / "checkpoints" / "latest.pt"))
    for part in ("model", "optimizer", "average"):
        torch.testing.assert_close(getattr(states[0], part), getattr(states[1], part), rtol=0, atol=0)


def test_all_cases_train_when_none_validates(configured, task):
    outcome = train(configured("split.validation=none", "training.epochs=1"))
    assert outcome.validated is None
    assert len(outcome.folder.split().training) == 6
    with pytest.raises(DataError, match="was trained on every case"):
        validate(outcome.folder)
    assert predict(outcome.folder, [task / "imagesTs"]).require_all()


def test_bad_cases_stop_the_run_before_it_begins_all_at_once_or_are_left_out_and_listed(task, configured, tmp_path):
    root = shutil.copytree(task, tmp_path / "Task00_Damaged")
    image = root / "imagesTr" / "synthetic_001.nii.gz"
    image.write_bytes(image.read_bytes()[:2000])
    label = root / "labelsTr" / "synthetic_002.nii.gz"
    volume = nibabel.load(label)
    voxels = np.asarray(volume.dataobj).copy()
    voxels[0, 0, 0] = 7
    nibabel.save(nibabel.Nifti1Image(voxels, volume.affine), label)
    config = configured(f"data.root={root}")
    bad = r"synthetic_001\.nii\.gz.*synthetic_002\.nii\.gz contains 7"
    with pytest.raises(DataError, match=rf"(?s)2 case\(s\) cannot be used.*{bad}.*data\.skip_bad"):
        train(config)
    assert not config.folder.exists()
    outcome = train(configured(f"data.root={root}", "data.skip_bad=true", "training.epochs=1"))
    assert {problem.case for problem in outcome.problems} == {"synthetic_001", "synthetic_002"}
    report = (outcome.folder.path / "report.md").read_text(encoding="utf-8")
    assert "## Cases left out" in report
    assert "synthetic_002.nii.gz contains 7" in report


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("network.name=UNett", "no network is called 'UNett'; did you mean 'UNet'"),
        ("network.chanels=[1]", "network UNet has no parameter 'chanels'; did you mean 'channels'"),
        ("optimizer.name=Adan", "no optimizer is called 'Adan'; did you mean 'Adam'"),
        ("losses=[{name: DiceLos}]", "no loss is called 'DiceLos'; did you mean 'DiceLoss'"),
        ("preprocessing=[{name: ZScor}]", "did you mean 'ZScore' or 'ClipZScore'"),
        ("schedule.name=cosin", "no schedule is called 'cosin'; did you mean 'cosine'"),
        ("metrics=[{name: DiceMetrik, output: x}]", "no metric is called 'DiceMetrik'; did you mean 'DiceMetric'"),
        ("logging.loggers=[tensorbord]", "no logger is called 'tensorbord'; did you mean 'tensorboard'"),
        ("optimizer.lr=-1", r"optimizer SGD refused .*Invalid learning rate"),
        ("losses=[{name: DiceLoss}, {name: FocalLoss}]", r"losses need different outputs.*such as output: dice"),
        ("losses=[{name: DiceLoss, factor: 2}]", r"the loss DiceLoss has the factor 2 and .*such as output: dice, or"),
        ("losses=[{name: DiceLoss, inputs: [logits, lable]}]", r"a loss needs the field 'lable'; did you mean 'label'"),
        ("metrics=[{name: MeanIoU, output: x, inputs: [pred, logits]}]", r"a metric needs the field 'logits'; known:"),
        ("preprocessing=[{name: Spacing, spacing: [1, 1]}]", r"Spacing refused .*three positive lengths in mm"),
        ("logging.loggers=[wandb]", r"^logger wandb needs a package .*pip install wandb"),
    ],
)
def test_a_component_that_cannot_be_is_refused_before_anything_is_read(configured, override, message, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    with pytest.raises(ConfigError, match=message):
        train(configured(override, "data.root=/nowhere"))


def test_images_are_found_and_doubles_refused(task, tmp_path):
    assert [case["case"] for case in resolve_images([task / "imagesTs"])] == ["synthetic_007"]
    image = task / "imagesTs" / "synthetic_007.nii.gz"
    with pytest.raises(DataError, match=r"would both be written as synthetic_007\.nii\.gz"):
        resolve_images([image, task / "imagesTs"])
    with pytest.raises(DataError, match=r"absent\.nii does not exist; name image files"):
        resolve_images([tmp_path / "absent.nii"])
    (tmp_path / "scans").mkdir()
    shutil.copy(image, tmp_path / "scans" / "LOUD.NII.GZ")
    assert [case["case"] for case in resolve_images([tmp_path / "scans"])] == ["LOUD"]


TERMS = (
    "losses=[{name: DiceLoss, output: dice}, {name: FocalLoss, factor: 0.5, output: focal}]",
    "metrics=[{name: MeanIoU, output: iou}]",
)


def test_a_run_reads_its_data_from_any_working_directory_and_names_its_losses_and_metrics(
    configured, task, tmp_path, monkeypatch
):
    monkeypatch.chdir(task.parent)
    outcome = train(configured(f"data.root={task.name}", *TERMS, "training.epochs=1"))
    record = outcome.history[-1]
    assert set(record.losses) == {"dice", "focal", "loss"}
    assert 0 <= record.scores["iou"] <= record.score
    monkeypatch.chdir(tmp_path)
    moved = outcome.folder.path.rename(tmp_path / "moved run é")
    assert validate(RunFolder(moved), overwrite=True).summary["mean"] == outcome.validated.summary["mean"]
    config = RunFolder(moved).config_file
    config.write_text(config.read_text(encoding="utf-8").replace(str(task), str(tmp_path / "gone")), encoding="utf-8")
    with pytest.raises(DataError, match=r"gone, the data set of .*moved run é, does not exist; .* data\.root in "):
        validate(RunFolder(moved), overwrite=True)


def test_a_run_lost_before_its_first_checkpoint_begins_again_by_resume(configured):
    """Before its first step there is nothing to resume, and it does not block the next attempt."""

    class Fails(Hook):
        def on_batch_begin(self, training, batch):
            raise InterruptedError

    config = configured()
    with pytest.raises(InterruptedError):
        train(config, hooks=[Fails()])
    with pytest.raises(InterruptedError):
        train(config, hooks=[At(0, 1, raising(InterruptedError))])
    with pytest.raises(ConfigError, match="already contains a run"):
        train(config)
    assert len(train(configured("optimizer.lr=0.02", "training.epochs=1"), resume=True).history) == 1
    assert RunFolder(config.folder).config().optimizer.spec()["lr"] == 0.02


def test_resume_refuses_cases_that_changed_sides(outcome, configured, task, tmp_path):
    """One case less shuffles every fold, so training cases would validate."""
    smaller = shutil.copytree(task, tmp_path / "Task00_Smaller")
    manifest = read_json(smaller / "dataset.json")
    manifest["training"].pop()
    (smaller / "dataset.json").write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(DataError, match=r"no longer match .*split\.json: .* no training case may be used for"):
        train(configured(f"data.root={smaller}", "training.epochs=3"), resume=True)


def test_a_prediction_never_replaces_its_image(trained, task, tmp_path, monkeypatch):
    image = shutil.copy(task / "imagesTs" / "synthetic_007.nii.gz", tmp_path)
    monkeypatch.chdir(tmp_path)
    before = (tmp_path / "synthetic_007.nii.gz").read_bytes()
    (tmp_path / "link").symlink_to(tmp_path)
    for images, output in (([Path(image)], Path()), ([Path("synthetic_007.nii.gz")], tmp_path / "link")):
        with pytest.raises(DataError, match=r"contains the image .*synthetic_007\.nii\.gz, which a label map would"):
            predict(trained.folder, images, output)
    assert (tmp_path / "synthetic_007.nii.gz").read_bytes() == before


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_read(configured, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file is not a folder; choose another folder"):
        train(configured(f"output={tmp_path}/file/run", "data.root=/nowhere"))


def test_a_network_of_one_size_needs_a_window_of_it(configured):
    short = ["training.epochs=1", "training.iterations=1", "training.validate_every=null"]
    unetr = "network={name: UNETR, hidden_size: 24, mlp_dim: 32, num_heads: 2, feature_size: 4}"
    with pytest.raises(ConfigError, match=r"supports only volumes of \(16, 16, 16\) voxels; set inference\.window to"):
        train(configured(unetr))
    assert train(configured(unetr, "inference.window=[16, 16, 16]", *short)).validated is not None


def test_the_commands_to_type_next_can_be_typed(trained):
    spaced = replace(trained, folder=RunFolder(Path("runs/run 1")))
    assert "volseg predict 'runs/run 1' IMAGES..." in format_outcome(spaced)
    assert f"report: {Path('runs/run 1/report.html')} and report.md" in format_outcome(spaced)
