"""Weights that went out of a run and came back as others, and files that were read although they were damaged."""

import random
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from monai.networks.nets import DynUNet
from torch import nn

from volseg.checkpointing.file import LATEST
from volseg.data.synthetic import make_task
from volseg.errors import CheckpointError, ConfigError, VolsegError
from volseg.exchange.archive import write_archive
from volseg.exchange.nnunet.checkpoint import read_checkpoint
from volseg.exchange.tensors import pack_tensors
from volseg.experiment import export, load_config, predict, train
from volseg.experiment.sources import load_trained
from volseg.experiment.weights import read_weights
from volseg.files import digest_file
from volseg.models import FitGrid
from volseg.models.transfer import transfer_weights
from volseg.models.weights import load_weights, strip_prefixes
from volseg.workflow import Checkpoints, Hook, Named, Training, load_checkpoint, save_checkpoint

NNUNET = Path(__file__).parents[1] / "exchange" / "nnunet" / "model" / "fold_0" / "checkpoint_final.pth"


class Begun(Hook):
    """Keep the weights that a training begins with, and end it."""

    def on_training_begin(self, training):
        self.weights = {name: value.clone() for name, value in training.network.state_dict().items()}
        training.stop("seen")


@pytest.fixture(scope="module")
def config_of(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    values = {
        "name": "dynunet",
        "data": {"root": str(make_task(folder / "Task00_Synthetic", num_cases=2, num_test=1))},
        "preprocessing": [{"name": "Spacing", "spacing": [2.0, 2.0, 2.0]}, {"name": "ZScore"}],
        "split": {"num_folds": 2, "validation": "none"},
        "patch": {"size": [16, 16, 16], "batch": 2},
        "augmentation": {"enabled": False},
        "network": {
            "name": "DynUNet",
            "kernel_size": [3, 3, 3],
            "strides": [1, 2, 2],
            "upsample_kernel_size": [2, 2],
            "filters": [4, 8, 8],
            "norm_name": "batch",
        },
        "optimizer": {"name": "SGD", "lr": 0.3},
        "training": {"epochs": 1, "iterations": 3, "ema": 0.7},
    }
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(values), encoding="utf-8")
    return lambda output, *more: load_config(file, [f"output={output}", *more])


@pytest.fixture(scope="module")
def run(config_of, tmp_path_factory):
    """Return the folder of a run with averaged weights, which nobody changes."""
    return train(config_of(tmp_path_factory.mktemp("run") / "run")).folder.path


@pytest.fixture(scope="module")
def images(config_of):
    return sorted((config_of("nowhere").data.root / "imagesTs").glob("*.nii.gz"))


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_an_exported_run_predicts_as_the_run(run, images, tmp_path):
    """The average was laid over a ``state_dict`` by name; MONAI's DynUNet has a second name for each layer, under which
    the exported file kept raw weights. 47 of 49 parameters were the raw ones, and label maps differed."""
    archive = export(run, tmp_path / "model.zip")
    expected = load_trained(run).models[0].state_dict()
    assert equal(load_trained(archive).models[0].state_dict(), expected)
    maps = [predict(source, images, tmp_path / f"by_{source.name}").require_all() for source in (run, archive)]
    for case, path in maps[0].items():
        assert digest_file(path) == digest_file(maps[1][case])
    state = load_checkpoint(run / "checkpoints" / LATEST)
    assert any(not torch.equal(state.model[name], expected[name]) for name in expected if "skip_layers" in name)


@pytest.mark.parametrize("source", ["", "checkpoints/latest.pt", "model.zip"])
def test_a_training_begins_with_the_averaged_weights_under_all_names(run, source, config_of, tmp_path, caplog):
    """As above, for ``training.start_from``; the log said "100.0% of all weights"."""
    caplog.set_level("INFO", "volseg.experiment.starting")
    path = export(run, tmp_path / "model.zip") if source == "model.zip" else run / source
    begun = Begun()
    train(config_of(tmp_path / "begun", f"training.start_from={path}"), hooks=[begun])
    network = load_trained(run).models[0]
    assert equal(begun.weights, network.state_dict())
    count = len([*network.parameters()])
    assert f"{count} of {count} parameters taken, 100.0% of all weights" in caplog.text


