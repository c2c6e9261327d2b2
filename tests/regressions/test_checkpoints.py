"""Checkpoints and weights that were damaged, unusual, or mistaken for others."""

import copy
import os
import random
import re
import shutil
import threading
import zipfile
from functools import partial
from itertools import product
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from tiny_trainings import DYNUNET, Batches, FirstWeights, config_factory, make_training
from torch import nn
from training_hooks import At

from volseg.checkpointing import file
from volseg.checkpointing.file import BEST, LATEST, PREVIOUS
from volseg.errors import CheckpointError, NonFiniteLossError, VolsegError
from volseg.exchange.nnunet.folder import read_checkpoint
from volseg.exchange.tensors import pack_tensors
from volseg.experiment import train
from volseg.experiment.prediction.sources import load_trained, read_weights
from volseg.models.fit_grid import FitGrid
from volseg.models.weights import load_weights, strip_prefixes, transfer_weights
from volseg.workflow import Checkpoints, Hook, Training, load_checkpoint, save_checkpoint


def made(optimizer="Adam", width=4, **options):
    torch.manual_seed(3)
    net = nn.Sequential(nn.Conv3d(1, width, 3, padding=1), nn.BatchNorm3d(width), nn.Conv3d(width, 2, 1))
    steps = getattr(torch.optim, optimizer)(net.parameters(), lr=0.01)
    options = {"epochs": 2, "average_decay": 0.9, **options}
    return Training(net, nn.functional.cross_entropy, steps, Batches(2), **options)


def equal(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


@pytest.fixture(scope="module")
def trained():
    training = made()
    training.run()
    return training


MISSING = object()
ODD = [(name, value) for name in made().state_dict() for value in (MISSING, None, 7, "x", [None], {3: 4})]
ODD += [("average", value) for value in ({}, {"updates": 1}, {"average": 1, "updates": 1}, {"average": {}})]


@pytest.mark.parametrize(("name", "value"), ODD, ids=[f"{n}: {'missing' if v is MISSING else v}" for n, v in ODD])
def test_odd_parts_are_told_by_their_name(trained, tmp_path, name, value):
    """14 of 66 such checkpoints ended in a KeyError, TypeError or ValueError."""
    content = {"format": 2, **trained.state_dict()}
    allowed = {("average", None), ("best", None), ("steps_done", 7), ("epoch", 7)}
    if (name, None if value is None else value) in [one for one in allowed if not isinstance(value, dict | list)]:
        pytest.skip("a state may have that")
    content.pop(name) if value is MISSING else content.update({name: value})
    torch.save(content, tmp_path / LATEST)
    with pytest.raises(CheckpointError, match=name):
        made().load_state_dict(load_checkpoint(tmp_path / LATEST))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["optimizer"].update(state={}), r"optimizer: after 6 steps parameter 0 lacks the exp_avg"),
        (lambda c: c["optimizer"]["state"][2].pop("step"), r"optimizer: .*step"),
        (lambda c: c["optimizer"].update(param_groups=[]), r"optimizer: .*param.* groups"),
        (lambda c: c["random"].pop("numpy"), r"random: KeyError: 'numpy'"),
        (lambda c: c["random"].update(torch=torch.ones(3)), r"random: "),
        (lambda c: c["average"].update(average={}), r"average: "),
        (lambda c: c["model"].popitem(), r"model: "),
        (lambda c: c["cases"].append(["x"]), r"cases: 1 batches, but position is 0"),
        (lambda c: c.update(position=2), r"losses: 0 batches, but position is 2"),
    ],
)
def test_what_only_a_training_can_judge_is_told_by_its_name_too(trained, tmp_path, change, message):
    """An empty optimizer state was accepted, and Adam started again."""
    path = save_checkpoint(trained.state(), tmp_path / LATEST)
    content = torch.load(path, weights_only=True)
    change(content)
    torch.save(content, path)
    with pytest.raises(CheckpointError, match=message):
        made().load_state_dict(load_checkpoint(path))


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam"])
def test_what_every_optimizer_remembers_is_whole(optimizer):
    training = made(optimizer)
    training.run()
    made(optimizer).load_state_dict(training.state())


