"""What a damaged or odd checkpoint did, and what it does now."""

import contextlib
import copy
import os
import random
import re
import resource
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import nn
from training_hooks import At, raising

from volseg.checkpointing import file
from volseg.checkpointing.file import BEST, LATEST, PREVIOUS
from volseg.errors import CheckpointError, NonFiniteLossError
from volseg.workflow import Checkpoints, EpochRecord, Hook, Training, load_checkpoint, save_checkpoint

pytestmark = pytest.mark.usefixtures("ready_python")


class Batches:
    def __len__(self):
        return 3

    def epoch(self, number, start=0):
        for position in range(start, 3):
            torch.manual_seed(10 * number + position)
            yield {"image": torch.randn(1, 1, 4, 4, 4), "label": torch.zeros(1, 4, 4, 4).long(), "case": ["a"]}


def made(optimizer="Adam", width=4, **options):
    torch.manual_seed(3)
    net = nn.Sequential(nn.Conv3d(1, width, 3, padding=1), nn.BatchNorm3d(width), nn.Conv3d(width, 2, 1))
    steps = getattr(torch.optim, optimizer)(net.parameters(), lr=0.01)
    options = {"epochs": 2, "average_decay": 0.9, **options}
    return Training(net, nn.functional.cross_entropy, steps, Batches(), **options)


