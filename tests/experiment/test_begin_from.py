"""A training starts from any source that predicts, or from weights; a plan copies the network that fits them."""

import json
import shutil
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
import yaml
from tiny_trainings import DYNUNET, FirstWeights, config_factory
from torch import nn
from training_hooks import At, raising
from typer.testing import CliRunner

import volseg
from tests.experiment.conftest import latest
from volseg.cli import app
from volseg.data.json_files import read_json
from volseg.data.synthetic import make_task
from volseg.errors import CheckpointError, ConfigError
from volseg.exchange.nnunet import read_nnunet
from volseg.exchange.nnunet.folder import read_checkpoint
from volseg.exchange.nnunet.plans import read_plan
from volseg.exchange.tensors import pack_tensors
from volseg.experiment import REGISTRIES, configure, export, load_config, train
from volseg.experiment.prediction.sources import load_trained, read_weights
from volseg.models.networks import build_network
from volseg.workflow import Hook

NNUNET = Path(__file__).parents[1] / "exchange" / "nnunet" / "model"
FOLD = NNUNET / "fold_0"
CHECKPOINT = FOLD / "checkpoint_final.pth"


@pytest.fixture(scope="module")
def config_of(tmp_path_factory):
    return config_factory(tmp_path_factory.mktemp("begin"))


@pytest.fixture(scope="module")
def run(config_of, tmp_path_factory):
    """Return a run with averaged weights, whose network has two names for each layer."""
    folder = tmp_path_factory.mktemp("first") / "run"
    train(config_of(folder, DYNUNET))
    return folder


class FirstLoss(Hook):
    """Keep the loss and the weights that a training begins with, and stop it."""

    def on_training_begin(self, training):
        image = torch.rand(2, 1, 16, 16, 16, generator=torch.Generator().manual_seed(3))
        with torch.no_grad():
            logits = training.network(image)
        self.loss = float(torch.nn.functional.cross_entropy(logits, (image[:, 0] > 0.5).long()))
        training.stop("seen")


def write_sources(run, folder):
    """Return files that hold the averaged weights of a run, by the kind of each."""
    state = load_trained(run, overrides=["device=cpu"]).models[0].state_dict()
    (folder / "weights.safetensors").write_bytes(pack_tensors(state))
    wrapped = {f"module._orig_mod.{name}": value for name, value in state.items()}
    torch.save({"epoch": 3, "state_dict": wrapped}, folder / "wrapped.ckpt")
    (folder / "bundle" / "configs").mkdir(parents=True)
    (folder / "bundle" / "models").mkdir()
    torch.save(dict(state), folder / "bundle" / "models" / "model.pt")
    return {
        "run": run,
        "checkpoint": run / "checkpoints" / "latest.pt",
        "archive": export(run, folder / "model.zip"),
        "safetensors": folder / "weights.safetensors",
        "prefixes": folder / "wrapped.ckpt",
        "bundle": folder / "bundle",
        "bundle's file": folder / "bundle" / "models" / "model.pt",
    }


def test_every_form_of_a_run_begins_at_the_same_loss(run, config_of, tmp_path):
    (tmp_path / "sources").mkdir()
    begun, digests = {}, {}
    for kind, source in write_sources(run, tmp_path / "sources").items():
        losses, first = FirstLoss(), tmp_path / "begun" / kind
        train(config_of(first, DYNUNET, f"training.start_from={json.dumps(str(source))}"), hooks=[losses])
        told = read_json(first / "start.json")
        assert told["new"] == told["left"] == told["adapted"] == []
        begun[kind], digests[kind] = losses.loss, told["digest"]
    assert len(set(begun.values())) == 1, begun
    assert len(digests["safetensors"]) == 32
    raw = latest(run).model
    torch.save(dict(raw), tmp_path / "raw.pt")
    losses = FirstLoss()
    train(config_of(tmp_path / "raw", DYNUNET, f"training.start_from={tmp_path / 'raw.pt'}"), hooks=[losses])
    assert losses.loss != begun["run"]  # the weights of all of them are the averaged ones