def test_a_checkpoint_is_written_behind_each_whole_step_and_the_one_before_is_kept(tmp_path):
    """A SIGKILL lost the training since the last epoch. Batches 1 and 2 share a step; batch 3 has its own."""
    seen = set()

    class Look(Hook):
        def on_batch_end(self, training, fields):
            checkpoints.finish()
            if (tmp_path / LATEST).exists():
                seen.add(load_checkpoint(tmp_path / LATEST).progress)

    checkpoints = Checkpoints(tmp_path, every_minutes=0)
    made(accumulate=2, epochs=1, hooks=[checkpoints, Look()]).run()
    assert seen == {(0, 2), (0, 3)}
    assert load_checkpoint(tmp_path / LATEST).progress == (1, 0)
    assert load_checkpoint(tmp_path / PREVIOUS).progress == (0, 3)


@pytest.fixture
def threads_start():
    """Return an event that delays every new thread, as on a busy machine."""
    event = threading.Event()

    def hold(*call):
        event.wait()

    threading.settrace(hold)
    yield event
    threading.settrace(None)


@pytest.mark.parametrize("start", ["at once", "late"])
def test_weights_that_are_no_numbers_never_replace_good_ones(tmp_path, threads_start, start):
    """A loss is looked at before its step, and a state after it; of two checkpoints one would soon be left.

    Where the thread began late the good one was not even written: it waited, and the bad one took its place.
    """
    training = made(epochs=1)
    checkpoints = Checkpoints(tmp_path, every_minutes=0)

    def spoil():
        with torch.no_grad():
            next(training.network.parameters()).fill_(torch.nan)

    class Start(Hook):
        def on_epoch_end(self, training, record):
            threads_start.set()

    if start == "at once":
        threads_start.set()
    training.hooks = [At(0, 3, spoil), checkpoints, Start()]
    with pytest.raises(NonFiniteLossError, match=r"0\.weight contains NaN after epoch"):
        training.run()
    assert load_checkpoint(tmp_path / LATEST).progress in [(0, 1), (0, 2)]


def test_an_error_lets_the_checkpoint_that_is_written_come_to_its_end(tmp_path, monkeypatch):
    """An error of a failed copy came before the wait for the writer, which died with the process."""
    is_failed = threading.Event()
    checkpoints = Checkpoints(tmp_path, every_minutes=0, require_folder=is_failed.wait)
    training = made()

    def fail():
        fault = RuntimeError("CUDA error: an illegal memory access was encountered")
        monkeypatch.setattr(file, "copy_to_host", mock.Mock(side_effect=fault))
        is_failed.set()
        checkpoints._take(training, BEST)

    training.hooks = [checkpoints, At(0, 1, fail)]
    with pytest.raises(RuntimeError, match="illegal memory access"):
        training.run()
    assert load_checkpoint(tmp_path / LATEST).progress == (0, 1)
    assert not [thread for thread in threading.enumerate() if thread.name == "checkpoint writer"]


def test_a_folder_that_is_taken_away_in_the_middle_of_a_writing_is_told_as_that(tmp_path):
    """The error blamed the disk."""
    folder = tmp_path / "run"

    def require():
        if folder.exists():
            raise InterruptedError("the folder was replaced")
        folder.touch()

    with pytest.raises(InterruptedError, match="the folder was replaced"):
        made(epochs=1, hooks=[Checkpoints(folder, every_minutes=60, require_folder=require)]).run()


def test_a_folder_in_the_place_of_a_checkpoint_is_told_and_left(trained, tmp_path):
    (tmp_path / LATEST / "inside").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"latest\.pt is not a file"):
        load_checkpoint(tmp_path / LATEST)
    with pytest.raises(CheckpointError, match=r"latest\.pt could not be written"):
        save_checkpoint(trained.state(), tmp_path / LATEST, previous=tmp_path / PREVIOUS)
    assert os.listdir(tmp_path) == [LATEST]
    assert os.listdir(tmp_path / LATEST) == ["inside"]