def equal(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


def read(path):
    """Return what a checkpoint holds; None if it is refused by its name."""
    refusal = pytest.raises(CheckpointError, match=re.escape(str(path)))
    found = []
    with contextlib.suppress(pytest.fail.Exception), refusal:
        found.append(load_checkpoint(path).as_checkpoint())
    return found[0] if found else None


@pytest.fixture(scope="module")
def trained():
    training = made()
    training.run()
    return training


def test_every_flipped_bit_is_refused_or_changes_nothing(trained, tmp_path):
    """torch compares no checksum: of 300 flips 220 loaded with other weights, and a prediction was another one.

    Weights are most of a file, but not where it can be fooled: half of the flips lie in its directory at the end and in
    the headers of its parts.
    """
    path = save_checkpoint(trained.state(), tmp_path / LATEST)
    whole, content = path.read_bytes(), load_checkpoint(path).as_checkpoint()
    draw = random.Random(1)
    headers = [place + draw.randrange(60) for place in range(len(whole)) if whole[place : place + 2] == b"PK"]
    places = [draw.randrange(len(whole)) for _ in range(100)] + draw.choices(headers, k=100)
    refused = 0
    for place in places:
        damaged = bytearray(whole)
        damaged[min(place, len(whole) - 1)] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        found = read(path)
        assert found is None or equal(found, content), f"the flip at {place} changed something"
        refused += found is None
    assert refused > 100


def test_what_is_cut_off_or_added_is_refused_or_changes_nothing(trained, tmp_path):
    path = save_checkpoint(trained.state(), tmp_path / LATEST)
    whole, content = path.read_bytes(), load_checkpoint(path).as_checkpoint()
    for odd in (*(whole[: len(whole) * part // 9] for part in range(9)), whole + b"x" * 99, b"x" * 64 + whole):
        path.write_bytes(odd)
        found = read(path)
        assert found is None or equal(found, content)


MISSING = object()
ODD = [(name, value) for name in made().state_dict() for value in (MISSING, None, 7, "x", [None], {3: 4})]


@pytest.mark.parametrize(("name", "value"), ODD, ids=[f"{n}: {'missing' if v is MISSING else v}" for n, v in ODD])
def test_odd_parts_are_told_by_their_name(trained, tmp_path, name, value):
    """Of 66 such checkpoints 14 ended in a KeyError, TypeError or ValueError."""
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
        (lambda c: c["optimizer"].update(state={}), r"optimizer: after 6 steps it lacks the exp_avg .* of parameter 0"),
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
    """A state whose optimizer had forgotten everything was taken, and Adam began anew."""
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


def test_a_kill_in_mid_epoch_costs_what_is_trained_since_the_last_checkpoint(tmp_path):
    """``latest.pt`` was written at the end of an epoch, so that was what a SIGKILL cost, however long."""
    checkpoints = Checkpoints(tmp_path, every_minutes=0)
    wait = [At(0, position, checkpoints.finish) for position in (1, 2)]  # while it writes it takes no other
    with pytest.raises(InterruptedError):
        made(hooks=[checkpoints, *wait, At(0, 2, raising(InterruptedError))]).run()
    assert load_checkpoint(tmp_path / LATEST).progress == (0, 2)


def test_the_checkpoint_before_the_latest_is_kept(tmp_path):
    class Wait(Hook):
        def on_batch_end(self, training, fields):
            checkpoints.finish()

    checkpoints = Checkpoints(tmp_path, every_minutes=0)
    made(hooks=[checkpoints, Wait()]).run()
    assert load_checkpoint(tmp_path / LATEST).progress == (2, 0)
    assert load_checkpoint(tmp_path / PREVIOUS).progress == (1, 3)


def test_a_step_that_is_half_gathered_is_never_written(tmp_path):
    """Batches 1 and 2 share a step, and batch 3 has one of its own."""
    seen = set()

    class Look(Hook):
        def on_batch_end(self, training, fields):
            checkpoints.finish()
            if (tmp_path / LATEST).exists():
                seen.add(load_checkpoint(tmp_path / LATEST).progress)

    checkpoints = Checkpoints(tmp_path, every_minutes=0)
    made(accumulate=2, epochs=1, hooks=[checkpoints, Look()]).run()
    assert seen == {(0, 2), (0, 3)}


@pytest.fixture
def threads_start():
    """Return an event for which every new thread waits before its first line, as on a machine that has much to do."""
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
    with pytest.raises(NonFiniteLossError, match=r"0\.weight is not a number after epoch"):
        training.run()
    assert load_checkpoint(tmp_path / LATEST).progress in [(0, 1), (0, 2)]


def test_an_error_lets_the_checkpoint_that_is_written_come_to_its_end(tmp_path, monkeypatch):
    """A copy that a failed device never made raised before the writer was waited for, which ended with the process."""
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


FULL = """
import sys, pathlib, torch
sys.path.insert(0, {tests!r})
from test_checkpoints import made
from volseg.workflow import Checkpoints, Hook
from volseg.errors import CheckpointError
folder = pathlib.Path(sys.argv[1])
class Tell(Hook):
    def on_batch_end(self, training, fields):
        print(training.epoch, training.position, flush=True)
try:
    made(width=int(sys.argv[2]), epochs=50, hooks=[Checkpoints(folder, every_minutes=0), Tell()]).run()
except CheckpointError as fault:
    print("told", fault, flush=True)
"""


@pytest.fixture
def small_disk(tmp_path):
    """Return a folder on a disk of 2 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"no disk can be mounted here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def run_full(folder, width, **options):
    code = FULL.format(tests=os.path.dirname(__file__))
    command = [sys.executable, "-c", code, str(folder), str(width)]
    return subprocess.run(command, capture_output=True, encoding="utf-8", check=False, **options)


def test_a_full_disk_is_told_after_the_next_batch_and_the_good_checkpoints_stay(small_disk):
    """The checkpoint of 1.2 MB fits once: with the one before it would be two."""
    told = run_full(small_disk, 3000).stdout.splitlines()
    assert "latest.pt could not be written" in told[-1]
    assert "No space left on device" in told[-1]
    assert "the one written before is still there" in told[-1]
    assert len(told) < 150
    assert load_checkpoint(small_disk / LATEST).progress > (0, 0)
    assert sorted(os.listdir(small_disk)) == [LATEST]


def test_a_full_quota_is_told_too(tmp_path):
    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    told = run_full(tmp_path, 3000, preexec_fn=limit).stdout.splitlines()
    assert "latest.pt could not be written" in told[-1]
    assert "no earlier one exists" in told[-1]
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_told(small_disk, trained):
    save_checkpoint(trained.state(), small_disk / LATEST)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(CheckpointError, match=r"latest\.pt could not be written .*Read-only.*written before is still"):
        save_checkpoint(trained.state(), small_disk / LATEST)
    assert load_checkpoint(small_disk / LATEST).epoch == 2


def test_a_folder_that_is_taken_away_in_the_middle_of_a_writing_is_told_as_that(tmp_path):
    """The disk was said to refuse the file."""
    folder = tmp_path / "run"

    def require():
        if folder.exists():
            raise InterruptedError("the folder was replaced")
        folder.touch()

    with pytest.raises(InterruptedError, match="the folder was replaced"):
        made(epochs=1, hooks=[Checkpoints(folder, every_minutes=60, require_folder=require)]).run()


def test_a_folder_in_the_place_of_a_checkpoint_is_told_and_left(trained, tmp_path):
    (tmp_path / LATEST / "inside").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"latest\.pt is no file"):
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
    """The hooks were told one after the other until one raised, and the checkpoints come last."""

    class Fails(Hook):
        def on_training_end(self, training):
            raise InterruptedError("at the end")

    with pytest.raises(InterruptedError, match="at the end"):
        made(hooks=[Fails(), Checkpoints(tmp_path)]).run()
    assert load_checkpoint(tmp_path / LATEST).progress == (2, 0)
    assert not [thread for thread in threading.enumerate() if thread.name == "checkpoint writer"]


def test_a_record_with_odd_numbers_is_refused(trained, tmp_path):
    record = EpochRecord(epoch=0, losses={"loss": "low"}, learning_rate=0.1, seconds=1.0, seconds_waited=0.0)
    with pytest.raises(CheckpointError, match=r"history\.0\.losses\.loss: .* valid number"):
        load_checkpoint(save_checkpoint(replace(trained.state(), history=(record,)), tmp_path / LATEST))


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
        return Training(net, nn.functional.cross_entropy, steps, Batches(), epochs=2)

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
