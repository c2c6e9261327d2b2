"""Exported and reloaded weights differed from those of the run, and damaged files were read without an error."""

import random
import re
import shutil
import zipfile
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_trainings import DYNUNET, FirstWeights, config_factory, make_training
from torch import nn

from volseg.checkpointing.file import LATEST
from volseg.errors import CheckpointError, VolsegError
from volseg.exchange.archive import write_archive
from volseg.exchange.nnunet.folder import read_checkpoint
from volseg.exchange.tensors import pack_tensors
from volseg.experiment import export, predict, train
from volseg.experiment.prediction.sources import load_trained, read_weights
from volseg.files import digest_file
from volseg.models import FitGrid
from volseg.models.weights import load_weights, strip_prefixes, transfer_weights
from volseg.workflow import load_checkpoint

NNUNET = Path(__file__).parents[1] / "exchange" / "nnunet" / "model" / "fold_0" / "checkpoint_final.pth"


@pytest.fixture(scope="module")
def config_of(tmp_path_factory):
    make = config_factory(tmp_path_factory.mktemp("weights"))
    return lambda output, *settings: make(output, DYNUNET, *settings)


@pytest.fixture(scope="module")
def run(config_of, tmp_path_factory):
    """Return the folder of a run with averaged weights, which tests must not change."""
    return train(config_of(tmp_path_factory.mktemp("run") / "run")).folder.path


@pytest.fixture(scope="module")
def images(config_of):
    return sorted((config_of("nowhere").data.root / "imagesTs").glob("*.nii.gz"))


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_an_exported_run_predicts_as_the_run(run, images, tmp_path):
    """The average replaced entries of a ``state_dict`` by name. MONAI's DynUNet has a second name for each layer, under
    which the exported file kept raw weights: 47 of 49 parameters were raw, and label maps differed."""
    archive = export(run, tmp_path / "model.zip")
    expected = load_trained(run).models[0].state_dict()
    assert equal(load_trained(archive).models[0].state_dict(), expected)
    maps = [predict(source, images, tmp_path / f"by_{source.name}").require_all() for source in (run, archive)]
    for case, path in maps[0].items():
        assert digest_file(path) == digest_file(maps[1][case])
    state = load_checkpoint(run / "checkpoints" / LATEST)
    assert any(not torch.equal(state.model[name], expected[name]) for name in expected if "skip_layers" in name)


@pytest.mark.parametrize(("ending", "share"), [("", "100.0"), ("output_block.conv.conv.bias", "99.9")])
def test_the_log_counts_each_parameter_once_and_rounds_the_share_down(ending, share, run, config_of, tmp_path, caplog):
    """The log said "100.0% of all weights" after 47 of 49 parameters had got raw weights instead of averages."""
    caplog.set_level("INFO", "volseg.experiment.starting")
    network = load_trained(run).models[0]
    state = {name: value for name, value in network.state_dict().items() if not (ending and name.endswith(ending))}
    torch.save(state, tmp_path / "most.pt")
    settings = [f"training.start_from={tmp_path / 'most.pt'}", "training.start_strict=false"]
    train(config_of(tmp_path / "begun", *settings), hooks=[FirstWeights()])
    count = len([*network.parameters()])
    assert f"{count - bool(ending)} of {count} parameters taken, {share}% of all weights" in caplog.text


def count_refused_flips(read, file, places):
    """Flip a bit at each place of a file, require the same weights or a refusal, and return the number of refusals."""
    whole, expected, refused = file.read_bytes(), read(file), 0
    for place, bit in places:
        changed = bytearray(whole)
        changed[place] ^= 1 << bit
        file.write_bytes(changed)
        try:
            found = read(file)
        except VolsegError:
            refused += 1
        else:
            assert all(map(equal, found, expected)), (place, bit)
    return refused


def read_parts(file):
    weights = read_weights(file)
    return [weights.values, weights.average or {}]


@pytest.mark.parametrize("kind", ["checkpoint", "state_dict", "nnU-Net", "archive"])
def test_a_flipped_bit_is_harmless_or_refused(kind, run, tmp_path):
    """``torch.load`` compares no checksums. After 150 flips in latest.pt, 103 gave other weights; in plain files 91 of
    150, in nnU-Net's checkpoints 65 of 120."""
    file, read, draw = tmp_path / "flipped", read_parts, random.Random(7)
    if kind == "state_dict":
        torch.save(load_trained(run).models[0].state_dict(), file)
    elif kind == "archive":
        file = export(run, tmp_path / "model.zip")
    else:
        shutil.copy(NNUNET if kind == "nnU-Net" else run / "checkpoints" / LATEST, file)
    if kind == "nnU-Net":
        read = lambda path: [read_checkpoint(path).weights]  # noqa: E731
    size = file.stat().st_size
    # Anywhere; in the first headers and the pickle; in the directory at the end.
    places = [*(draw.randrange(size) for _ in range(150)), *range(0, 600, 12), *range(size - 1000, size, 20)]
    refused = count_refused_flips(read, file, [(place, draw.randrange(8)) for place in places])
    assert refused > len(places) / 2


