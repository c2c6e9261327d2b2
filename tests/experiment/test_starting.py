"""A training that begins with the weights of another one."""

import json
import shutil

import nibabel
import numpy as np
import pytest
import torch
from training_hooks import At, raising

from volseg.checkpointing.file import load_checkpoint
from volseg.errors import CheckpointError, ConfigError
from volseg.exchange.tensors import pack_tensors
from volseg.experiment import load_config, train


@pytest.fixture(scope="module")
def first(config_of, task, tmp_path_factory):
    """Return the folder of a run that was trained as far as it takes to know where the structures lie."""
    folder = tmp_path_factory.mktemp("first") / "run"
    train(config_of(task, folder, "training.epochs=4", "training.iterations=50", "training.validate_every=4"))
    return folder


@pytest.fixture(scope="module")
def config_of(tmp_path_factory):
    file = tmp_path_factory.mktemp("config") / "config.yaml"
    file.write_text(
        """
name: tiny
data: {root: .}
preprocessing: [{name: Spacing, spacing: [1.5, 1.5, 1.5]}, {name: ZScore}]
split: {num_folds: 3}
patch: {size: [24, 24, 24], batch: 2, foreground: 0.5}
augmentation: {enabled: false}
network: {name: UNet, channels: [8, 16, 32], strides: [2, 2], num_res_units: 1}
optimizer: {name: AdamW, lr: 5.0e-3}
training: {epochs: 1, iterations: 8, ema: 0.9}
""",
        encoding="utf-8",
    )
    return lambda root, output, *more: load_config(file, [f"data.root={root}", f"output={output}", *more])


@pytest.fixture(scope="module")
def twin(task, tmp_path_factory):
    """Return the same images with other labels: their values exchanged, under other names."""
    folder = shutil.copytree(task, tmp_path_factory.mktemp("twin") / "Task01_Twin")
    for file in sorted((folder / "labelsTr").glob("*.nii.gz")):
        image = nibabel.load(file)
        exchanged = np.array([0, 2, 1], dtype=np.uint8)[np.asanyarray(image.dataobj)]
        nibabel.save(nibabel.Nifti1Image(exchanged, image.affine, image.header), file)
    manifest = json.loads((folder / "dataset.json").read_text(encoding="utf-8"))
    manifest["labels"] = {"0": "background", "1": "Tail", "2": "Head"}
    (folder / "dataset.json").write_text(json.dumps(manifest), encoding="utf-8")
    return folder


def dice_of(outcome):
    return outcome.validated.summary["foreground_mean"]["Dice"]


def test_a_task_with_other_labels_starts_better_than_from_scratch(first, twin, config_of, tmp_path, caplog):
    few = ["training.iterations=30", "training.ema=null"]
    heads = [f"training.start_from={first}", "optimizer.parts={'model.2*': {lr: 0.03}}"]
    scratch = dice_of(train(config_of(twin, tmp_path / "scratch", *few)))
    tuned = dice_of(train(config_of(twin, tmp_path / "tuned", *few, *heads)))
    # With other seeds the one came to 0.35 to 0.37, the other to 0.46 to 0.49.
    assert tuned > scratch + 0.05, (tuned, scratch)
    told = json.loads((tmp_path / "tuned" / "start.json").read_text(encoding="utf-8"))
    state = load_checkpoint(first / "checkpoints" / "latest.pt").model
    assert told["file"] == str(first / "checkpoints" / "latest.pt")
    assert told["new"]
    assert sorted([*told["taken"], *told["new"]]) == sorted(state)
    assert told["adapted"] == told["left"] == []


