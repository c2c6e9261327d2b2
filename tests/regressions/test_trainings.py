"""Errors in trainings, their plans, pages and records."""

import base64
import errno
import gzip
import json
import logging
import math
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from weakref import WeakSet

import nibabel
import numpy as np
import pytest
import torch
import yaml
from ready_python import acting_when
from tiny_trainings import DYNUNET, config_factory, plain_training
from torch import nn
from torch.nn import functional
from typer.testing import CliRunner

import volseg
from tests.experiment.conftest import CONFIG
from volseg import Checkpoints, experiment
from volseg.checkpointing.file import LATEST, copy_to_host
from volseg.checkpointing.state import EpochRecord
from volseg.cli import app
from volseg.config.catalogue import shipped_config_path
from volseg.config.loading import load_config
from volseg.data import load_task
from volseg.data.case_store.preparing import prepare_together
from volseg.data.synthetic import make_task
from volseg.device import gpus
from volseg.errors import CheckpointError, ConfigError, DataError
from volseg.experiment import REGISTRIES, RunFolder, building, predict, search, train, training, validate, view
from volseg.experiment.network_plan import NetworkPlan, load_facts
from volseg.experiment.prediction.sources import load_trained
from volseg.experiment.prediction.trained import open_run
from volseg.models.networks import build_network
from volseg.monitoring import heartbeat
from volseg.monitoring.heartbeat import Heartbeat
from volseg.monitoring.loggers import History, LoggedRun, Logger, TensorBoard
from volseg.monitoring.run_files import RunPart, read_history, read_status, write_status, write_times
from volseg.monitoring.training_log import TrainingLog, list_scalars
from volseg.parallel import recorded_step
from volseg.reporting import viewer, write_report
from volseg.reporting.several_runs import describe_search, read_search
from volseg.transforms.augmentation import BatchAugmentation
from volseg.transforms.augmentation.spatial import voxel_steps
from volseg.workflow import load_checkpoint, save_checkpoint
from volseg.workflow.checks import NORM
from volseg.workflow.named import Objective
from volseg.workflow.validation import Example

# What users of the release before had written, and what became of it: loops that read checkpoints, launch commands.


def test_values_that_were_put_beside_the_state_of_a_training_are_kept(tmp_path):
    """A loop wrote ``{**training.state_dict(), "config": ...}``. A state holds metadata of its own now, empty ones,
    which replaced what lay beside it: the checkpoint was written without the config, and nobody was told."""
    kept = {"config": {"name": "x"}, "remark": 7}
    path = save_checkpoint({**plain_training().state_dict(), **kept}, tmp_path / "mine.pt")
    assert load_checkpoint(path).metadata == kept
    again = save_checkpoint({**load_checkpoint(path).as_checkpoint(), "more": 8}, tmp_path / "more.pt")
    assert load_checkpoint(again).metadata == {**kept, "more": 8}


class ReachedError(Exception):
    pass


@pytest.mark.parametrize(("processes", "expected"), [("2", ("spatial", 1)), ("1", ("none", None))])
def test_one_gpu_of_each_of_several_processes(tmp_path, monkeypatch, processes, expected):
    """``torchrun --nproc-per-node 2 -m volseg train CONFIG --gpus 1`` cut volumes over two processes. Then ``--gpus 1``
    took a spatial config for a choice of kernels, and the job was refused for having no strategy."""
    config = {**CONFIG, "data": {"root": "data"}, "parallel": {"strategy": "spatial"}}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    trained = []

    def note(loaded, **_):
        trained.append((loaded.parallel.strategy, loaded.parallel.devices))
        raise ReachedError

    monkeypatch.setattr(experiment, "train", note)
    monkeypatch.setenv("WORLD_SIZE", processes)
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(ReachedError):
        CliRunner().invoke(app, ["train", str(tmp_path / "tiny.yaml"), "--gpus", "1"], catch_exceptions=False)
    assert trained == [expected]


