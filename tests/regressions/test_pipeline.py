"""Pipelines that were silently wrong, or failed without a reason."""

import copy
import ctypes
import logging
import random
from collections import Counter
from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch
from beside_plain import RunLayers
from micro_batches import ROUND_OFF, assert_same_steps, conv, gradients, volumes
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from volseg.device.graph import describe_inputs
from volseg.errors import ParallelError, PartitionError
from volseg.parallel import ModelParallel
from volseg.parallel.pipeline import transfer
from volseg.parallel.pipeline.recorder import WARM_UP

TWO = ["cpu", "cpu:1"]
RECORDS = [False, True]


def chain(how: Callable[..., object], **more: object) -> RunLayers:
    return RunLayers(how, a=conv(), b=conv(), **more).double()


def pipeline(net: nn.Module, split_size: int = 2, record: bool = False, **options: object) -> ModelParallel:
    options = {"cuts": ["b"], **options}
    return ModelParallel(net, strategy="pipeline", devices=TWO, split_size=split_size, record=record, **options)


def of_numpy() -> list[int]:
    return np.random.get_state()[1].tolist()  # noqa: NPY002 (the global generator is what networks draw from)


def replaced(net: RunLayers, x: Tensor) -> Tensor:
    net.t = net.t + x.detach().mean()
    return net.b(net.a(x)) + net.t


def test_attempt_leaves_no_trace():
    """A refused recording left lists, generators and counters of hooks as its own runs of forward had made them."""
    net = chain(lambda net, x: (net.seen.append(1), net.b(net.a(x)) * float(x.new_ones(1)))[1])
    net.seen, called = [], []
    net.a.weight.register_hook(lambda gradient: called.append(1))
    model = pipeline(net, record=True)
    x = volumes(3)
    for _ in range(WARM_UP):
        model(x).sum().backward()
    before = torch.get_rng_state(), random.getstate(), of_numpy()
    model(x).sum().backward()
    assert not model.strategy.is_replaying
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), of_numpy())
    assert len(net.seen) == 2 * (WARM_UP + 1)
    assert len(called) == WARM_UP + 1


def test_a_module_with_two_names_is_recorded():
    """An attempt left its own parameters in the module, and took DynUNet for a network that changes them."""
    net = chain(lambda net, x: net.b(net.a(x)))
    net.other = nn.Sequential(net.a)
    model = assert_same_steps(net, [(volumes(),) for _ in range(WARM_UP + 2)], cuts=["b"], record=True, lr=0.1)
    assert model.strategy.is_replaying


# The last is of a tensor of inference mode, which counts no changes.
IN_FORWARD = {"other memory": lambda x: x.set_(x * 2), "inference": lambda x: x.add_(1.0)}


@pytest.mark.parametrize("change", IN_FORWARD)
def test_an_argument_that_forward_changes_is_changed_in_every_batch(change):
    """``set_`` gave it other memory, in which a recording did not look for it: its result was NaN."""
    model = pipeline(chain(lambda net, x: (IN_FORWARD[change](x), net.b(net.a(x)))[1]), record=True)
    x, found = volumes(2), []
    with torch.inference_mode() if change == "inference" else torch.no_grad():
        for _ in range(WARM_UP + 2):
            given = x.clone()
            found.append([model(given), given])
    torch.testing.assert_close(found, found[:1] * len(found), rtol=0, atol=0)
    assert not model.strategy.is_replaying