def test_the_log_counts_each_parameter_once_and_less_than_all_is_not_all(run, config_of, tmp_path, caplog):
    caplog.set_level("INFO", "volseg.experiment.starting")
    state = dict(load_trained(run).models[0].state_dict())
    missing = [name for name in state if name.endswith("output_block.conv.conv.bias")]
    assert missing
    for name in missing:
        del state[name]
    torch.save(state, tmp_path / "most.pt")
    settings = [f"training.start_from={tmp_path / 'most.pt'}", "training.start_strict=false"]
    train(config_of(tmp_path / "begun", *settings), hooks=[Begun()])
    count = len([*load_trained(run).models[0].parameters()])
    assert f"{count - 1} of {count} parameters taken, 99.9% of all weights" in caplog.text


@pytest.mark.parametrize("kind", ["checkpoint", "state_dict", "nnU-Net", "archive"])
def test_a_flipped_bit_is_harmless_or_refused(kind, run, tmp_path):
    """``torch.load`` compares no checksums: of 150 flips of latest.pt, which its first reader refused, 103 gave other
    weights by a second reader; of plain files 91 of 150, of nnU-Net's checkpoints 65 of 120."""
    file, read = tmp_path / "flipped", read_weights
    if kind == "checkpoint":
        whole = (run / "checkpoints" / LATEST).read_bytes()
    elif kind == "state_dict":
        torch.save(load_trained(run).models[0].state_dict(), file)
        whole = file.read_bytes()
    elif kind == "archive":
        whole = export(run, tmp_path / "model.zip").read_bytes()
    else:
        whole, read = NNUNET.read_bytes(), lambda path: read_checkpoint(path).weights
    file.write_bytes(whole)
    expected, draw, refused = read(file), random.Random(7), 0
    # Anywhere; in the first headers and the pickle; in the directory at the end.
    places = [
        *(draw.randrange(len(whole)) for _ in range(150)),
        *range(0, 600, 12),
        *range(len(whole) - 1000, len(whole), 20),
    ]
    for place in places:
        changed = bytearray(whole)
        changed[place] ^= 1 << draw.randrange(8)
        file.write_bytes(changed)
        try:
            found = read(file)
        except VolsegError:
            refused += 1
            continue
        for name in ("values", "average") if read is read_weights else ("it",):
            one, other = (found, expected) if name == "it" else (getattr(found, name), getattr(expected, name))
            assert one is other is None or equal(one, other), (place, name)
    assert refused > len(places) / 2


def test_no_bit_of_a_files_directory_changes_what_is_read(tmp_path):
    """A part that one bit marks as a folder passes each checksum, and torch gives what its memory held before."""
    state, file, refused = nn.Linear(3, 2).state_dict(), tmp_path / "weights.pt", 0
    torch.save(state, file)
    whole = file.read_bytes()
    name = b"weights/data/0"
    entry = whole.rindex(name) - 46  # in the directory at the end
    places = [*range(entry, entry + 46 + len(name)), *range(len(whole) - 98, len(whole))]
    for place in places:
        for bit in range(8):
            changed = bytearray(whole)
            changed[place] ^= 1 << bit
            file.write_bytes(changed)
            try:
                assert equal(read_weights(file).values, state), (place, bit)
            except VolsegError:
                refused += 1
    assert refused > 4 * len(places)


def damage(file):
    """Flip a bit of the largest tensor in a file of ``torch.save``."""
    with zipfile.ZipFile(file) as archive:
        part = max(archive.infolist(), key=lambda one: one.file_size)
        first = part.header_offset + 30 + len(part.filename) + 64 + part.file_size // 2
    whole = bytearray(file.read_bytes())
    whole[first] ^= 64
    file.write_bytes(whole)