def test_bad_cases_come_before_whatever_a_step_of_ones_own_raises(tmp_path):
    """A case is checked and prepared in one go. A registered step that raised a KeyError for a sound case ended that at
    once, and the bad cases behind it were not named any more."""
    task = load_task(make_task(tmp_path / "Task00_Synthetic", num_cases=3, num_test=0))

    def preprocess(case):
        raise KeyError(case["case"])

    with pytest.raises(KeyError, match=task.training[0]["case"]):
        prepare_together(task.training, (), task, preprocess, workers=1)
    for case in task.training[1:]:
        case["label"].unlink()
    with pytest.raises(DataError, match=r"^2 case\(s\) cannot be used"):
        prepare_together(task.training, (), task, preprocess, workers=1)


# What a new user read in the README, and what the quickstart printed.


SHORT = ("training.epochs=1", "training.iterations=2", "training.validate_every=1", "patch.size=[24, 24, 24]")


@pytest.fixture
def set_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_the_number_of_cores_does_not_decide_what_is_printed(set_threads, tmp_path):
    """The README's Dice, 0.8948, was another machine's. Nothing had changed since but the machine: one thread sums in
    another order than two, ten epochs made of the last bit a difference in the second digit (0.9054 and 0.8972), and
    a fresh clone did not print what it was told to expect."""
    root = make_task(tmp_path / "Task00_Synthetic", num_cases=5, num_test=0)
    said = []
    for threads in (1, 2):
        set_threads(threads)
        outcome = train(
            load_config(
                shipped_config_path("quickstart"), [*SHORT, f"data.root={root}", f"output={tmp_path / str(threads)}"]
            )
        )
        said.append([(record.losses, record.gradient_norm, record.scores) for record in outcome.history])
        assert torch.get_num_threads() == threads
    assert said[0] == said[1]


# The spacing after preprocessing reached neither the network's plan nor the augmentation: every voxel was a cube.


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


def test_the_spacing_step_reaches_network_and_augmentation_and_resuming_takes_that_of_the_folder(config, augmentations):
    """A turn about H by 30 degrees on 2 x 2 x 4 mm keeps lengths in mm."""
    experiment.train(config())
    [augmentation] = augmentations
    assert augmentation.spacing == (2.0, 2.0, 4.0)
    file = config().folder / "network.json"
    written = json.loads(file.read_text(encoding="utf-8"))
    assert written["spacing"] == [2, 2, 4]
    assert written["network"]["kernel_size"][0] == [3, 3, 1]
    trained = open_run(RunFolder(config().folder)).build()
    assert list(trained.models[0].net.kernel_size[0]) == [3, 3, 1]
    parameters = augmentation.sample(1, torch.Generator().manual_seed(0))
    parameters.rotation.copy_(torch.tensor([[0.0, torch.pi / 6, 0.0]]))
    parameters.scale.fill_(1)
    # What the plain and the fused reading go by.
    columns, _ = voxel_steps(parameters, augmentation.patch_size, augmentation.spacing)
    mm = columns[0] * torch.tensor([2.0, 2.0, 4.0])
    torch.testing.assert_close(mm @ mm.T, torch.diag(torch.tensor([4.0, 4.0, 16.0])))
    file.write_text(json.dumps({**written, "spacing": [2, 2, 5]}), encoding="utf-8")
    experiment.train(config("training.epochs=2"), resume=True)
    assert augmentations[1].spacing == (2, 2, 5)
    file.write_text('{"spacing": [1, 0, 1], "network": {}}', encoding="utf-8")
    with pytest.raises(DataError, match=r"network\.json should contain the spacing"):
        open_run(RunFolder(config().folder)).build()


def test_without_a_spacing_step_the_datas_median_is_taken_and_kept(config, augmentations, tmp_path):
    """The cases' sides after orientation, stored in the run folder, so that other data change nothing."""
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
    with pytest.raises(DataError, match=r"voxel sides of all 4 cases of .* are unreadable"):
        experiment.train(config(f"data.root={empty}", WITHOUT))