class Averaging(nn.BatchNorm3d):
    """A momentum of one over the number of batches, as a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        self.num_batches_tracked.add_(1)
        running = self.running_mean, self.running_var
        return F.batch_norm(x, *running, self.weight, self.bias, True, 1.0 / self.num_batches_tracked)


def test_a_replay_does_not_count_batches_too_late():
    net = chain(lambda net, x: net.b(net.bn(net.a(x))))
    net.bn = Averaging(net.a.out_channels).double()
    batches = [(volumes(),) for _ in range(WARM_UP + 3)]
    assert_same_steps(net, batches, cuts=["b"], record=True, lr=0.1, split_size=len(batches[0][0]))


def test_forward_that_keeps_something_is_not_replayed():
    """A network that keeps its features for the caller kept those of the recording."""
    net = chain(lambda net, x: (setattr(net, "features", net.a(x).detach()), net.b(net.a(x)))[1])
    model = pipeline(net, split_size=4, record=True)
    for _ in range(WARM_UP + 2):
        x = volumes()
        model(x)
        torch.testing.assert_close(net.features, net.a(x))


@pytest.mark.parametrize("record", RECORDS)
def test_forward_that_changes_its_argument(record):
    """A replay changed its own copy of the argument; the caller's stayed."""
    net = chain(lambda net, x: net.b(net.a(x.mul_(2))))
    with pytest.raises(PartitionError, match="forward changes an argument in place"):
        pipeline(net, split_size=2, record=record)(volumes())
    model = pipeline(net, split_size=4, record=record)
    for _ in range(WARM_UP + 2):
        x = volumes()
        doubled = x * 2
        model(x)
        assert torch.equal(x, doubled)


@pytest.mark.parametrize("grads", [True, False])
def test_forward_that_changes_what_micro_batches_share(grads):
    """A counter that went whole to each micro-batch was advanced by each of them."""
    net = chain(lambda net, x, time: net.b(net.a(x)) * time.add_(1))
    with torch.set_grad_enabled(grads), pytest.raises(PartitionError, match="or the next micro-batch may need it"):
        pipeline(net, cuts=None)(volumes(), torch.zeros(()).double())


class Settings:
    """Someone's configuration object."""

    alpha = 1.0


SETTINGS, SHARED = {"alpha": 1.0}, Settings()


def scaled_by_settings(net: RunLayers, x: Tensor) -> Tensor:
    return net.b(net.a(x) * net.settings.alpha) * SETTINGS["alpha"] * find_scale()


def find_scale() -> float:
    return SHARED.alpha


