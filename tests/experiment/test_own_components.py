"""A run with the user's own components: trained, resumed, predicted, validated, on several processes."""

import json

import numpy as np
import pytest
import torch
import yaml
from tiny_trainings import as_a_new_process
from torch import nn
from training_hooks import At, raising
from typer.testing import CliRunner

import volseg
from tests.experiment.conftest import latest
from volseg.cli import app
from volseg.errors import ConfigError, DataError, GridError
from volseg.experiment import REGISTRIES, load_config, train
from volseg.experiment.own_components import components_arguments

pytestmark = pytest.mark.usefixtures("ready_python")

COMPONENTS = '''
import torch
import volseg
from torch import nn


@volseg.register("network", "TinyNet")
class TinyNet(nn.Module):
    """Two heads: logits, and where structures end."""

    def __init__(self, in_channels, out_channels, width=4):
        super().__init__()
        self.body = nn.Conv3d(in_channels, width, 3, padding=1)
        self.head = nn.Conv3d(width, out_channels, 1)
        self.boundary = nn.Conv3d(width, 1, 1)

    def forward(self, image):
        features = self.body(image).relu()
        return self.head(features), self.boundary(features)


@volseg.register("loss", "EdgeLoss")
class EdgeLoss(nn.Module):
    def forward(self, boundary, label):
        return nn.functional.binary_cross_entropy_with_logits(boundary, (label > 0).float())


@volseg.register("augmentation", "Brighten")
class Brighten:
    def __init__(self, std=0.1):
        self.std = std

    def __call__(self, image, label, generator):
        return image + self.std * torch.randn((), generator=generator, device=image.device), label


@volseg.register("hook", "CountEpochs")
class CountEpochs(volseg.Hook):
    def __init__(self, file):
        self.file = file

    def on_epoch_end(self, training, record):
        if training.is_main_process:
            with open(self.file, "a", encoding="utf-8") as file:
                file.write(f"{record.epoch} ")


@volseg.register("transform", "Double")
class Double:
    def __init__(self, fields):
        self.image = fields[0]

    def __call__(self, case):
        return {**case, self.image: case[self.image] * 2}


@volseg.register("schedule", "halves")
def halves(progress, *, times=2):
    return 0.5 ** (times * progress)


@volseg.register("optimizer", "PlainSGD")
class PlainSGD(torch.optim.SGD):
    pass
'''


@pytest.fixture
def own(task, tmp_path):
    """Return a config that names components of one's own, and the file that has them."""
    values = {
        "name": "own",
        "data": {"root": str(task)},
        "output": str(tmp_path / "run"),
        "preprocessing": [{"name": "Spacing", "spacing": [1.5, 1.5, 1.5]}, {"name": "ZScore"}, {"name": "Double"}],
        "split": {"num_folds": 3},
        "patch": {"size": [16, 16, 16], "batch": 2, "foreground": 0.5},
        "augmentation": {"own": [{"name": "Brighten", "std": 0.2}]},
        "network": {"name": "TinyNet", "width": 3, "outputs": ["logits", "boundary"]},
        "losses": [
            {"name": "FocalLoss", "weight": [1, 2, 3], "output": "focal"},
            {"name": "EdgeLoss", "inputs": ["boundary", "label"], "output": "edge", "factor": 0.5},
        ],
        "optimizer": {"name": "PlainSGD", "lr": 0.01, "parts": {"head.*": {"lr": 0.1}}},
        "schedule": {"name": "halves", "times": 3},
        "hooks": [{"name": "CountEpochs", "file": str(tmp_path / "epochs.txt")}],
        "training": {"epochs": 2, "iterations": 3, "validate_every": 2},
        "logging": {"loggers": []},
    }
    config, components = tmp_path / "own.yaml", tmp_path / "components.py"
    config.write_text(yaml.safe_dump(values), encoding="utf-8")
    components.write_text(COMPONENTS, encoding="utf-8")
    return config, components


@pytest.fixture
def registered(own):
    """Run the file of components in this process, for one test."""
    with as_a_new_process():
        volseg.load_components([own[1]])
        yield


def call(*arguments):
    """Run the command line, and return its output."""
    with as_a_new_process():
        result = CliRunner().invoke(app, [*map(str, arguments)])
    assert result.exit_code == 0, result.exception
    return result.output