# What became of the second stage of a cascade when folders were moved, or the data set was absent.


SECOND = (
    DYNUNET,
    "preprocessing=[{name: Spacing, spacing: [4.0, 4.0, 4.0]}, {name: ZScore}, {name: PreviousStage, labels: [1, 2]}]",
    *("split.validation=fold", "device=cpu", "evaluation.distances=false", "training.validate_every=null"),
)


@pytest.fixture
def second(tmp_path):
    """Return the config of a second stage; the label maps of the first one are the references themselves."""
    configured = config_factory(tmp_path)
    (tmp_path / "first" / "validation").mkdir(parents=True)
    for case in load_task(configured(tmp_path / "run", DYNUNET).data.root).training:
        shutil.copy(case["label"], tmp_path / "first" / "validation" / f"{case['case']}.nii.gz")
    stored = (f"data.previous_stage={tmp_path / 'first'}", f"data.cache={tmp_path / 'cache'}")
    return configured(tmp_path / "run", *SECOND, *stored)


def test_the_new_place_of_the_first_stage_can_be_named(second, tmp_path, caplog):
    """A cascade that was copied to another machine could not predict: its config names the first stage by an absolute
    path, no option took another one, and the error named neither the key nor the second stage. And `volseg validate`
    prepared again what the training had left in the cache, for its task had no channels of the first stage."""
    run = train(second).folder
    first = tmp_path / "first"
    moved = first.rename(tmp_path / "moved")
    image = next(second.data.root.glob("imagesTs/*.nii.gz"))
    for attempt in (lambda: predict(run, image, tmp_path / "out"), lambda: volseg.load(run.path)):
        with pytest.raises(ConfigError, match=r"one, .*first, does not exist; .*--set data\.previous_stage=FOLDER"):
            attempt()
    with pytest.raises(DataError, match=r"lacks the validated .* 1 of 1 cases.*--set data\.previous_stage=FOLDER"):
        validate(run, overwrite=True)
    with caplog.at_level("INFO"):
        validate(run, overwrite=True, overrides=[f"data.previous_stage={moved}"])
    assert "1 prepared case(s) found" in caplog.text


def test_a_forecast_counts_the_masks_of_the_first_stage(second):
    """With `--channels` and `--classes`, or published numbers, only image channels were counted."""
    assert load_facts(second, channels=1, classes=3).task.num_inputs == 3
    absent = second.with_values(data={"root": Path("Task04_Hippocampus")})
    assert load_facts(absent).task.num_inputs == load_facts(second).task.num_inputs == 3


# What a recording holds by its address stays there when another step of the network is recorded.


class Recording:
    """Simulates a recording without a GPU: its replay writes gradients to their old places."""

    def __init__(self, net: nn.Module) -> None:
        self._gradients = [parameter.grad for parameter in net.parameters()]


def test_a_second_optimizer_moves_no_gradients_that_a_recording_writes(monkeypatch):
    """The replays of the first showed old gradients, and wrote where nothing was theirs any more."""
    net = nn.Conv3d(1, 2, 1)
    optimizers = [torch.optim.SGD(net.parameters(), 0.1, momentum=0.9) for _ in range(2)]
    monkeypatch.setattr(gpus, "on_gpu", lambda _: True)
    monkeypatch.setattr(recorded_step, "_RECORDED", WeakSet())
    monkeypatch.setattr(gpus, "empty_cache", lambda _: None)
    moved = []
    for optimizer in optimizers:
        net(torch.randn(1, 1, 2, 2, 2)).sum().backward()
        optimizer.step()
        states = [state["momentum_buffer"] for state in optimizer.state.values()]
        places = [tensor.data_ptr() for tensor in (net.weight.grad, *states)]
        recorded_step._prepare(net, optimizer, torch.device("cpu"))
        found = [tensor.data_ptr() for tensor in (net.weight.grad, *states)]
        moved.append([place != now for place, now in zip(places, found, strict=True)])
        recording = Recording(net)
        recorded_step._RECORDED.add(recording)
    assert moved == [[True] * 3, [False, True, True]]