CHANGES: dict[str, Callable[[RunLayers], object]] = {
    "object": lambda net: setattr(net.settings, "alpha", 3.0),
    "global dictionary": lambda net: SETTINGS.update(alpha=3.0),
    "global object": lambda net: setattr(SHARED, "alpha", 3.0),
    "patched forward": lambda net: setattr(net.a, "forward", lambda x: nn.Conv3d.forward(net.a, x) * 3),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_recording_notices_what_forward_reads(kind, monkeypatch):
    """A replay used objects, globals and forwards of the time of recording."""
    monkeypatch.setitem(SETTINGS, "alpha", 1.0)
    monkeypatch.setattr(SHARED, "alpha", 1.0)

    def change(net: RunLayers, batch: int) -> None:
        if batch == WARM_UP + 1:
            CHANGES[kind](net)

    batches = [(volumes(),) for _ in range(WARM_UP + 6)]
    net = chain(scaled_by_settings, settings=Settings())
    model = assert_same_steps(net, batches, before=change, cuts=["b"], record=True)
    assert model.strategy.is_replaying


def test_loaded_state_has_no_notes_of_the_pipeline(tmp_path):
    """A buffer that forward replaces carried a note of its stage, and its file could not be loaded safely."""
    net = chain(replaced)
    net.register_buffer("t", torch.zeros(()).double())
    output = pipeline(net, split_size=4)(volumes())
    torch.save({"state": net.state_dict(), "output": output.detach()}, tmp_path / "state.pt")
    assert torch.equal(torch.load(tmp_path / "state.pt", weights_only=True)["state"]["t"], net.t)


def keeping(net: RunLayers, x: Tensor) -> Tensor:
    keeping.lengths.append(len(x))  # an attribute of a function is not watched
    net.kept = [net.a(x)]
    return net.b(net.kept[0])


keeping.lengths = []


@pytest.mark.parametrize(("was_trained", "asked"), [(False, 2), (True, 1)])  # before there is an attribute, and with it
def test_kept_features_do_not_ask_again(was_trained, asked):
    """Another number of samples runs once, not before every batch of a network that caches results.

    A network that was trained before, and keeps features with their history, could not be placed.
    """
    net = chain(keeping)
    if was_trained:
        net(volumes()).sum().backward()
    keeping.lengths.clear()
    model = pipeline(net)
    for _ in range(4):
        model(volumes())
    assert keeping.lengths.count(3) == asked
    assert keeping.lengths[-4:] == [2] * 4


def test_a_list_that_forward_refills_and_returns():
    """Outputs are looked at before the network gets its earlier state again."""
    net = chain(lambda net, x: (net.kept.clear(), net.kept.append(net.b(net.a(x))), net.kept)[2])
    net.kept = []
    reference, model = copy.deepcopy(net), pipeline(net)
    for x in (volumes(4), volumes(4)):
        torch.testing.assert_close(model(x)[0], reference(x)[0], **ROUND_OFF)


@pytest.mark.parametrize("split_size", [1, 2])
@pytest.mark.parametrize(
    ("second", "message"),
    [
        (lambda net, x: net.a.weight[: len(x)].mean((3, 4)), r"output 1 of the network has shape .* micro-batch of 3"),
        (lambda net, x: len(x), r"for a micro-batch of \d, but .* for another number of samples"),
        (lambda net, x: {"loss": x.mean()}, r"output 1 of the network has shape \(\) .*return per-sample"),
        (lambda net, x: object(), "output 1 of the network is object"),
        (
            lambda net, x: x if x.mean() > 0 else None,
            r"output 1 of the network is NoneType, \(2, 4, 4, 4\) torch.float64 in the micro-batches",
        ),
    ],
    ids=["as long as a micro-batch", "its number of samples", "a loss", "no tensor", "none of the first"],
)
def test_output_that_cannot_be_joined_is_refused(split_size, second, message):
    """A mean over a micro-batch of one was joined as a sample, and the first value was used for all."""
    x = torch.cat([-volumes(2).abs(), volumes(2).abs()])
    with pytest.raises(ParallelError, match=message):
        pipeline(chain(lambda net, x: (net.b(net.a(x)), second(net, x))), split_size)(x)


def test_output_of_another_mode_is_looked_at_again():
    """Whether outputs are per sample may depend on the mode."""
    net = chain(lambda net, x: net.b(net.a(x)) if net.training else net.b(net.a(x)).mean(0, keepdim=True))
    model = pipeline(net, split_size=1)
    model(volumes())
    with pytest.raises(ParallelError, match="for a micro-batch of 3"):
        model.eval()(volumes())


@pytest.mark.parametrize("record", RECORDS)
def test_argument_as_long_as_the_batch_by_accident(record):
    """A factor per channel, as many as samples, was cut with them; declared steps per sample still are."""
    net = chain(lambda net, x, gain, bias: net.b(net.a(x) * gain) + bias.view(-1, 1, 1, 1, 1))
    reference = copy.deepcopy(net)
    model = pipeline(net, split_size=1, record=record, batched=[0, "bias"])
    for _ in range(WARM_UP + 2):
        given = volumes(2), torch.randn(2, 1, 1, 1).double(), torch.randn(2).double()
        mine = [value.clone().requires_grad_() for value in given]
        theirs = [value.clone().requires_grad_() for value in given]
        actual, expected = (
            run(x, gain=gain, bias=bias) for run, (x, gain, bias) in ((model, mine), (reference, theirs))
        )
        torch.testing.assert_close(actual, expected, **ROUND_OFF)
        actual.square().sum().backward(), expected.square().sum().backward()
        torch.testing.assert_close([x.grad for x in mine], [x.grad for x in theirs], **ROUND_OFF)
    assert model.strategy.is_replaying == record


def test_argument_that_could_be_either_is_refused_until_it_is_declared():
    """The length does not determine which arguments have a row per sample."""
    net = chain(lambda net, x, table: net.b(net.a(x)) * table.mean())
    x, table = volumes(), torch.randn(4).double()
    with pytest.raises(ParallelError, match=r"number 0 .*, number 1 \(4,\) are as long as the batch.*batched=\["):
        pipeline(copy.deepcopy(net))(x, table)
    expected = net(x, table)
    torch.testing.assert_close(pipeline(copy.deepcopy(net), batched=[0])(x, table), expected, **ROUND_OFF)
    with pytest.raises(ParallelError, match="must have the same length; found none among number 0"):
        pipeline(net, batched=["image"])(x, table)


class Scaled(RunLayers):
    def forward(self, x, gain):
        return self.b(self.a(x)) * gain


@pytest.mark.parametrize("batched", [["x", "gain"], [0, 1]])
def test_declared_argument_may_be_passed_by_position_and_by_name(batched):
    """One that was declared by name and passed by position went whole to each micro-batch."""
    net, x, gain = Scaled(None, a=conv(), b=conv()).double(), volumes(), torch.rand(4, 1, 1, 1, 1).double()
    model, expected = pipeline(copy.deepcopy(net), batched=batched), net(x, gain)
    for actual in (model(x, gain), model(x, gain=gain), model(gain=gain, x=x)):
        torch.testing.assert_close(actual, expected, **ROUND_OFF)


def test_error_of_the_network_itself_is_its_own():
    """The search for the batch must not hide an error of the call."""
    with pytest.raises(RuntimeError, match=r"expected input.* to have 2 channels"):
        pipeline(chain(lambda net, x: net.b(net.a(x + 1))))(volumes(channels=3))


@pytest.mark.parametrize("record", RECORDS)
def test_first_layer_in_place_on_a_result(record):
    """An activation in place, first of all, on a result that needs a gradient was taken for one on a parameter."""
    net, before = chain(lambda net, x: net.b(net.a(F.relu(x, inplace=True)))), conv().double()
    with pytest.raises(PartitionError, match="forward changes an argument in place"):
        pipeline(copy.deepcopy(net), record=record)(before(volumes()))
    nets, stems = (net, copy.deepcopy(net)), (before, copy.deepcopy(before))
    model = pipeline(net, split_size=4, record=record)
    for _ in range(WARM_UP + 2):
        x = volumes()
        features = [stem(x) for stem in stems]
        outputs = [run(feature) for run, feature in zip((model, nets[1]), features, strict=True)]
        torch.testing.assert_close(*outputs, **ROUND_OFF)
        for output, feature in zip(outputs, features, strict=True):
            ((output * x).sum() + feature.square().sum()).backward()
        torch.testing.assert_close(*map(gradients, nets), **ROUND_OFF)
        torch.testing.assert_close(*map(gradients, stems), **ROUND_OFF)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Sequential(conv(), torch.jit.script(nn.ReLU())), "'1' .* scripted or compiled: pass the original"),
        (lambda: nn.Sequential(conv(), torch.compile(nn.ReLU())), "'1' .* scripted or compiled: pass the original"),
        (lambda: torch.compile(conv()), "the network itself .* is scripted or compiled"),
    ],
    ids=["scripted", "compiled", "compiled root"],
)
@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_modules_that_hide_what_they_do_are_refused(make, message):
    """They failed somewhere inside, with messages about hooks."""
    with pytest.raises(ParallelError, match=message):
        ModelParallel(make(), strategy="pipeline", devices=TWO, split_size=1)