def refuse(*arguments):
    """Run the command line, and return its error."""
    with as_a_new_process():
        fault = CliRunner().invoke(app, [*map(str, arguments)]).exception
    assert isinstance(fault, ConfigError), fault
    return str(fault)


def test_a_run_with_ones_own_parts_from_training_to_prediction(own, task, tmp_path, caplog):
    config, components = own
    assert "no network is called 'TinyNet'" in refuse("train", config)
    assert "--components FILE" in refuse("train", config)
    with_file = ("--components", components)
    call("train", config, *with_file)
    run = tmp_path / "run"
    assert (tmp_path / "epochs.txt").read_text(encoding="utf-8") == "0 1 "
    told = json.loads((run / "components.json").read_text(encoding="utf-8"))
    assert [(one["kind"], one["name"]) for one in told] == [
        ("augmentation", "Brighten"),
        ("hook", "CountEpochs"),
        ("loss", "EdgeLoss"),
        ("network", "TinyNet"),
        ("optimizer", "PlainSGD"),
        ("schedule", "halves"),
        ("transform", "Double"),
    ]
    (copy,) = (run / "components").iterdir()
    assert copy.read_bytes() == components.read_bytes()
    assert all(one["from"]["sha256"].startswith(copy.stem.rpartition("_")[2]) for one in told)
    images = task / "imagesTs"
    for verb in (("predict", run, images), ("validate", run), ("train", config, "--resume")):
        said = refuse(*verb)
        assert f"{run} uses missing components: " in said
        assert "network 'TinyNet'" in said
        assert f"Add them with --components {components}" in said
    call("predict", run, images, *with_file)
    call("validate", run, "--overwrite", "--components", copy)  # the same bytes elsewhere
    call("predict", run, images, "--resume", "--components", copy)
    components.write_text(COMPONENTS + "\n# changed\n", encoding="utf-8")
    assert "were made with other settings (components differ)" in refuse("predict", run, images, "--resume", *with_file)
    call("predict", run, images, "--overwrite", *with_file)
    assert "was started with network 'TinyNet' from" in caplog.text
    assert "Continue with --components" in refuse("train", config, "--resume", *with_file)
    call("train", config, "--set", "training.epochs=3", "--resume", "--components", copy)
    assert len(latest(run).history) == 3


def test_a_plan_and_the_largest_patch_are_of_ones_own_parts(own):
    """The reported largest size is planned again separately."""
    config, components = own
    # MONAI's loss looks at the values of class weights, where there are some.
    losses = "losses=[{name: FocalLoss, output: focal}, {name: EdgeLoss, inputs: [boundary, label], output: edge}]"

    def plan(*more):
        with as_a_new_process():
            arguments = ["plan", config, "--components", components, "--gpu-memory", "2GiB", "--json", "--set", losses]
            told = CliRunner().invoke(app, [*map(str, [*arguments, *more])])
        assert told.exit_code == 0, told.exception
        return json.loads(told.stdout)

    largest = plan("--max-volume")
    plain = largest["rows"][0]
    assert (largest["network"], plain["name"]) == ("TinyNet", "one GPU")
    assert min(plain["sides"]) > 16
    # It fills the GPU: where recomputing leaves room, that is chosen instead.
    assert plan("--set", f"patch.size={plain['sides']}")["candidates"][0]["state"] in ("chosen", "runs")


def test_processes_that_are_started_know_the_same_components(own, tmp_path):
    config, components = own
    folds = ("cross-validate", config, "-o", tmp_path / "folds", "--components", components, "--folds", "2")
    said = call(*folds, "--gpus", "2", "--set", "device=cpu", "--set", "training.epochs=1")
    assert "mean" in said
    assert (tmp_path / "folds" / "fold_2" / "components.json").exists()