def test_no_bit_of_the_zip_directory_changes_the_weights(tmp_path):
    """One bit marks a part as a folder. Such a part passes its checksum, and torch returns uninitialised memory."""
    file, name = tmp_path / "weights.pt", b"weights/data/0"
    torch.save(nn.Linear(3, 2).state_dict(), file)
    whole = file.read_bytes()
    entry = whole.rindex(name) - 46  # in the directory at the end
    places = [*range(entry, entry + 46 + len(name)), *range(len(whole) - 98, len(whole))]
    refused = count_refused_flips(read_parts, file, product(places, range(8)))
    assert refused > 4 * len(places)


def test_no_training_starts_with_a_damaged_file(run, config_of, tmp_path):
    """The reader of checkpoints refused the file, then ``torch.load`` read it, and the training went on."""
    content = bytearray((run / "checkpoints" / LATEST).read_bytes())
    largest = max(load_checkpoint(run / "checkpoints" / LATEST).model.values(), key=torch.Tensor.numel)
    content[content.index(largest.numpy().tobytes())] ^= 64
    (tmp_path / "damaged.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"damaged\.pt is damaged or no file of torch\.save"):
        train(config_of(tmp_path / "begun", f"training.start_from={tmp_path / 'damaged.pt'}"))
    assert not (tmp_path / "begun").exists()


def test_a_checkpoint_of_another_format_is_refused(run, tmp_path):
    """It was read as a file of another program: raw weights under the key ``model``, without the average."""
    state = load_checkpoint(run / "checkpoints" / LATEST)
    whole = state.as_checkpoint()
    for content, message in (
        ({**whole, "format": 99}, "has format 99, this volseg reads 2"),
        ({**whole, "format": 2, "more": 1}, r"holds no training state of format 2: .*has \['more'\] besides"),
        ({name: value for name, value in whole.items() if name != "optimizer"}, r"it lacks \['optimizer'\]"),
    ):
        torch.save(content, tmp_path / "other.pt")
        with pytest.raises(CheckpointError, match=message):
            read_weights(tmp_path / "other.pt")
    torch.save(whole, tmp_path / "plain.pt")  # as `Training.state_dict` returns it
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
    (tmp_path / "a.safetensors").write_bytes(pack_tensors(network.state_dict()))
    assert equal(read_weights(tmp_path / "a.safetensors").values, network.state_dict())
    with zipfile.ZipFile(tmp_path / "twice.pt", "w") as archive:
        archive.writestr("archive/data.pkl", b"")
        with pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr("archive/data.pkl", b"")
    with pytest.raises(CheckpointError, match="it holds a part twice"):
        read_weights(tmp_path / "twice.pt")


def test_numbers_of_numpy_beside_weights_are_read(tmp_path):
    """They were refused, with the first line of torch's message, which ends in the middle of a sentence."""
    state = nn.Linear(2, 2).state_dict()
    torch.save(
        {"state_dict": state, "best": np.float64(0.5), "step": np.int64(3), "run": np.str_("x")}, tmp_path / "a.pt"
    )
    assert equal(read_weights(tmp_path / "a.pt").values, state)
    torch.save({"state_dict": state, "curve": np.zeros(3)}, tmp_path / "b.pt")
    with pytest.raises(
        CheckpointError, match=r"arbitrary code \(GLOBAL numpy\.\w+\.multiarray\._reconstruct\)\. If you"
    ):
        read_weights(tmp_path / "b.pt")


PREFIXES = ["module.", "model.", "network.", "_orig_mod.", "module._orig_mod.", "model.network.module."]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_prefixes_that_all_names_share_are_removed(prefix):
    """``module.`` was removed and ``model.`` was not, so a training refused weights that fit."""
    network = nn.Sequential(nn.Conv3d(1, 2, 3), nn.Conv3d(2, 2, 1))
    state = network.state_dict()
    assert equal(strip_prefixes({prefix + name: value for name, value in state.items()}, state), state)
    mixed = {prefix + name if name.startswith("0.") else name: value for name, value in state.items()}
    assert strip_prefixes(mixed, state) is mixed
    own = {f"{prefix}{name}": value for name, value in state.items()}  # the network's own names begin so
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
    """The value of the last name was loaded, such as the raw weights in a file that an older volseg exported."""
    said = re.escape("a.weight and b.weight are two names of one tensor of the network, but the weights hold different")
    for load in (load_weights, partial(transfer_weights, stems={}, heads={}, strict=False)):
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
    with pytest.raises(CheckpointError, match=r"torn\.zip is not of the .*are two names of one tensor of the network"):
        load_trained(tmp_path / "torn.zip")


class Keeps(nn.Module):
    """A network whose ``state_dict`` holds more than tensors."""

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
def test_the_extra_state_of_a_network_is_restored(copies, tmp_path):
    """In `FitGrid` such a network could not be loaded, and ``start_from`` said that its extra state has no place."""
    made = []
    for _ in range(3):
        network = Keeps()
        if copies:
            network.register_state_dict_post_hook(copy_all)
        made.append(FitGrid(network, (1, 1, 1)))
    made[0].net.said = "something"
    make_training(made[0], tmp_path, 2).run()
    state = load_checkpoint(tmp_path / LATEST)
    load_weights(made[1], state.model, state.averaged)
    transfer_weights(made[2], state.model, state.averaged, stems={}, heads={})
    for network in made[1:]:
        assert network.net.said == "something"
        assert all(torch.equal(value, state.averaged[name]) for name, value in network.named_parameters())
    with pytest.raises(CheckpointError, match="_extra_state holds dict, which safetensors has no name for"):
        pack_tensors(made[0].state_dict())


def test_an_average_of_tied_parameters_is_refused_by_a_network_that_does_not_tie_them():
    """The first parameter got the average and the second one raw weights."""
    network = Tied()
    state = network.state_dict()
    average = {name: value + 1 for name, value in network.named_parameters()}
    apart = Tied()
    apart.b.weight = nn.Parameter(apart.b.weight.detach().clone())
    with pytest.raises(CheckpointError, match=r"hold no average of the parameter b\.weight"):
        load_weights(apart, state, average)


def test_a_checkpoint_with_two_values_of_one_tensor_is_not_resumed(tmp_path):
    class Net(Tied):
        def forward(self, image):
            return self.b(self.a(image))

    training = make_training(Net(), tmp_path, 1)
    training.run()
    state = training.state_dict()
    with pytest.raises(CheckpointError, match=r"model: a\.weight and b\.weight are two names of one tensor"):
        make_training(Net(), tmp_path, 1).load_state_dict({**state, "model": tear(state["model"])})


ONES = torch.ones(3, 3)

REFUSED = {
    "complex64": lambda: torch.complex(ONES, ONES),
    "int8": ONES.char,
    "bool": ONES.bool,
    "qint8 .quantised.": lambda: torch.quantize_per_tensor(ONES, 0.1, 0, torch.qint8),
    "sparse_coo": ONES.to_sparse,
    "without values": lambda: ONES.to("meta"),
    "float64 .expanded to 8000000000000 bytes.": lambda: torch.zeros(1, dtype=torch.float64).expand(10**6, 10**6),
}


def one_layer(times):
    """Return a network that registers one layer several times."""
    return nn.Sequential(*[nn.Linear(3, 3, bias=False)] * times)


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.filterwarnings("ignore:.*quantized tensor creation:UserWarning")
def test_weights_of_another_kind_of_number_are_refused(kind, times):
    """A complex weight lost its imaginary part and a quantised integer its scale, without an error. Sparse, meta and
    expanded weights ended in errors of torch, and quantised weights of a tied layer ended the process."""
    network = one_layer(times)
    values = {name: REFUSED[kind]() for name in network.state_dict()}
    for load in (load_weights, partial(transfer_weights, stems={}, heads={})):
        with pytest.raises(CheckpointError, match=f"0.weight holds .*{kind}.* the network needs float32"):
            load(network, values)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("times", [1, 2])
def test_floats_of_other_sizes_are_loaded(dtype, times):
    """Weights of eight bits ended in an error of torch, which cannot tell whether they are finite."""
    network = one_layer(times)
    weight = torch.tensor([[0.5, -2.0, 0.25], [1.0, 0.0, 4.0], [-0.125, 8.0, 3.0]])
    for sign, load in ((1, load_weights), (-1, partial(transfer_weights, stems={}, heads={}))):
        load(network, {name: (sign * weight).to(dtype) for name in network.state_dict()})
        assert all(torch.equal(value, sign * weight) for value in network.state_dict().values())