def test_no_training_begins_with_a_damaged_file(run, config_of, tmp_path):
    """A checkpoint that its own reader refused was read by ``torch.load`` then, and the training went on."""
    save_checkpoint(load_checkpoint(run / "checkpoints" / LATEST), tmp_path / "damaged.pt")
    damage(tmp_path / "damaged.pt")
    with pytest.raises(CheckpointError, match=r"damaged\.pt is damaged or no file of torch\.save"):
        train(config_of(tmp_path / "begun", f"training.start_from={tmp_path / 'damaged.pt'}"))
    assert not (tmp_path / "begun").exists()


def test_a_checkpoint_of_another_format_is_not_taken_for_a_plain_file(run, tmp_path):
    """Its raw weights were taken under the key ``model``, and its average was left out, since no reader knew it."""
    state = load_checkpoint(run / "checkpoints" / LATEST)
    for change, message in (
        ({"format": 99}, "has format 99, this volseg reads 2"),
        ({"format": 2, "more": 1}, r"holds no training state of format 2: .*has \['more'\] besides"),
    ):
        torch.save({**state.as_checkpoint(), **change}, tmp_path / "other.pt")
        with pytest.raises(CheckpointError, match=message):
            read_weights(tmp_path / "other.pt")
    torch.save(state.as_checkpoint(), tmp_path / "plain.pt")  # as `Training.state_dict` returns it
    assert equal(read_weights(tmp_path / "plain.pt").average, state.average["average"])


def test_files_without_checksums_and_of_two_networks_are_refused(tmp_path):
    network = nn.Linear(2, 2)
    old = {"_use_new_zipfile_serialization": False}
    torch.save(network.state_dict(), tmp_path / "old.pt", **old)
    with pytest.raises(CheckpointError, match=r"Older files carry no checksums.*save it again: torch\.save"):
        read_weights(tmp_path / "old.pt")
    torch.save({"model": network.state_dict(), "state_dict": network.state_dict()}, tmp_path / "two.pt")
    with pytest.raises(CheckpointError, match="holds weights under state_dict and model; save the ones that you want"):
        read_weights(tmp_path / "two.pt")
    with zipfile.ZipFile(tmp_path / "twice.pt", "w") as archive:
        archive.writestr("archive/data.pkl", b"")
        with pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr("archive/data.pkl", b"")
    with pytest.raises(CheckpointError, match="it holds a part twice"):
        read_weights(tmp_path / "twice.pt")


def test_numbers_of_numpy_beside_weights_are_read(tmp_path):
    """They were refused, with the first line of torch's message, which ended in the middle of its sentence."""
    state = nn.Linear(2, 2).state_dict()
    torch.save(
        {"state_dict": state, "best": np.float64(0.5), "step": np.int64(3), "run": np.str_("x")}, tmp_path / "a.pt"
    )
    assert equal(read_weights(tmp_path / "a.pt").values, state)
    torch.save({"state_dict": state, "curve": np.zeros(3)}, tmp_path / "b.pt")
    with pytest.raises(
        CheckpointError, match=r"anybody's code \(GLOBAL numpy\.\w+\.multiarray\._reconstruct\)\. If you"
    ):
        read_weights(tmp_path / "b.pt")


PREFIXES = ["module.", "model.", "network.", "_orig_mod.", "module._orig_mod.", "model.network.module."]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_prefixes_of_all_names_are_left_out_where_the_bare_names_are_the_networks(prefix):
    """``module.`` was left out and ``model.`` was not, so that a training refused weights that fit."""
    network = nn.Sequential(nn.Conv3d(1, 2, 3), nn.Conv3d(2, 2, 1))
    state = network.state_dict()
    assert equal(strip_prefixes({prefix + name: value for name, value in state.items()}, state), state)
    mixed = {prefix + name if name.startswith("0.") else name: value for name, value in state.items()}
    assert strip_prefixes(mixed, state) is mixed
    own = {f"{prefix}{name}": value for name, value in state.items()}  # of a network that is called so itself
    assert strip_prefixes(own, own) is own
    assert equal(strip_prefixes({f"module.{name}": value for name, value in own.items()}, own), own)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv3d(1, 1, 1), nn.Conv3d(1, 1, 1)
        self.b.weight = self.a.weight