def test_no_file_is_larger_than_what_is_in_it(tmp_path):
    """Parameters that are slices of one storage, as those of a flat buffer, were written with the whole of it."""
    training = made(average_decay=None)
    flat = torch.zeros(1_000_000)
    weight = training.network[0].weight
    weight.data = flat[: weight.numel()].view(weight.shape)
    training.hooks = [Checkpoints(tmp_path)]
    training.run()
    assert (tmp_path / LATEST).stat().st_size < 100_000
    assert load_checkpoint(tmp_path / LATEST).model["0.weight"].untyped_storage().nbytes() == 4 * weight.numel()


def test_the_best_checkpoint_stays_that_of_its_epoch(tmp_path):
    class Scored:
        def __init__(self):
            self.score, self.scores = 1.0, {}

        def __call__(self):
            self.score /= 2
            return self

    seen = []

    class Keep(Hook):
        def on_best(self, training, record):
            seen.append({name: value.clone() for name, value in training.network.state_dict().items()})

    made(epochs=3, validation=Scored(), hooks=[Checkpoints(tmp_path), Keep()]).run()
    best = load_checkpoint(tmp_path / BEST)
    assert best.progress == (1, 0)
    assert len(seen) == 1
    assert all(torch.equal(best.model[name], value) for name, value in seen[0].items())


def test_a_hook_that_fails_at_the_end_does_not_keep_others_from_saving(tmp_path):
    """Hooks ran in turn until one raised an error, and the checkpoints come last."""

    class Fails(Hook):
        def on_training_end(self, training):
            raise InterruptedError("at the end")

    with pytest.raises(InterruptedError, match="at the end"):
        made(hooks=[Fails(), Checkpoints(tmp_path)]).run()
    assert load_checkpoint(tmp_path / LATEST).progress == (2, 0)
    assert not [thread for thread in threading.enumerate() if thread.name == "checkpoint writer"]


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_training_goes_on_in_another_memory_layout(optimizer, fused):
    """Fused optimizers read momentum in the order of the parameters: on a CPU silently, whatever its layout is.

    Two replicas on GPUs that went on as two slabs, which have channels last, ended in torch's error instead.
    """

    def training(channels_last):
        torch.manual_seed(3)
        net = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, 2, 3, padding=1))
        net.to(memory_format=torch.channels_last_3d if channels_last else torch.contiguous_format)
        options = {"momentum": 0.9} if optimizer == "SGD" else {}
        steps = getattr(torch.optim, optimizer)(net.parameters(), lr=0.1, fused=fused, **options)
        return Training(net, nn.functional.cross_entropy, steps, Batches(2), epochs=2)

    first = training(channels_last=False)
    first.epochs = 1
    first.run()
    state, weights = first.state_dict(), []
    for channels_last in (False, True):
        going_on = training(channels_last)
        going_on.load_state_dict(copy.deepcopy(state))
        going_on.run()
        weights.append([parameter.detach().contiguous() for parameter in going_on.network.parameters()])
    torch.testing.assert_close(weights[0], weights[1])


# Exported and reloaded weights differed from those of the run, and damaged files were read without an error.


NNUNET = Path(__file__).parents[1] / "exchange" / "nnunet" / "model" / "fold_0" / "checkpoint_final.pth"


@pytest.fixture(scope="module")
def config_of(tmp_path_factory):
    make = config_factory(tmp_path_factory.mktemp("weights"))
    return lambda output, *settings: make(output, DYNUNET, *settings)


@pytest.fixture(scope="module")
def trained_run(config_of, tmp_path_factory):
    """Return the shared folder of a trained run with averaged weights."""
    return train(config_of(tmp_path_factory.mktemp("run") / "run")).folder.path