# Gradient norms lie beside the losses in a checkpoint, and were taken for losses.


def test_a_step_that_float16_leaves_out_keeps_no_checkpoint_from_being_written(tmp_path):
    """Its norm is infinite. The checkpoint was taken for one of a training that came apart, and left out in silence."""
    training = plain_training(batches=6)
    training.run()
    losses = [{"loss": torch.tensor(1.0), NORM: torch.tensor(math.inf)}]
    Checkpoints(tmp_path)._save(LATEST, replace(training.state(), losses=losses))
    assert math.isinf(load_checkpoint(tmp_path / LATEST).losses[0][NORM])


def test_norms_of_gathered_batches_are_kept():
    """The first batch, which completes no step, set the names: all norms of the epoch were lost."""
    training = plain_training(batches=6, accumulate=4)
    for batch in training.batches:
        training._train_batch(batch)
    kept = copy_to_host(training.state(), {}).losses
    assert [math.isfinite(batch[NORM]) for batch in kept] == [False, False, False, True, False, True]


# What was silently wrong in what a training tells of itself, each found by an attack.


RECORD = EpochRecord(epoch=0, losses={"loss": 0.5}, learning_rate=0.1, seconds=5.0, seconds_waited=1.0)


class Ended(Logger):
    """Records the call at the end, and breaks its argument."""

    scores = None

    def scalars(self, values, step):
        dict.clear(values)

    def end(self, scores):
        self.scores = dict(scores)


@pytest.mark.parametrize("kind", [History, TensorBoard])
def test_a_logger_of_a_second_training_leaves_the_files_of_the_first(kind, tmp_path):
    one = kind()
    for name in ("first", "second"):
        run = LoggedRun(name=name, folder=tmp_path / name)
        plain_training(epochs=2, hooks=TrainingLog([one], run)).run()
    written = {name: [file for file in (tmp_path / name).rglob("*") if file.is_file()] for name in ("first", "second")}
    assert all(len(files) == 1 for files in written.values())
    if kind is History:
        assert [line.epoch for line in read_history(tmp_path / "first/history.jsonl")] == [1, 2]


def test_numbers_of_numpy_do_not_end_the_history(tmp_path):
    record = replace(RECORD, score=np.float32(0.5), scores={"own/metric": np.float32(0.25)})
    assert list_scalars(record)["val/own/metric"] == 0.25
    history = History(tmp_path / "history.jsonl")
    history.begin(LoggedRun(name="a"))
    history.scalars(list_scalars(record), 1)
    history.end({})
    assert read_history(tmp_path / "history.jsonl")[0].scalars["val/dice_mean"] == 0.5


def test_a_training_that_ends_is_no_killed_one_to_its_loggers(tmp_path):
    """What one of them does to its numbers reaches no other one."""
    whole, cut_off = Ended(), Ended()
    history = plain_training(epochs=2, hooks=TrainingLog([whole, History(tmp_path / "history.jsonl")])).run()
    assert whole.scores == {"final/loss": history[-1].losses["loss"]}
    assert all("train/loss" in line.scalars for line in read_history(tmp_path / "history.jsonl"))

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        plain_training(epochs=2, validation=interrupt, hooks=TrainingLog([cut_off])).run()
    assert cut_off.scores == {}


def test_a_case_that_cannot_be_drawn_ends_no_training(caplog):
    class Validation:
        volume = torch.zeros(4, 4, 4)
        examples = (
            Example(case="odd", image=volume, label=volume, prediction=volume, affine=torch.full((4, 4), torch.nan)),
        )

        def __call__(self):
            return SimpleNamespace(score=0.5, scores={})

    assert len(plain_training(epochs=2, validation=Validation(), hooks=TrainingLog([Ended()])).run()) == 2
    assert "odd cannot be drawn" in caplog.text