def test_a_fold_is_named_by_its_path_and_several_are_refused(cross_validated, tmp_path):
    archive = export(cross_validated, tmp_path / "model.zip")
    for source in (cross_validated, archive):
        with pytest.raises(ConfigError, match=r"start_from: .* contains more than one network; .*fold_0 or .*fold_1"):
            read_weights(source)
    expected = read_weights(cross_validated / "fold_2")
    found = read_weights(archive / "fold_2")
    averaged = dict(expected.values) | dict(expected.average)
    assert all(torch.equal(found.values[name], averaged[name]) for name in averaged)
    with pytest.raises(ConfigError, match=r"model\.zip has no fold_9; it has fold_0, fold_1, fold_2"):
        read_weights(archive / "fold_9")


def test_a_file_of_weights_has_no_other_checkpoint(run):
    """The option was passed over for a file that names a checkpoint."""
    best = run / "checkpoints" / "latest.pt"
    assert len(load_trained(best, overrides=["device=cpu"]).models) == 1
    with pytest.raises(ConfigError, match=r"latest\.pt is one file of weights; name its folder to use the best"):
        load_trained(best, "best")


@pytest.fixture(scope="module")
def hippocampus(tmp_path_factory):
    return make_task(tmp_path_factory.mktemp("data") / "Task00_Small", num_cases=6, num_test=0)


def plan_like(task, source, folder):
    """Return the config that ``volseg configure --like`` writes, as the command writes it."""
    file = folder / "planned.yaml"
    folder.mkdir(exist_ok=True)
    words = ["configure", str(task), "-o", str(file), "--like", str(source)]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return file


def test_a_plan_like_nnunets_model_begins_with_all_its_weights(hippocampus, tmp_path):
    alone = shutil.copy(CHECKPOINT, tmp_path / "weights_from_somewhere.pth")
    short = ["training.epochs=1", "training.iterations=1", "device=cpu", f"output={tmp_path / 'run'}"]
    planned = [
        load_config(plan_like(hippocampus, source, tmp_path / str(number)), [*short, f"training.start_from={alone}"])
        for number, source in enumerate((NNUNET, FOLD, CHECKPOINT, alone))
    ]
    assert all(each == planned[0] for each in planned), "a model, its fold and its file are one network"
    config, read = planned[0], read_nnunet(NNUNET)
    assert config.patch.size == read.plan.patch
    assert config.network.spec() == dict(read.plan.network)
    steps = {step.name: step.spec() for step in config.preprocessing}
    assert steps["Spacing"]["spacing"] == pytest.approx(read.plan.spacing)
    assert steps["Orientation"]["axcodes"] == "".join("SAR"[axis] for axis in read.plan.transpose)
    seen = FirstWeights()
    train(config, hooks=[seen])
    told = read_json(tmp_path / "run" / "start.json")
    assert told["adapted"] == ["encoder.0.0.0.weight"]  # two channels there and one here
    assert sorted(told["new"]) == ["heads.0.bias", "heads.0.weight"]  # two regions there and three classes here
    assert told["left"] == []
    assert torch.equal(seen.weights["ups.1.weight"], read.weights[0]["decoder.transpconvs.1.weight"])


def name_theirs(ours, last):
    """Return nnU-Net's name of a tensor of `PlainConvUNet`."""
    part, stage, *rest = ours.split(".")
    if part == "heads":
        return f"decoder.seg_layers.{last - int(stage)}.{rest[0]}"
    if part == "ups":
        return f"decoder.transpconvs.{stage}.{rest[0]}"
    block, layer, kind = rest
    inner = "stages.{}.0.convs" if part == "encoder" else "stages.{}.convs"
    return f"{part}.{inner.format(stage)}.{block}.{('conv', 'norm')[int(layer)]}.{kind}"


def test_heads_of_deep_supervision_are_taken_too(tmp_path):
    """A prediction needs the finest head, and a training begins with all that have a loss."""
    model = shutil.copytree(NNUNET, tmp_path / "model")
    plans = read_json(model / "plans.json")
    base = plans["configurations"]["base"]
    sizes = {"n_stages": 4, "features_per_stage": [2, 4, 4, 4], "kernel_sizes": [[3, 3, 3]] * 4}
    strides = {"strides": [[1, 1, 1], [1, 2, 2], [2, 2, 2], [1, 2, 2]]}
    counts = {"n_conv_per_stage": [2] * 4, "n_conv_per_stage_decoder": [2] * 3}
    base["architecture"]["arch_kwargs"] |= {**sizes, **strides, **counts}
    (model / "plans.json").write_text(json.dumps(plans), encoding="utf-8")
    spec = read_plan(model / "plans.json", "3d_fullres").network
    network = build_network(spec, in_channels=2, out_channels=2).state_dict()
    content = torch.load(CHECKPOINT, weights_only=False)
    content["network_weights"] = {name_theirs(name, 2): value for name, value in network.items()}
    coarsest = {"weight": torch.zeros(2, 4, 1, 1, 1), "bias": torch.zeros(2)}  # no loss trains it
    content["network_weights"] |= {f"decoder.seg_layers.0.{kind}": value for kind, value in coarsest.items()}
    torch.save(content, model / "fold_0" / "checkpoint_final.pth")
    found = read_weights(model).values
    assert "heads.1.weight" in found
    torch.testing.assert_close(dict(found), dict(network), rtol=0, atol=0)