X = torch.zeros(2)


class AllAlike(Enum):
    """Members that are equal to Python, and cannot be hashed."""

    TWO = 2.0
    FIVE = 5.0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AllAlike)


def test_members_that_are_equal_to_python_are_told_apart():
    """By ``==`` one recording served for both members of an enumeration."""
    assert describe_inputs((X, AllAlike.TWO)) != describe_inputs((X, AllAlike.FIVE))


def share(net: RunLayers, x: Tensor) -> Tensor:
    """Share the last gradient of ``b``'s stage with ``own``, to which autograd adds in place."""
    first = net.a(x)
    second = first * 2
    own = net.b(first)
    early = own.sin()
    return (early + (own + second)) * 1.0


class LateCopy:
    """A copy that a side stream makes when another stream waits for it, and not before."""

    def __init__(self, source: Tensor, room: Tensor) -> None:
        self.source, self.size, self.room = source.data_ptr(), source.nbytes, room

    def finish(self) -> None:
        if self.room is not None:
            ctypes.memmove(self.room.data_ptr(), self.source, self.size)
            self.room = None


def test_gradients_are_not_changed_before_a_side_stream_has_copied_them(monkeypatch):
    """Autograd added in place to a gradient while a copy to another GPU still read it.

    Random networks on two GPUs had wrong gradients, other ones each time.
    """

    def copy_late(tensor: Tensor, target: torch.device) -> tuple[Tensor, LateCopy | None]:
        room = torch.empty_like(tensor, device=target)
        if not tensor.is_contiguous() or not room.is_contiguous():
            return room.copy_(tensor), None
        return room, LateCopy(tensor, room)

    class Stream:
        wait_event = staticmethod(LateCopy.finish)

    stream = Stream()
    monkeypatch.setattr(transfer, "copy_between", copy_late)
    monkeypatch.setattr(transfer, "current_gpu_stream", lambda device: stream)
    monkeypatch.setattr(transfer, "note_use", lambda tensor, stream: None)
    assert_same_steps(chain(share), [(volumes(),)] * 3, split_size=1, devices=TWO, cuts=["b"])