def test_the_heartbeat_comes_back_when_a_full_disk_has_space_again(tmp_path, monkeypatch, caplog):
    def refuse(file, status):
        raise OSError(errno.ENOSPC, "No space left on device")

    signs = Heartbeat(every_seconds=3600)
    with caplog.at_level(logging.WARNING), signs.writing(tmp_path):
        monkeypatch.setattr(heartbeat.run_files, "write_status", refuse)
        signs.on_training_begin(plain_training())
        signs.on_validation_begin(plain_training())
        assert read_status(tmp_path / "status.json").state == "preparing"
        monkeypatch.setattr(heartbeat.run_files, "write_status", write_status)
    assert read_status(tmp_path / "status.json").state == "finished"
    assert caplog.text.count("No space left") == 1


def test_a_clock_that_was_set_back_makes_no_other_run(tmp_path):
    parts = [RunPart(begun=begun, seconds=1.0) for begun in (2000.0, 1000.0)]
    write_times(tmp_path / "times.json", parts)
    signs = Heartbeat(every_seconds=3600)
    with signs.writing(tmp_path):
        assert signs.begun == 2000.0


def test_a_loss_whose_parameters_are_the_fields_in_another_order_is_refused():
    def exchanged(label, logits):
        return functional.cross_entropy(logits, label)

    class Late(nn.Module):
        def forward(self, logits, mask=None, label=None):
            return logits.mean() if label is None else logits.sum()

    for loss in (exchanged, Late()):
        with pytest.raises(ConfigError, match=r"called with logits, label in this order"):
            Objective(loss)
    Objective(functional.cross_entropy)


def test_a_report_draws_a_training_that_blew_up(tmp_path):
    (tmp_path / "config.yaml").write_text("name: a\n", encoding="utf-8")
    lines = [
        {"epoch": epoch, "step": epoch, "time": 1.0, "scalars": {"train/loss": loss}}
        for epoch, loss in enumerate((-1e308, 1e308), start=1)
    ]
    (tmp_path / "history.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    assert "<svg" in write_report(tmp_path).read_text(encoding="utf-8")


# A wrong number in a config or in nnU-Net's plans took a machine's memory, or minutes, before an untyped RuntimeError.


STORED = Path(__file__).parents[1] / "exchange" / "nnunet" / "model"

PLAIN = {"name": "PlainConvUNet", "strides": [1, 2], "kernel_size": [3, 3], "filters": [4, 8], "decoder_blocks": 2}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"name": "UNet", "channels": [10**9, 16], "strides": [2]}, "whole numbers up to 65536, got 1000000000"),
        (
            {"name": "UNet", "channels": [60_000, 60_000], "strides": [2]},
            "parameters do not fit into half of the free memory",
        ),
        ({**PLAIN, "blocks": [10**9, 1]}, "whole numbers up to 65536"),
        ({"name": "SwinUNETR", "depths": [10**9, 2, 2, 2]}, "whole numbers up to 65536"),
        ({"name": "UNet", "channels": [-5, 1], "strides": [2]}, "network UNet refused .*negative dimension"),
        ({"name": "UNETR", "img_size": [60_000] * 3}, "do not fit into half"),
        ({"name": "UNet", "channels": [1, 1], "strides": [1], "num_res_units": 60_000}, "more than 5000 parameters"),
    ],
)
def test_a_network_that_does_not_fit_into_memory_is_refused(spec, message):
    with pytest.raises(ConfigError, match=message):
        build_network(spec, in_channels=1, out_channels=2)


class Chain(torch.nn.Sequential):
    """A network of the user's own: it makes 6,004 parameters and drops 3,000 other tensors."""

    def __init__(self, in_channels, out_channels):
        layers = [torch.nn.Conv3d(2, 2, 1) for _ in range(3000) if torch.zeros(3) is not None]
        super().__init__(torch.nn.Conv3d(in_channels, 2, 1), *layers, torch.nn.Conv3d(2, out_channels, 1))