def tear(state):
    return {**state, "b.weight": state["b.weight"] + 1}


def test_two_names_of_one_tensor_with_two_values_are_refused(run, tmp_path):
    """The last name won: a file of a run that was exported with raw weights under the second names was read so."""
    said = re.escape("a.weight and b.weight are two names of one tensor of the network, but the weights hold different")
    for load in (
        load_weights,
        lambda network, state: transfer_weights(network, state, stems={}, heads={}, strict=False),
    ):
        network = Tied()
        before = network.a.weight.clone()
        with pytest.raises(CheckpointError, match=said):
            load(network, tear(network.state_dict()))
        assert torch.equal(network.a.weight, before)
    whole = dict(load_trained(run).models[0].state_dict())
    alias = next(name for name in whole if "skip_layers" in name and whole[name].is_floating_point())
    assert export(run, tmp_path / "model.zip")
    with zipfile.ZipFile(tmp_path / "model.zip") as archive:
        members = {name: archive.read(name) for name in archive.namelist() if name != "manifest.json"}
    members["0/weights.safetensors"] = pack_tensors({**whole, alias: whole[alias] + 1})
    write_archive(tmp_path / "torn.zip", {"networks": 1, "checkpoint": "latest"}, members)
    with pytest.raises(CheckpointError, match=r"torn\.zip: .*are two names of one tensor of the network"):
        load_trained(tmp_path / "torn.zip")


def training_of(network, folder, decay=0.5):
    class Batches:
        def __len__(self):
            return 2

        def epoch(self, number, start=0):
            for position in range(start, 2):
                torch.manual_seed(position)
                yield {"image": torch.randn(1, 1, 4, 4, 4), "label": torch.zeros(1, 4, 4, 4).long(), "case": ["a"]}

    return Training(
        Named(network, inputs=["image"], outputs=["logits"]),
        Named(
            lambda logits, label: logits.square().mean() + 0 * label.sum(), inputs=["logits", "label"], outputs=["loss"]
        ),
        torch.optim.SGD(network.parameters(), lr=0.1),
        Batches(),
        epochs=1,
        average_decay=decay,
        hooks=[Checkpoints(folder)],
    )


class Keeps(nn.Module):
    """A network whose ``state_dict`` holds more than tensors, and copies of its parameters."""

    def __init__(self):
        super().__init__()
        self.conv, self.said = nn.Conv3d(1, 2, 1), "nothing"

    def forward(self, image):
        return self.conv(image)

    def get_extra_state(self):
        return {"said": self.said}

    def set_extra_state(self, state):
        self.said = state["said"]


def copy_all(module, state, prefix, metadata):
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            state[name] = value.clone()


@pytest.mark.parametrize("copies", [False, True])
def test_a_network_that_keeps_more_than_tensors_gets_all_of_it_back(copies, tmp_path):
    """In `FitGrid` such a network could not be loaded at all; as initial weights what was no tensor had "no place"."""
    made = []
    for _ in range(3):
        network = Keeps()
        if copies:
            network.register_state_dict_post_hook(copy_all)
        made.append(FitGrid(network, (1, 1, 1)))
    made[0].net.said = "something"
    training_of(made[0], tmp_path).run()
    state = load_checkpoint(tmp_path / LATEST)
    load_weights(made[1], state.model, state.averaged)
    transfer_weights(made[2], state.model, state.averaged, stems={}, heads={})
    for network in made[1:]:
        assert network.net.said == "something"
        assert all(torch.equal(value, state.averaged[name]) for name, value in network.named_parameters())
    with pytest.raises(CheckpointError, match="_extra_state holds dict, which safetensors has no name for"):
        pack_tensors(made[0].state_dict())


def test_an_average_of_tied_parameters_is_not_split_by_a_network_that_does_not_tie_them():
    """The second parameter was begun with raw weights and the first one with the average."""
    network = Tied()
    state = network.state_dict()
    average = {name: value + 1 for name, value in network.named_parameters()}
    apart = Tied()
    apart.b.weight = nn.Parameter(apart.b.weight.detach().clone())
    with pytest.raises(CheckpointError, match=r"hold no average of the parameter b\.weight"):
        load_weights(apart, state, average)