def test_a_plan_like_a_run_takes_over_its_grid_and_begins_with_its_weights(trained, task, tmp_path):
    file = plan_like(task, trained.folder.path, tmp_path)
    config = load_config(
        file, ["training.epochs=1", "training.iterations=1", "device=cpu", f"output={tmp_path / 'run'}"]
    )
    first = trained.folder.config()
    assert config.patch.size == first.patch.size
    assert config.network == trained.folder.plan().complete(first).network
    assert next(step.spec() for step in config.preprocessing if step.name == "Spacing")["spacing"] == [1.5, 1.5, 1.5]
    assert config.training.start_from == trained.folder.path
    train(config)
    told = read_json(tmp_path / "run" / "start.json")
    assert told["new"] == told["left"] == told["adapted"] == []


def test_what_cannot_be_planned_like_is_refused_before_a_case_is_read(trained, tmp_path):
    torch.save({"a": torch.zeros(1)}, tmp_path / "plain.pt")
    with pytest.raises(ConfigError, match=r"plain\.pt contains only weights"):
        configure(tmp_path / "no_data", like=tmp_path / "plain.pt")
    with pytest.raises(ConfigError, match="does not exist; name a run folder"):
        configure(tmp_path / "no_data", like=tmp_path / "gone")
    run = shutil.copytree(trained.folder.path, tmp_path / "run")
    config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    config["preprocessing"] = [step for step in config["preprocessing"] if step["name"] != "Orientation"]
    (run / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    with pytest.raises(ConfigError, match="was trained on the axes of its files"):
        configure(tmp_path / "no_data", like=run)


class Theirs(nn.Module):
    """A network with the names of the stored checkpoint."""

    divisors = (1, 1, 1)

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.out_channels = out_channels
        for name, value in read_checkpoint(CHECKPOINT).weights.items():
            *path, last = name.split(".")
            module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module._modules[part]
            module.register_parameter(last, nn.Parameter(torch.zeros_like(value)))

    def forward(self, image):
        return sum(one.sum() for one in self.parameters()) + image[:, :1].expand(-1, self.out_channels, -1, -1, -1)


def test_nnunets_weights_begin_a_network_that_has_nnunets_names(hippocampus, tmp_path):
    """A network of the user's own may be nnU-Net's code; its names are those of the checkpoint."""
    volseg.register("network", "Theirs")(Theirs)
    try:
        seen, file = FirstWeights(), plan_like(hippocampus, CHECKPOINT, tmp_path)
        plain = ["network={name: Theirs}", "training.epochs=1", "training.iterations=1", "device=cpu"]
        train(load_config(file, [*plain, f"output={tmp_path / 'run'}"]), hooks=[seen])
    finally:
        REGISTRIES["network"].forget("Theirs")
    told = read_json(tmp_path / "run" / "start.json")
    written = read_checkpoint(CHECKPOINT).weights
    assert len(told["taken"]) == len(written)
    assert all(torch.equal(value, seen.weights[name]) for name, value in written.items())


@pytest.fixture(scope="module")
def first(tuning_of, task, tmp_path_factory):
    """Return the folder of a run that keeps averaged weights."""
    folder = tmp_path_factory.mktemp("first") / "run"
    train(tuning_of(task, folder, "training.iterations=2"))
    return folder


@pytest.fixture(scope="module")
def tuning_of(tmp_path_factory):
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
logging: {loggers: []}
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
    manifest = read_json(folder / "dataset.json")
    manifest["labels"] = {"0": "background", "1": "Tail", "2": "Head"}
    (folder / "dataset.json").write_text(json.dumps(manifest), encoding="utf-8")
    return folder


def test_an_interrupted_fine_tuning_goes_on_exactly_without_its_source(first, twin, tuning_of, tmp_path):
    source = shutil.copytree(first, tmp_path / "source")
    more = [f"training.start_from={source}", "training.epochs=2", "training.iterations=4"]
    more += ["training.checkpoint_minutes=0"]
    more += ["training.frozen=['model.0.*']", "optimizer.parts={'model.2*': {lr: 0.02}}"]
    whole = train(tuning_of(twin, tmp_path / "whole", *more))
    told, known = read_json(whole.folder.path / "start.json"), latest(first)
    assert told["file"] == str(source / "checkpoints" / "latest.pt")
    assert told["new"], "labels of another meaning begin with heads of their own"
    assert sorted([*told["taken"], *told["new"]]) == sorted(known.model)
    assert told["adapted"] == told["left"] == []
    with pytest.raises(KeyboardInterrupt):
        train(tuning_of(twin, tmp_path / "parts", *more), hooks=[At(1, 2, raising(KeyboardInterrupt))])
    shutil.rmtree(source)
    train(tuning_of(twin, tmp_path / "parts", *more), resume=True)
    one, other = (latest(tmp_path / name) for name in ("whole", "parts"))
    torch.testing.assert_close(other.model, one.model, rtol=0, atol=0)
    begun = known.average["average"]
    frozen = [name for name in begun if name.startswith("model.0.")]
    assert frozen
    assert all(torch.equal(one.model[name], begun[name]) for name in frozen)
    assert len(whole.history) == 2


class Pickled:
    def __reduce__(self):
        return print, ("code ran",)


def test_what_holds_no_weights_is_refused_and_leaves_no_run(first, task, tuning_of, tmp_path, capsys):
    torch.save({"network": Pickled()}, tmp_path / "code.pt")
    torch.save({"epoch": 3}, tmp_path / "none.pt")
    (tmp_path / "a.safetensors").touch()
    (tmp_path / "empty.safetensors").write_bytes(pack_tensors({}))  # names without any prefix were looked at for ever
    for name, error, message in (
        ("gone.pt", ConfigError, "does not exist"),
        ("code.pt", CheckpointError, "contains more than tensors, plain values .*code \\(GLOBAL .*print\\)"),
        ("none.pt", CheckpointError, "contains no state_dict"),
        ("a.safetensors", CheckpointError, "a.safetensors is damaged: it has only 0 bytes"),
        ("empty.safetensors", CheckpointError, "contains no weights"),
    ):
        with pytest.raises(error, match=message):
            train(tuning_of(task, tmp_path / "run", f"training.start_from={tmp_path / name}"))
    other = ["network.channels=[8, 8, 8]", f"training.start_from={first}"]
    with pytest.raises(CheckpointError, match=r"model\.1\..* is .*, but .* in the network.*start_strict"):
        train(tuning_of(task, tmp_path / "run", *other))
    assert not (tmp_path / "run").exists()
    assert "code ran" not in capsys.readouterr().out
    train(tuning_of(task, tmp_path / "run", *other, "training.start_strict=false", "training.iterations=1"))


STRATEGIES = {
    "spatial": ["parallel={strategy: spatial, devices: [cpu, cpu]}"],
    "pipeline": ["parallel={strategy: pipeline, devices: [cpu, cpu]}"],
    "replicas": ["parallel={data: 2}", "training.deterministic=true"],
}


@pytest.fixture(scope="module")
def tuned_plainly(first, twin, tuning_of, tmp_path_factory):
    return tune(first, twin, tuning_of, tmp_path_factory.mktemp("plain"))


def tune(first, twin, tuning_of, folder, *more):
    settings = [f"training.start_from={first}", "training.iterations=2", "training.frozen=['model.0.*']"]
    settings += ["optimizer={name: SGD, lr: 0.01, parts: {'model.2*': {lr: 0.02}}}", "split.validation=none"]
    train(tuning_of(twin, folder / "run", *settings, *more))
    return latest(folder / "run").model


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parts_and_frozen_weights_are_the_plain_networks_on_several_devices(
    strategy, first, twin, tuning_of, tmp_path, tuned_plainly
):
    model = tune(first, twin, tuning_of, tmp_path, *STRATEGIES[strategy])
    assert list(model) == list(tuned_plainly)
    for name in model:  # what is summed over devices rounds otherwise
        torch.testing.assert_close(model[name], tuned_plainly[name], rtol=1e-4, atol=1e-5)
        if name.startswith("model.0."):
            assert torch.equal(model[name], tuned_plainly[name])