def test_a_network_of_the_users_own_is_not_bounded():
    """The bound for built-in networks refused it, since it also counts tensors that are dropped."""
    volseg.register("network", "Chain", Chain)
    try:
        assert len(build_network({"name": "Chain"}, in_channels=1, out_channels=2).state_dict()) == 6004
    finally:
        REGISTRIES["network"].forget("Chain")


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("features_per_stage", [10**9] * 3, "whole numbers up to 65536"),
        ("features_per_stage", [4, 6, 60_000], "do not fit into half|of shape"),
        ("features_per_stage", [4, 6.0, 8], "with filters"),
        ("n_conv_per_stage", [10**9, 2, 2], "whole numbers up to 65536"),
        ("n_conv_per_stage", [2, 2], r"needed: 3 positive whole numbers"),
        ("n_conv_per_stage_decoder", [2, 2, 2], "needed: 2 positive whole numbers"),
        ("n_stages", 1000, "with 1000 stages; needed: 2 to 32"),
        ("n_stages", True, "with True stages"),
        ("kernel_sizes", [[10**9] * 3] * 3, "whole numbers up to 65536"),
        ("strides", [[1, 1, 1], [1, 2, 2], [16, 2, 2]], r"\[8, 24, 24\] is not a multiple of .*\[16, 4, 4\]"),
        ("patch_size", [10**9] * 3, "patch.size .* GiB .*; choose a smaller size"),
        ("patch_size", [8, 24, 24.5], "patch_size should be three whole numbers"),
        *(
            ("patch_size", [8, 24, side], "patch_size should be three positive numbers")
            for side in (float("nan"), "24")
        ),
        ("patch_size", [8, 25, 24], "not a multiple"),
        ("spacing", [1, 1, float("inf")], "spacing should be three positive numbers"),
        ("spacing", [1, 1, 10**30 * 10**10], "more than 64 bits|spacing"),
        ("use_mask_for_norm", [1, 0], "a scheme and a mask"),
        ("inherits_from", "3d_fullres", "has no valid configuration"),
    ],
)
def test_plans_with_wrong_sizes_are_refused(place, value, message, tmp_path):
    model = shutil.copytree(STORED, tmp_path / "model")
    plans = json.loads((model / "plans.json").read_text(encoding="utf-8"))
    base = plans["configurations"]["base"]
    of = base["architecture"]["arch_kwargs"] if place in base["architecture"]["arch_kwargs"] else base
    of[place] = value
    (model / "plans.json").write_text(json.dumps(plans), encoding="utf-8")
    with pytest.raises((ConfigError, CheckpointError, DataError), match=f"(?s){message}"):
        load_trained(model)


# What `volseg view` did to files and to single voxels.


@pytest.fixture
def image(tmp_path, monkeypatch):
    """Return the file of an image with voxels that are not finite."""
    monkeypatch.setattr(viewer, "read_niivue", lambda: "")
    voxels = np.arange(60, dtype=np.float32).reshape(3, 4, 5)
    voxels[0, 0, :3] = np.inf, -np.inf, np.nan
    nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4)), tmp_path / "scan.nii.gz")
    return tmp_path / "scan.nii.gz"


@pytest.mark.parametrize("name", ["scan.nii.gz", "pages"])
def test_a_page_replaces_no_image(image, tmp_path, name):
    """With the image as output and `--overwrite`, the page replaced the image."""
    (tmp_path / "pages").mkdir()
    before = image.read_bytes()
    with pytest.raises(ConfigError, match=r"the page is HTML, but .* has another suffix; name it view\.html"):
        view(image, output=tmp_path / name, overwrite=True)
    assert image.read_bytes() == before


def test_a_voxel_that_is_not_finite_does_not_make_the_rest_black(image, tmp_path):
    """An infinite voxel became 3.4e38, and all others black, without a note on the page."""
    page = view(image, cases=["scan", "scan"], output=tmp_path / "page.html")
    text = page.read_text(encoding="utf-8")
    assert text.count('"title": "scan"') == 1  # a case that is named twice is shown once
    assert "Values that are not finite are shown as 0." in text
    block = re.search(r'<script id="v0"[^>]*>(.*?)</script>', text)[1]
    shown = nibabel.Nifti1Image.from_bytes(gzip.decompress(base64.b64decode(block)))
    assert np.asarray(shown.dataobj).max() == 59