def test_parameters_that_change_before_backward_are_refused():
    """A replay computed gradients from activations of the old weights and the new weights."""
    net = chain(lambda net, x: net.b(net.a(x)))
    model = pipeline(net, record=True)
    for _ in range(WARM_UP + 1):
        output = model(volumes())
    with torch.no_grad():
        net.a.weight.mul_(2)
    with pytest.raises(ParallelError, match="changed in place between forward and backward"):
        output.sum().backward()


# The first call of a pipeline on a host took four to five steps' time, and said nothing of its batch norms.


DEVICES = ["cpu", "cpu:1"]


class ConvolvedSamples(TorchDispatchMode):
    """Counts the samples that convolutions work on, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.samples: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "convolution" in str(func):
            self.samples[str(func)] += len(args[0])
        return func(*args, **(kwargs or {}))

    @property
    def work(self) -> int:
        """A backward pass takes twice the time of a forward pass."""
        return sum(count * (2 if "backward" in name else 1) for name, count in self.samples.items())


def build_net(norm: type[nn.Module]) -> nn.Sequential:
    return nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), norm(4), nn.ReLU(), nn.Conv3d(4, 2, 1))


@pytest.mark.parametrize(("batch", "split_size"), [(1, 1), (2, 2), (4, 2), (8, 2), (4, 1)])
def test_the_first_call_takes_at_most_three_steps_work(batch, split_size):
    volumes = torch.randn(batch, 1, 5, 6, 7)
    with ConvolvedSamples() as step:
        build_net(nn.InstanceNorm3d)(volumes).sum().backward()
    model = ModelParallel(build_net(nn.InstanceNorm3d), devices=DEVICES, split_size=split_size)
    with ConvolvedSamples() as first:
        model(volumes).sum().backward()
    assert step.work == 2 * batch * 3
    assert first.work <= 3 * step.work


@pytest.mark.parametrize(
    ("norm", "split_size", "is_training", "warns"),
    [
        (nn.BatchNorm3d, 2, True, True),
        (nn.BatchNorm3d, 4, True, False),
        (nn.BatchNorm3d, 2, False, False),
        (nn.InstanceNorm3d, 2, True, False),
        (lambda channels: nn.BatchNorm3d(channels, track_running_stats=False), 2, True, True),
    ],
)
def test_a_batch_norm_that_sees_micro_batches_is_named_once(norm, split_size, is_training, warns, caplog):
    model = ModelParallel(build_net(norm), devices=DEVICES, split_size=split_size).train(is_training)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            model(torch.randn(4, 1, 5, 6, 7))
    told = [record.message for record in caplog.records if "batch norm in a pipeline" in record.message]
    assert len(told) == warns