@pytest.mark.parametrize(("ending", "share"), [("", "100.0"), ("output_block.conv.conv.bias", "99.9")])
def test_the_log_counts_each_parameter_once_and_rounds_the_share_down(
    ending, share, trained_run, config_of, tmp_path, caplog
):
    """The log said "100.0% of all weights" although 47 of 49 parameters had raw weights, not averages."""
    caplog.set_level("INFO", "volseg.experiment.starting")
    network = load_trained(trained_run).models[0]
    state = {name: value for name, value in network.state_dict().items() if not (ending and name.endswith(ending))}
    torch.save(state, tmp_path / "most.pt")
    settings = [f"training.start_from={tmp_path / 'most.pt'}", "training.start_strict=false"]
    train(config_of(tmp_path / "begun", *settings), hooks=[FirstWeights()])
    count = len([*network.parameters()])
    assert f"{count - bool(ending)} of {count} parameters loaded, {share}% of all weights" in caplog.text


def count_refused(read, file, contents):
    """Write contents to a file, require of each the same weights or a refusal, and return the number of refusals."""
    expected, refused = read(file), 0
    for number, content in enumerate(contents):
        file.write_bytes(content)
        try:
            found = read(file)
        except VolsegError as fault:
            refused += str(file) in str(fault)
        else:
            assert all(map(equal, found, expected)), number
    return refused


def flip(whole, places):
    """Yield a content with one bit of it flipped at each place."""
    for place, bit in places:
        changed = bytearray(whole)
        changed[place] ^= 1 << bit
        yield changed


def read_parts(file):
    weights = read_weights(file)
    return [weights.values, weights.average or {}]


READERS = {
    "checkpoint": lambda path: [load_checkpoint(path).as_checkpoint()],
    "weights of a checkpoint": read_parts,
    "state_dict": read_parts,
    "nnU-Net": lambda path: [read_checkpoint(path).weights],
}