def test_a_torn_checkpoint_is_not_gone_on_with(tmp_path):
    class Net(Tied):
        def forward(self, image):
            return self.b(self.a(image))

    training = training_of(Net(), tmp_path)
    training.run()
    state = training.state_dict()
    with pytest.raises(CheckpointError, match=r"model: a\.weight and b\.weight are two names of one tensor"):
        training_of(Net(), tmp_path).load_state_dict({**state, "model": tear(state["model"])})


def test_tensors_without_a_checksum_are_refused(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(pack_tensors(nn.Linear(2, 2).state_dict()))
    with pytest.raises(ConfigError, match="carries no checksums"):
        read_weights(tmp_path / "a.safetensors")


def test_a_bundles_weights_are_those_of_the_run(run, tmp_path):
    state = torch.load(export(run, tmp_path / "bundle", to="monai-bundle") / "models" / "model.pt", weights_only=True)
    plain = DynUNet(3, 1, 3, [3, 3, 3], [1, 2, 2], [2, 2], filters=[4, 8, 8], norm_name="batch")
    plain.load_state_dict(state)
    assert equal(plain.state_dict(), load_trained(run).models[0].state_dict())
    assert equal(read_weights(tmp_path / "bundle" / "models" / "model.pt").values, plain.state_dict())


@pytest.mark.parametrize(
    ("kind", "told"),
    {
        "complex": "complex64",
        "whole numbers": "int8",
        "truth values": "bool",
        "quantised": "qint8 .quantised.",
        "sparse": "sparse_coo",
        "without values": "without values",
    }.items(),
)
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.filterwarnings("ignore:.*quantized tensor creation:UserWarning")
def test_values_that_are_no_plain_numbers_are_refused_for_a_network_of_floats(kind, told, is_tied):
    """A complex weight lost its imaginary part, an integer of a quantised network its scale, without an error. Sparse
    weights and those without values ended in errors of torch's, and quantised ones of a tied layer ended the process.
    """
    made = {
        "complex": lambda: torch.complex(torch.ones(3, 3), torch.ones(3, 3)),
        "whole numbers": lambda: torch.ones(3, 3, dtype=torch.int8),
        "truth values": lambda: torch.ones(3, 3, dtype=torch.bool),
        "quantised": lambda: torch.quantize_per_tensor(torch.ones(3, 3), 0.1, 0, torch.qint8),
        "sparse": lambda: torch.eye(3).to_sparse(),
        "without values": lambda: torch.empty(3, 3, device="meta"),
    }
    network = tied() if is_tied else nn.Sequential(nn.Linear(3, 3, bias=False))
    values = {name: made[kind]() for name in network.state_dict()}
    with pytest.raises(CheckpointError, match=f"0.weight holds .*{told}.* the network needs float32"):
        load_weights(network, values)
    with pytest.raises(CheckpointError, match=f"0.weight holds .*{told}.* the network needs float32"):
        transfer_weights(network, values, stems={}, heads={})


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("is_tied", [False, True])
def test_floats_of_other_sizes_are_taken(dtype, is_tied):
    """Weights of eight bits ended in an error of torch's, as it cannot say whether they are finite."""
    network = tied() if is_tied else nn.Sequential(nn.Linear(3, 3, bias=False))
    weight = torch.tensor([[0.5, -2.0, 0.25], [1.0, 0.0, 4.0], [-0.125, 8.0, 3.0]])
    values = {name: weight.to(dtype) for name in network.state_dict()}
    transfer_weights(network, values, stems={}, heads={})
    assert all(torch.equal(value, weight) for value in network.state_dict().values())
    load_weights(network, {name: (-weight).to(dtype) for name in values})
    assert all(torch.equal(value, -weight) for value in network.state_dict().values())


def tied():
    layer = nn.Linear(3, 3, bias=False)
    return nn.Sequential(layer, layer)