SETTINGS = (DYNUNET, "split.validation=fold", "device=cpu", "training.iterations=1", "training.validate_every=1")
SPACE = "optimizer.lr: {low: 0.1, high: 0.2}"


@pytest.fixture
def searched(tmp_path):
    """Return a function from a range to the first value that `search` chooses."""
    config_factory(tmp_path)

    def write(space):
        (tmp_path / "search.yaml").write_text(space, encoding="utf-8")
        return tmp_path / "config.yaml", tmp_path / "search.yaml", (*SETTINGS, f"output={tmp_path / 'run'}")

    return write


@pytest.mark.usefixtures("ready_python")
@pytest.mark.timeout(120)
def test_a_config_that_is_edited_meanwhile_changes_no_trial_and_the_next_command_is_of_this_search(searched, tmp_path):
    """Each trial read the config's file again: a search of hours, beside which its user edited the file, compared
    trials of two configs. And the page's command for more trials lacked the metric, so that it was refused."""
    config, over, settings = searched(SPACE)
    before = config.read_text(encoding="utf-8")
    edited = before.replace("lr: 0.3", "lr: 0.3\n  momentum: 0.5")
    has_begun = (tmp_path / "run" / "trial_0.yaml").exists
    with acting_when(has_begun, lambda: config.write_text(edited, encoding="utf-8")):
        search(config, over, settings, trials=2, metric="volume_diff_ml/Anterior", minimize=True, pruner="none")
    assert config.read_text(encoding="utf-8") == edited != before
    momenta = [RunFolder(tmp_path / "run" / f"trial_{n}").config().optimizer.spec().get("momentum") for n in (0, 1)]
    assert momenta == [None, None]

    config.write_text(before, encoding="utf-8")
    [commands] = describe_search(read_search(tmp_path / "run")).sections[-1].blocks
    command = shlex.split(dict(commands.commands)["Run more trials:"])
    assert command[-2:] == ["--trials", "4"]
    result = CliRunner().invoke(app, [*command[command.index("search") : -1], "1"], catch_exceptions=False)
    assert (result.exit_code, read_search(tmp_path / "run").results["wanted"]) == (0, 1)
    assert describe_search(read_search(tmp_path / "run")).state == "finished"  # it said: 2 of 1 trials


@pytest.mark.parametrize(
    ("space", "metric", "setting", "message"),
    [
        (SPACE, "hd95/Anterior", "evaluation.distances=false", "validations do not compute the metric 'hd95/Anterior'"),
        (SPACE, "nsd/Anterior", "evaluation.tolerance={Posterior: 1.0}", "did you mean .* 'nsd/Posterior'"),
        (SPACE, "lesion_f1/Anterior", "evaluation.lesions=[Posterior]", "did you mean 'lesion_f1/Posterior'"),
        ("split.validation: [fold, none]", "dice_mean", "seed=1", r"search\.yaml: a search compares validations"),
        ("evaluation.distances: [true, false]", "assd/Anterior", "seed=1", r"search\.yaml: validations do not compute"),
        ("patch.batch: {low: 2.0, high: 4.0}", "dice_mean", "seed=1", r"patch\.batch: .* valid integer, .*got 2\.7"),
        ("patch.batch: {low: 2, high: 4, step: 0.5}", "dice_mean", "seed=1", r"a valid integer, .*got 2\.5"),
    ],
)
def test_trials_that_could_only_fail_are_not_begun(searched, tmp_path, space, metric, setting, message):
    """Every trial was trained to its end, and failed there for its metric is no number; or at once, for a value
    between two ends that were whole by chance."""
    config, over, settings = searched(space)
    with pytest.raises(ConfigError, match=message):
        search(config, over, [*settings, setting], metric=metric)
    assert not (tmp_path / "run").exists()