def test_own_augmentations_are_the_same_resumed_within_an_epoch_and_in_two_processes(own, registered, tmp_path):
    config, components = own
    train(load_config(config, [f"output={tmp_path / 'one'}"]))
    cut = load_config(config, [f"output={tmp_path / 'parts'}"])
    with pytest.raises(KeyboardInterrupt):
        train(cut, hooks=[At(1, 2, raising(KeyboardInterrupt))])
    train(cut, resume=True)
    (tmp_path / "epochs.txt").unlink()
    call("train", config, "--gpus", "2", "--set", "device=cpu", "-o", tmp_path / "two", "--components", components)
    assert (tmp_path / "epochs.txt").read_text(encoding="utf-8") == "0 1 ", "the leader's"
    one, parts, two = (latest(tmp_path / name).model for name in ("one", "parts", "two"))
    torch.testing.assert_close(parts, one, rtol=0, atol=0)
    # Own augmentations draw by the sample's place in the batch; sums round otherwise.
    torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-5)


def test_data_that_only_a_reader_of_ones_own_reads_are_planned_for(tmp_path):
    folder, components = tmp_path / "arrays", tmp_path / "readers.py"
    for name, voxels in (("images", np.random.default_rng(0).random((12, 12, 12))), ("labels", np.eye(12)[None] > 0)):
        (folder / name).mkdir(parents=True)
        for case in "abcde":
            np.save(folder / name / f"{case}.npy", np.broadcast_to(voxels, (12, 12, 12)).astype(np.float32))
    components.write_text(
        "import numpy as np\nimport volseg\nfrom volseg.data import as_volume\n\n\n"
        '@volseg.register("reader", ".npy")\ndef read(path):\n    voxels = np.load(path)\n'
        "    return as_volume(voxels[None], np.eye(4), path, stored=voxels.dtype)\n",
        encoding="utf-8",
    )
    call("configure", folder, "-o", tmp_path / "arrays.yaml", "--components", components)
    assert load_config(tmp_path / "arrays.yaml").name == "arrays_unet"


def test_verify_and_the_list_take_the_file_too(own):
    config, components = own
    said = call("components", "network", "--components", components)
    assert f"TinyNet                          {components}, sha256 " in said
    assert "built in" in call("components", "loss")
    assert "did you mean 'network'" in refuse("components", "networks")
    assert "equal to round-off" in call("verify", config, "--devices", "2", "--components", components)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("network.outputs=[logits]", "must return logits .* got"),
        ("network.outputs=[logits, a, b]", r"returned 2 result\(s\), but 3 are named"),
        ("network.outputs=[logit, boundary]", "including logits, got"),
        ("network.outputs=[logits, label]", "cannot be called label"),
        ("losses=[{name: EdgeLoss, inputs: [edges, label]}]", "a loss needs the field 'edges'"),
        ("losses=[{name: DiceCELoss, weight: [1, 2]}]", "loss DiceCELoss cannot be computed from"),
        ("losses=[{name: DiceCELoss, weight: 2, factor: 2}]", "weight: needed: a list of class weights"),
        ("losses=[{name: TverskyLoss, weight: [1, 2, 3]}]", "loss TverskyLoss has no parameter 'weight'"),
        ("hooks=[{name: CountEpoch}]", "no hook is called 'CountEpoch'; did you mean 'CountEpochs'"),
        ("augmentation.own=[{name: Brighten, sd: 1}]", "augmentation Brighten has no parameter 'sd'"),
        ("schedule={name: halves, time: 3}", "schedule halves has no parameter 'time'; did you mean 'times'"),
        ("network={name: Wide}", "network Wide cannot be run on an image of .*not four"),
        ("network={name: Bare}", "network Bare must accept in_channels and out_channels"),
        ("network={name: Lacking}", "network Lacking needs a package.*pip install surely_absent"),
        ("losses=[{name: Vector}]", "must return one number"),
        ("losses=[{name: Single}]", r"must return one number, got \(1,\)"),
        ("optimizer={name: NoOptimizer, lr: 1}", "must build a torch.optim.Optimizer"),
        ("hooks=[{name: NoHook}]", "hook NoHook must be a volseg.Hook"),
        ("training.frozen=[bodi.*]", r"no parameter matches 'bodi.*'; did you mean .*'body\.\*'"),
    ],
)
def test_what_cannot_be_run_is_refused_before_a_folder_is_begun(own, registered, tmp_path, change, message):
    class Wide(nn.Conv3d):
        def __init__(self, in_channels, out_channels):
            super().__init__(in_channels, out_channels, 3, padding=1)

        divisors = (1, 1, 1)  # forward looks at values, so it cannot be asked

        def forward(self, x):
            if x.sum().item() == 0:
                raise RuntimeError("not four\nchannels")
            return super().forward(x)

    class Lacking(nn.Conv3d):
        def __init__(self, in_channels, out_channels):
            super().__init__(in_channels, out_channels, 1)

        def forward(self, x):
            import surely_absent

            return surely_absent.fold(x)

    volseg.register("network", "Wide", Wide)
    volseg.register("network", "Bare", nn.PReLU)
    volseg.register("network", "Lacking", Lacking)
    volseg.register("loss", "Vector", lambda: lambda logits, label: logits.mean((1, 2, 3, 4)))
    volseg.register("loss", "Single", lambda: lambda logits, label: logits.mean()[None])
    volseg.register("optimizer", "NoOptimizer", lambda groups, lr: groups)
    volseg.register("hook", "NoHook", dict)
    plain = ["losses=[{name: DiceCELoss}]", "optimizer={name: SGD, lr: 1}"] if change.startswith("network") else []
    with pytest.raises(ConfigError, match=message):
        train(load_config(own[0], [*plain, change]))
    assert not (tmp_path / "run").exists()