@pytest.mark.parametrize("kind", READERS)
def test_damage_is_harmless_or_refused(kind, trained, tmp_path):
    """``torch.load`` compares no checksums. After 150 flips in latest.pt, 103 gave other weights; in plain files 91 of
    150, in nnU-Net's checkpoints 65 of 120."""
    file, draw = tmp_path / "damaged", random.Random(7)
    if kind == "state_dict":
        torch.save(made(width=30).network.state_dict(), file)
    elif kind == "nnU-Net":
        shutil.copy(NNUNET, file)
    else:
        save_checkpoint(trained.state(), file)
    whole, size = file.read_bytes(), file.stat().st_size
    # Anywhere; in the first headers and the pickle; in the directory at the end.
    places = [*(draw.randrange(size) for _ in range(75)), *range(0, 600, 24), *range(size - 1000, size, 40)]
    flips = flip(whole, [(place, draw.randrange(8)) for place in places])
    assert count_refused(READERS[kind], file, flips) > len(places) / 2
    file.write_bytes(whole)
    cut_or_added = [*(whole[: size * part // 9] for part in range(9)), whole + b"x" * 99, b"x" * 64 + whole]
    assert count_refused(READERS[kind], file, cut_or_added) >= 9


def test_no_bit_of_the_zip_directory_changes_the_weights(tmp_path):
    """One bit marks a part as a folder. Such a part passes its checksum, and torch returns uninitialised memory."""
    file, name = tmp_path / "weights.pt", b"weights/data/0"
    torch.save(nn.Linear(3, 2).state_dict(), file)
    whole = file.read_bytes()
    entry = whole.rindex(name) - 46  # in the directory at the end
    places = [*range(entry, entry + 46 + len(name)), *range(len(whole) - 98, len(whole))]
    assert count_refused(read_parts, file, flip(whole, product(places, range(8)))) > 4 * len(places)


def test_no_training_starts_with_a_damaged_file(trained_run, config_of, tmp_path):
    """The reader of checkpoints refused the file, then ``torch.load`` read it, and the training went on."""
    content = bytearray((trained_run / "checkpoints" / LATEST).read_bytes())
    largest = max(load_checkpoint(trained_run / "checkpoints" / LATEST).model.values(), key=torch.Tensor.numel)
    content[content.index(largest.numpy().tobytes())] ^= 64
    (tmp_path / "damaged.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"damaged\.pt is damaged, or torch\.save did not write it"):
        train(config_of(tmp_path / "begun", f"training.start_from={tmp_path / 'damaged.pt'}"))
    assert not (tmp_path / "begun").exists()


def test_a_checkpoint_of_another_format_is_refused(trained_run, tmp_path):
    """It was read as a file of another program: raw weights under the key ``model``, without the average."""
    state = load_checkpoint(trained_run / "checkpoints" / LATEST)
    whole = state.as_checkpoint()
    for content, message in (
        ({**whole, "format": 99}, "has format 99, not 2"),
        ({**whole, "format": 2, "more": 1}, r"is not a training state of format 2: .*unknown keys \['more'\]"),
        ({name: value for name, value in whole.items() if name != "optimizer"}, r"missing keys \['optimizer'\]"),
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
    with pytest.raises(CheckpointError, match="contains weights under state_dict and model; save only one of them"):
        read_weights(tmp_path / "two.pt")
    (tmp_path / "a.safetensors").write_bytes(pack_tensors(network.state_dict()))
    assert equal(read_weights(tmp_path / "a.safetensors").values, network.state_dict())
    with zipfile.ZipFile(tmp_path / "twice.pt", "w") as archive:
        archive.writestr("archive/data.pkl", b"")
        with pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr("archive/data.pkl", b"")
    with pytest.raises(CheckpointError, match="it contains a part twice"):
        read_weights(tmp_path / "twice.pt")


def test_numbers_of_numpy_beside_weights_are_read(tmp_path):
    """They were refused, with half of the first sentence of torch's message."""
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


def test_two_names_of_one_tensor_with_two_values_are_refused():
    """The value of the last name was loaded, such as the raw weights in a file that an older volseg exported."""
    said = re.escape("a.weight and b.weight are two names of one tensor of the network, but the weights have different")
    for load in (load_weights, partial(transfer_weights, stems={}, heads={}, strict=False)):
        network = Tied()
        before = network.a.weight.clone()
        with pytest.raises(CheckpointError, match=said):
            load(network, tear(network.state_dict()))
        assert torch.equal(network.a.weight, before)


class Keeps(nn.Module):
    """A network whose ``state_dict`` contains more than tensors."""

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
    """In `FitGrid` such a network could not be loaded, and ``start_from`` refused its extra state."""
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
    with pytest.raises(CheckpointError, match=r"cannot store dict, the type of .*_extra_state"):
        pack_tensors(made[0].state_dict())


def test_an_average_of_tied_parameters_is_refused_by_a_network_that_does_not_tie_them():
    """The first parameter got the average and the second one raw weights."""
    network = Tied()
    state = network.state_dict()
    average = {name: value + 1 for name, value in network.named_parameters()}
    apart = Tied()
    apart.b.weight = nn.Parameter(apart.b.weight.detach().clone())
    with pytest.raises(CheckpointError, match=r"have no average of the parameter b\.weight"):
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
        with pytest.raises(CheckpointError, match=f"0.weight is .*{kind}.* the network needs float32"):
            load(network, values)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("times", [1, 2])
def test_floats_of_other_sizes_are_loaded(dtype, times):
    """8-bit weights ended in an error of torch, which cannot test whether they are finite."""
    network = one_layer(times)
    weight = torch.tensor([[0.5, -2.0, 0.25], [1.0, 0.0, 4.0], [-0.125, 8.0, 3.0]])
    for sign, load in ((1, load_weights), (-1, partial(transfer_weights, stems={}, heads={}))):
        load(network, {name: (sign * weight).to(dtype) for name in network.state_dict()})
        assert all(torch.equal(value, sign * weight) for value in network.state_dict().values())