def test_a_fine_tuning_that_was_interrupted_goes_on_exactly_and_needs_its_source_no_more(
    first, twin, config_of, tmp_path
):
    source = shutil.copytree(first, tmp_path / "source")
    more = [f"training.start_from={source}", "training.epochs=2", "training.iterations=4"]
    more += ["training.checkpoint_minutes=0"]
    more += ["training.frozen=['model.0.*']", "optimizer.parts={'model.2*': {lr: 0.02}}"]
    whole = train(config_of(twin, tmp_path / "whole", *more))
    with pytest.raises(KeyboardInterrupt):
        train(config_of(twin, tmp_path / "parts", *more), hooks=[At(1, 2, raising(KeyboardInterrupt))])
    shutil.rmtree(source)
    train(config_of(twin, tmp_path / "parts", *more), resume=True)
    one, other = (load_checkpoint(tmp_path / name / "checkpoints" / "latest.pt") for name in ("whole", "parts"))
    assert all(torch.equal(one.model[name], other.model[name]) for name in one.model)
    begun = load_checkpoint(first / "checkpoints" / "latest.pt").average["average"]
    frozen = [name for name in begun if name.startswith("model.0.")]
    assert frozen
    assert all(torch.equal(one.model[name], begun[name]) for name in frozen)
    assert len(whole.history) == 2


class Pickled:
    def __reduce__(self):
        return print, ("code ran",)


def test_what_holds_no_weights_is_refused_and_leaves_no_run(first, task, config_of, tmp_path, capsys):
    torch.save({"network": Pickled()}, tmp_path / "code.pt")
    torch.save({"epoch": 3}, tmp_path / "none.pt")
    (tmp_path / "a.safetensors").touch()
    (tmp_path / "empty.safetensors").write_bytes(pack_tensors({}))  # names without any prefix were looked at for ever
    for name, error, message in (
        ("gone.pt", ConfigError, "does not exist"),
        ("code.pt", CheckpointError, "holds more than tensors, plain values .*code \\(GLOBAL .*print\\)"),
        ("none.pt", CheckpointError, "holds no state_dict"),
        ("a.safetensors", CheckpointError, "a.safetensors is damaged: 0 bytes"),
        ("empty.safetensors", CheckpointError, "holds no weights"),
    ):
        with pytest.raises(error, match=message):
            train(config_of(task, tmp_path / "run", f"training.start_from={tmp_path / name}"))
    other = ["network.channels=[8, 8, 8]", f"training.start_from={first}"]
    with pytest.raises(CheckpointError, match=r"model\.1\..* is .*, the network's is .*start_strict"):
        train(config_of(task, tmp_path / "run", *other))
    assert not (tmp_path / "run").exists()
    assert "code ran" not in capsys.readouterr().out
    train(config_of(task, tmp_path / "run", *other, "training.start_strict=false", "training.iterations=1"))


STRATEGIES = {
    "spatial": ["parallel={strategy: spatial, devices: [cpu, cpu]}"],
    "pipeline": ["parallel={strategy: pipeline, devices: [cpu, cpu]}"],
    "replicas": ["parallel={data: 2}", "training.deterministic=true"],
}


@pytest.fixture(scope="module")
def tuned_plainly(first, twin, config_of, tmp_path_factory):
    return tune(first, twin, config_of, tmp_path_factory.mktemp("plain"))


def tune(first, twin, config_of, folder, *more):
    settings = [f"training.start_from={first}", "training.iterations=2", "training.frozen=['model.0.*']"]
    settings += ["optimizer={name: SGD, lr: 0.01, parts: {'model.2*': {lr: 0.02}}}", "split.validation=none"]
    train(config_of(twin, folder / "run", *settings, *more))
    return load_checkpoint(folder / "run" / "checkpoints" / "latest.pt").model


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parts_and_frozen_weights_are_the_plain_networks_on_several_devices(
    strategy, first, twin, config_of, tmp_path, tuned_plainly
):
    model = tune(first, twin, config_of, tmp_path, *STRATEGIES[strategy])
    assert list(model) == list(tuned_plainly)
    for name in model:  # what is summed over devices rounds otherwise
        torch.testing.assert_close(model[name], tuned_plainly[name], rtol=1e-4, atol=1e-5)
        if name.startswith("model.0."):
            assert torch.equal(model[name], tuned_plainly[name])