def test_what_a_call_registered_cannot_reach_other_processes(registered):
    volseg.register("network", "OfThisProcess", nn.Identity)
    with pytest.raises(ConfigError, match="'OfThisProcess' was registered by a call"):
        components_arguments()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("x = 1\nx.y\n", r"cannot be run, line 2: AttributeError"),
        ("def f(:\n", r"cannot be run, line 1: SyntaxError"),
        ("import volseg\nvolseg.register('network', 'VNet', dict)\n", "line 2: a network called 'VNet' already exists"),
        ("import volseg\nvolseg.register('networks', 'A', dict)\n", "did you mean 'network'"),
        ("import volseg\nvolseg.register('reader', 'npy', dict)\n", "must be the suffix of its files in lower case"),
        ("import volseg\nvolseg.register('network', 'B', dict)\nraise KeyError('late')\n", "line 3: KeyError"),
    ],
)
def test_a_file_that_cannot_be_run_says_where_and_registers_nothing(tmp_path, content, message):
    file = tmp_path / "components.py"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        volseg.load_components([file])
    assert "B" not in REGISTRIES["network"]
    with pytest.raises(ConfigError, match=r"gone\.py cannot be read"):
        volseg.load_components([tmp_path / "gone.py"])


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        (
            "transform",
            lambda case: {**case, "image": case["image"].as_tensor()},
            "must return a case with a MetaTensor .* in image",
        ),
        ("transform", lambda case: {**case, "label": case["label"][:, 1:]}, "after Wrong the label has the shape"),
        ("transform", lambda case: None, "Wrong must return a case with a MetaTensor .* in image, got a"),
        ("transform", lambda case: {**case, "image": case["image"][0]}, r"got a MetaTensor \(\d+, \d+, \d+\)"),
        ("transform", lambda case: case["img"], r"case .*: Wrong failed: KeyError\('img'\)"),
        (
            "transform",
            lambda case: {**case, "image": case["image"].repeat(2, 1, 1, 1)},
            r"returns 2 channel\(s\), not 1",
        ),
        ("augmentation", lambda image, label: image, r"must return \(image, label\), got \(1, 16, 16, 16\)"),
        ("augmentation", lambda image, label: (image[:, 1:], label), "the image with the shape, type and device that"),
        ("augmentation", lambda image, label: (image, label.float()), r"the label with the shape.*uint8.*got.*float32"),
    ],
)
def test_a_step_that_loses_the_place_shape_or_type_of_a_volume_is_refused(own, registered, kind, change, message):
    volseg.register("transform", "Wrong", lambda fields: change)
    volseg.register("augmentation", "Wrong", lambda: lambda image, label, generator: change(image, label))
    # No cache: names in it would follow from all that this file imports, which takes seconds.
    steps = "preprocessing=[{name: Orientation}, " if kind == "transform" else "augmentation.own=["
    with pytest.raises((GridError, DataError, ConfigError), match=message):
        train(load_config(own[0], [steps + "{name: Wrong}]", "data.cache=none"]))
