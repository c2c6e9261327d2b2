"""What a pipeline got wrong in silence, or failed at without a reason."""

import copy
import ctypes
import logging
import pickle
import random
import types
from collections import Counter
from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils._python_dispatch import TorchDispatchMode

from volseg.errors import ParallelError, PartitionError
from volseg.parallel import ModelParallel
from volseg.parallel.pipeline import transfer
from volseg.parallel.pipeline.recorder import WARM_UP

TWO = ["cpu", "cpu:1"]
RECORDS = [False, True]
# Sums over samples are taken in another order.
ROUND_OFF = {"rtol": 1e-10, "atol": 1e-10}


class Net(nn.Module):
    """Does what ``how`` says with the layers it is given."""

    def __init__(self, how: Callable[..., object], **layers: object) -> None:
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.how = how

    def forward(self, *args: Tensor, **kwargs: Tensor) -> object:
        return self.how(self, *args, **kwargs)


def conv(inputs: int = 2, outputs: int = 2) -> nn.Conv3d:
    return nn.Conv3d(inputs, outputs, 3, padding=1)


def chain(how: Callable[..., object], **more: object) -> Net:
    return Net(how, a=conv(), b=conv(), **more).double()


def volumes(batch: int = 4, channels: int = 2) -> Tensor:
    return torch.randn(batch, channels, 4, 4, 4, dtype=torch.float64)


def pipeline(net: nn.Module, split_size: int = 2, record: bool = False, **options: object) -> ModelParallel:
    options = {"cuts": ["b"], **options}
    return ModelParallel(net, strategy="pipeline", devices=TWO, split_size=split_size, record=record, **options)


def gradients(net: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


def assert_same_steps(
    net: nn.Module,
    batches: int = WARM_UP + 3,
    split_size: int = 2,
    before: Callable[[nn.Module, int], None] = lambda net, batch: None,
    **options: object,
) -> ModelParallel:
    """Same outputs, gradients and buffers as the plain network on the same micro-batches, batch after batch."""
    reference = copy.deepcopy(net)
    model = pipeline(net, split_size, **options)
    for batch in range(batches):
        for each in (net, reference):
            before(each, batch)
        x = volumes()
        mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        expected = torch.cat([reference(piece) for piece in theirs.split(split_size)])
        actual = model(mine)
        torch.testing.assert_close(actual, expected, **ROUND_OFF)
        (expected * x).sum().backward(), (actual * x).sum().backward()
        torch.testing.assert_close(mine.grad, theirs.grad, **ROUND_OFF)
        torch.testing.assert_close(gradients(net), gradients(reference), **ROUND_OFF)
        torch.testing.assert_close(dict(net.named_buffers()), dict(reference.named_buffers()), **ROUND_OFF)
    return model


def of_numpy() -> list[int]:
    return np.random.get_state()[1].tolist()  # noqa: NPY002 (the global generator is what networks draw from)


def moving_codebook(net: Net, x: Tensor) -> Tensor:
    features = net.a(x)
    with torch.no_grad():
        net.t.data.lerp_(features.mean((0, 2, 3, 4)), 0.5)
    return net.b(features) * net.t.clone().view(1, 2, 1, 1, 1)


def replaced(net: Net, x: Tensor) -> Tensor:
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
    model = pipeline(net, record=record)
    for _ in range(WARM_UP + 2):
        x = volumes()
        doubled = x * 2
        model(x)
        assert torch.equal(x, doubled)


class Settings:
    """Someone's configuration object."""

    def __init__(self) -> None:
        self.alpha = 1.0


def patched(net: Net, batch: int) -> None:
    if batch == WARM_UP + 2:
        net.a.forward = types.MethodType(lambda self, x: nn.Conv3d.forward(self, x) * 3, net.a)


def swapped(net: Net, batch: int) -> None:
    if batch == WARM_UP + 2:
        net.act = nn.Sigmoid()


def set_to(where: Callable[[Net], object], name: str) -> Callable[[Net, int], None]:
    def change(net: Net, batch: int) -> None:
        inside, value = where(net), 1.0 if batch < WARM_UP + 2 else 3.0
        inside.__setitem__(name, value) if isinstance(inside, dict | list) else setattr(inside, name, value)

    return change


def closing_over(settings: dict[str, float]) -> Callable[[Tensor], Tensor]:
    return lambda x: x * settings["alpha"]


READS = {
    "dictionary": (lambda net, x: net.b(net.a(x)) * net.cfg["alpha"], set_to(lambda net: net.cfg, "alpha")),
    "nested": (
        lambda net, x: net.b(net.a(x)) * net.deep["x"][0]["alpha"],
        set_to(lambda net: net.deep["x"][0], "alpha"),
    ),
    "list": (lambda net, x: net.b(net.a(x)) * net.list[0], set_to(lambda net: net.list, 0)),
    "object": (lambda net, x: net.b(net.a(x)) * net.object.alpha, set_to(lambda net: net.object, "alpha")),
    "closure": (lambda net, x: net.b(net.scale(net.a(x))), set_to(lambda net: net.cell, "alpha")),
    "tensor": (
        lambda net, x: net.b(net.a(x)) * net.tensor,
        lambda net, batch: setattr(net, "tensor", torch.tensor(1.0 if batch < WARM_UP + 2 else 3.0).double()),
    ),
    "patched forward": (lambda net, x: net.b(net.a(x)), patched),
    "swapped module": (lambda net, x: net.b(net.act(net.a(x))), swapped),
}


@pytest.mark.parametrize("kind", READS)
def test_recording_notices_what_forward_reads(kind):
    """A replay went on with dictionaries, lists, objects, tensors and forwards as they were when it was recorded."""
    how, change = READS[kind]
    net = chain(how, act=nn.Tanh())
    net.cfg, net.deep, net.list, net.object, net.cell = {"alpha": 1.0}, {"x": [{"alpha": 1.0}]}, [1.0], Settings(), {}
    net.cell["alpha"] = 1.0
    net.scale, net.tensor = closing_over(net.cell), torch.tensor(1.0).double()
    reference = copy.deepcopy(net)
    reference.scale = closing_over(reference.cell)
    model = pipeline(net, record=True)
    replayed = []
    for batch in range(2 * WARM_UP + 5):
        change(net, batch), change(reference, batch)
        x = volumes()
        torch.testing.assert_close(model(x), reference(x), **ROUND_OFF)
        replayed.append(model.strategy.is_replaying)
    assert replayed[WARM_UP] or kind == "tensor"  # a new tensor each time


@pytest.mark.parametrize("record", RECORDS)
def test_forward_that_asks_for_values_is_not_replayed(record):
    """A branch on a value was recorded as it went once (on hosts, and for tensors of the host beside a GPU)."""
    net = chain(lambda net, x: net.b(net.a(x)) * (2 if x.mean() > 0 else 3))
    reference = copy.deepcopy(net)
    model = pipeline(net, record=record)
    for batch in range(WARM_UP + 4):
        x = volumes().abs() * (-1 if batch > WARM_UP else 1)
        torch.testing.assert_close(model(x), reference(x), **ROUND_OFF)


def test_loaded_state_has_no_notes_of_the_pipeline(tmp_path):
    """A buffer that forward replaces carried a note of its stage, and its file could not be loaded safely."""
    net = chain(replaced)
    net.register_buffer("t", torch.zeros(()).double())
    output = pipeline(net, split_size=4)(volumes())
    torch.save({"state": net.state_dict(), "output": output.detach()}, tmp_path / "state.pt")
    assert torch.equal(torch.load(tmp_path / "state.pt", weights_only=True)["state"]["t"], net.t)


def keeping(net: Net, x: Tensor) -> Tensor:
    keeping.lengths.append(len(x))  # an attribute of a function is not watched
    net.kept = [net.a(x)]
    return net.b(net.kept[0])


keeping.lengths = []


def test_kept_features_do_not_ask_again():
    """Another number of samples is run once, not before every batch of a network that keeps what it computed."""
    model = pipeline(chain(keeping))
    for _ in range(4):
        model(volumes())
    assert keeping.lengths.count(3) == 2  # before there is an attribute, and with it
    assert keeping.lengths[-4:] == [2] * 4


@pytest.mark.parametrize("record", RECORDS)
@pytest.mark.parametrize("split_size", [1, 2])
def test_output_as_long_as_a_micro_batch_by_accident(split_size, record):
    """The mean over a micro-batch of one, kept as ``(1, ...)``, was joined as if it were a sample."""
    net = chain(lambda net, x: (net.b(net.a(x)), net.a.weight[:split_size].mean((3, 4))))
    with pytest.raises(ParallelError, match=r"output 1 of the network has shape .* for a micro-batch of 3"):
        pipeline(net, split_size, record)(volumes())


def test_output_that_counts_its_micro_batch():
    """A number equal for all micro-batches was passed on, though it was their size."""
    with pytest.raises(ParallelError, match="another number of samples than 2"):
        pipeline(chain(lambda net, x: (net.b(net.a(x)), len(x))))(volumes())


def test_output_of_another_mode_is_looked_at_again():
    """Whether outputs are per sample may depend on the mode."""
    net = chain(lambda net, x: net.b(net.a(x)) if net.training else net.b(net.a(x)).mean(0, keepdim=True))
    model = pipeline(net, split_size=1)
    model(volumes())
    with pytest.raises(ParallelError, match="for a micro-batch of 3"):
        model.eval()(volumes())


@pytest.mark.parametrize("record", RECORDS)
def test_argument_as_long_as_the_batch_by_accident(record):
    """A factor per channel, as many as samples, was cut with them; labels and steps per sample still are."""
    net = chain(lambda net, x, gain, bias: net.b(net.a(x) * gain) + bias.view(-1, 1, 1, 1, 1))
    reference = copy.deepcopy(net)
    model = pipeline(net, split_size=1, record=record)
    for _ in range(WARM_UP + 2):
        given = volumes(2), torch.randn(2, 1, 1, 1).double(), torch.randn(2).double()
        mine = [value.clone().requires_grad_() for value in given]
        theirs = [value.clone().requires_grad_() for value in given]
        actual, expected = model(*mine), reference(*theirs)
        torch.testing.assert_close(actual, expected, **ROUND_OFF)
        actual.square().sum().backward(), expected.square().sum().backward()
        torch.testing.assert_close([x.grad for x in mine], [x.grad for x in theirs], **ROUND_OFF)
    assert model.strategy.is_replaying == record


def test_argument_that_could_be_either_is_refused_until_it_is_declared():
    """Both ways of running it give outputs of the right length, so a length cannot tell."""
    net = chain(lambda net, x, table: net.b(net.a(x)) * table.mean())
    x, table = volumes(), torch.randn(4).double()
    with pytest.raises(ParallelError, match=r"number 0 .*, number 1 \(4,\) are as long as the batch.*batched=\["):
        pipeline(copy.deepcopy(net))(x, table)
    expected = net(x, table)
    torch.testing.assert_close(pipeline(copy.deepcopy(net), batched=[0])(x, table), expected, **ROUND_OFF)
    with pytest.raises(ParallelError, match="must be of one length; found no tensor"):
        pipeline(net, batched=["image"])(x, table)


def test_error_of_the_network_itself_is_its_own():
    """Looking for the batch must not hide what is wrong with the call."""
    with pytest.raises(RuntimeError, match=r"expected input.* to have 2 channels"):
        pipeline(chain(lambda net, x, y: net.b(net.a(x + y))))(volumes(4, 3), volumes(4, 3))


def test_nothing_from_one_micro_batch_only():
    """``None`` from the first micro-batch stood for all of them."""
    net = chain(lambda net, x: (net.b(net.a(x)), x if x.mean() > 0 else None))
    x = torch.cat([-volumes(2).abs(), volumes(2).abs()])
    with pytest.raises(ParallelError, match="output 1 of the network is NoneType or Tensor, by micro-batch"):
        pipeline(net)(x)


@pytest.mark.parametrize("record", RECORDS)
def test_batch_norm_without_its_module(record):
    """``torch.batch_norm``, called directly, updated its running statistics once per micro-batch."""

    def how(net: Net, x: Tensor) -> Tensor:
        native = torch.batch_norm(x, None, None, net.mean, net.var, True, 0.1, 1e-5, False)
        own = F.batch_norm(x, net.mean2, net.var2, training=True)
        return net.b(net.a(x)) + native * own

    net = chain(how)
    for name in ("mean", "var", "mean2", "var2"):
        net.register_buffer(name, torch.ones(2).double())
    reference = copy.deepcopy(net)
    model = pipeline(net, record=record)
    for _ in range(WARM_UP + 2):
        x = volumes() * 3
        model(x), reference(x)
    torch.testing.assert_close(dict(net.named_buffers()), dict(reference.named_buffers()), **ROUND_OFF)
    torch.testing.assert_close(net.mean, net.mean2, **ROUND_OFF)


@pytest.mark.parametrize("record", RECORDS)
@pytest.mark.parametrize("options", [{}, {"cuts": None}])
def test_first_layer_in_place_on_a_result(options, record):
    """An activation in place, first of all, on a result that needs a gradient was taken for one on a parameter."""
    net, before = chain(lambda net, x: net.b(net.a(F.relu(x, inplace=True)))), conv().double()
    nets, stems = (net, copy.deepcopy(net)), (before, copy.deepcopy(before))
    model = pipeline(net, record=record, **options)
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
        (
            lambda: nn.Sequential(conv(), torch.jit.script(nn.ReLU())),
            "'1' .* is scripted: pass the module that torch.jit.script",
        ),
        (
            lambda: nn.Sequential(conv(), torch.compile(nn.ReLU())),
            "'1' .* is compiled: pass the module that torch.compile",
        ),
        (lambda: torch.compile(conv()), "the network itself .* is compiled"),
        (
            lambda: nn.Sequential(nn.LazyConv3d(2, 3)),
            "0.weight, 0.bias of Sequential have no shape yet .lazy modules.",
        ),
    ],
    ids=["scripted", "compiled", "compiled root", "lazy"],
)
@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_modules_that_hide_what_they_do_are_refused(make, message):
    """They failed somewhere inside, with messages about hooks or uninitialised parameters."""
    with pytest.raises(ParallelError, match=message):
        ModelParallel(make(), strategy="pipeline", devices=TWO, split_size=1)


@pytest.mark.parametrize("record", RECORDS)
def test_hook_that_changes_shapes(record):
    """The network was measured without the hooks that it cannot run without."""
    net = Net(lambda net, x: net.b(net.a(x)), a=conv(4, 2), b=conv()).double()
    net.a.register_forward_pre_hook(lambda module, args: (torch.cat([args[0], args[0] * 2], 1),))
    assert_same_steps(net, record=record)
    assert_same_steps(copy.deepcopy(net), batches=2, record=record, cuts=None)


def steepest(net: Net, x: Tensor) -> Tensor:
    with torch.enable_grad():
        point = net.a(x).detach().requires_grad_()
        (slope,) = torch.autograd.grad(net.b(point).square().sum(), point)
    return net.b(point - slope) + net.c(x)


INSIDE = {
    "autograd.grad": steepest,
    "vmap": lambda net, x: net.c(torch.vmap(lambda v: v * v.mean())(net.b(net.a(x)))),
    "vmap of a layer": lambda net, x: net.c(net.b(torch.vmap(net.a)(x[:, None])[:, 0])),
    "func.grad": lambda net, x: net.c(net.b(net.a(x)) + torch.func.grad(lambda v: v.square().sum())(x)),
}


@pytest.mark.parametrize("record", RECORDS)
@pytest.mark.parametrize("cuts", [None, ["b"], ["c"]])
@pytest.mark.parametrize("kind", INSIDE)
def test_derivatives_and_maps_inside(kind, cuts, record):
    """Measuring dropped what they need, or asked a wrapped tensor for its memory."""
    net = chain(INSIDE[kind], c=conv())
    try:
        model = assert_same_steps(net, record=record, cuts=cuts)
    except PartitionError as refusal:
        assert "no stage can start at 'b'" in str(refusal)  # noqa: PT017 (what lies inside a derivative stays together)
        assert (kind, cuts) in (("autograd.grad", ["b"]), ("func.grad", ["b"]))
        return
    assert not model.strategy.is_replaying or record


def test_pickled_and_copied_after_a_step():
    """A placement holds parameters by identity, which a file does not keep: it is found anew."""
    net = nn.Sequential(conv(), nn.BatchNorm3d(2), conv()).double()
    model = ModelParallel(net, strategy="pipeline", devices=TWO, split_size=2, record=True)
    x = volumes()
    for _ in range(WARM_UP + 1):
        model(x).sum().backward()
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        other.eval(), model.eval()
        torch.testing.assert_close(other(x), model(x), **ROUND_OFF)
        other.zero_grad(), model.zero_grad()
        other(x).sum().backward(), model(x).sum().backward()
        torch.testing.assert_close(gradients(other.module), gradients(net), **ROUND_OFF)
        assert other.module is not net
        assert len(other.partition.stages) == 2
        model.train()


SCALE, SETTINGS = 1.0, {"scale": 1.0}


def scaled_by_globals(net: Net, x: Tensor) -> Tensor:
    return net.b(net.a(x) * find_scale())


def find_scale() -> float:
    return SCALE * SETTINGS["scale"]


@pytest.mark.parametrize("name", ["SCALE", "SETTINGS"])
def test_globals_that_change_end_a_recording(name):
    """A recording stood for a forward that read another number in the meantime."""

    def change(net: nn.Module, batch: int) -> None:
        global SCALE
        if batch == WARM_UP + 1:
            SCALE, SETTINGS["scale"] = (2.0, 1.0) if name == "SCALE" else (1.0, 2.0)

    globals().update(SCALE=1.0, SETTINGS={"scale": 1.0})
    model = assert_same_steps(chain(scaled_by_globals), WARM_UP + 6, before=change, record=True)
    assert model.strategy.is_replaying


@pytest.mark.parametrize("strategy", ["auto", "pipeline"])
def test_numbers_of_python_and_calls_count_once(strategy):
    """Looking at the network first drew numbers and counted calls that the plain network has not."""

    def how(net: Net, x: Tensor) -> Tensor:
        net.calls += 1
        net.count.add_(1)
        drawn = random.random() * np.random.rand() * torch.rand(()).item()  # noqa: NPY002
        return net.b(torch.fft.fftn(net.a(x), dim=(2, 3, 4)).real * drawn * net.calls)

    net = chain(how)
    net.calls = 0
    net.register_buffer("count", torch.zeros(()))
    reference = copy.deepcopy(net)
    model = ModelParallel(net, strategy=strategy, devices=TWO)
    # One sample: forward runs for each micro-batch, and measured times decide how many a larger batch has.
    inputs, found = [volumes()[:1] for _ in range(WARM_UP + 2)], []
    for each in (model, reference):
        torch.manual_seed(1), random.seed(1), np.random.seed(1)  # noqa: NPY002
        outputs = [each(x) for x in inputs]
        sum(output.square().sum() for output in outputs).backward()
        found.append((outputs, torch.rand(1), random.random(), of_numpy()))
    assert model.chosen == "pipeline"
    torch.testing.assert_close(found[0][:2], found[1][:2], **ROUND_OFF)
    assert found[0][2:] == found[1][2:]
    torch.testing.assert_close(gradients(net), gradients(reference), **ROUND_OFF)
    assert (net.calls, net.count) == (reference.calls, reference.count)


class Factors(Enum):
    """What a member holds may change; which member it is does not tell."""

    LIST = ([2.0],)


class AllAlike(Enum):
    """Members that are equal to Python, and cannot be hashed."""

    TWO = 2.0
    FIVE = 5.0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AllAlike)


@pytest.mark.parametrize(
    ("modes", "recorded"),
    [([Factors.LIST] * (WARM_UP + 3), False), ([AllAlike.TWO] * (WARM_UP + 2) + [AllAlike.FIVE], True)],
)
def test_argument_that_is_a_member_of_an_enumeration_is_told_by_what_it_holds(modes: list[Enum], recorded: bool):
    """By ``==`` one recording served for both members, or for a list that had changed; or the batch was not run."""

    def factor_of(mode: Enum) -> float:
        return mode.value[0][0] if isinstance(mode.value, tuple) else mode.value

    net = chain(lambda net, x, mode: net.b(net.a(x) * factor_of(mode)))
    model = pipeline(net, record=True)
    for number, mode in enumerate(modes):
        Factors.LIST.value[0][0] = 3.0 if number == len(modes) - 1 else 2.0
        x = volumes()
        torch.testing.assert_close(model(x, mode), net.b(net.a(x) * factor_of(mode)), **ROUND_OFF)
    assert model.strategy.is_replaying is recorded


class Shares(nn.Module):
    """The gradient of what ``b``'s stage received last is also that of ``own``, to which autograd adds in place."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = conv(), conv()

    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x)
        second = first * 2
        own = self.b(first)
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
    """Autograd added in place to a gradient that it held alone, while a copy to another GPU still read it.

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
    assert_same_steps(Shares().double(), split_size=1)


def counting(net: Net, x: Tensor) -> Tensor:
    net.t.add_(1)
    return net.b(net.a(x)) * net.t.clone()


def array_drawn(net: Net, x: Tensor) -> Tensor:
    return net.b(net.a(x)) * torch.from_numpy(np.random.rand(1))  # noqa: NPY002


def alternate(net: Net, x: Tensor) -> Tensor:
    net.calls += 1
    x = net.a(x).tanh()
    return net.c(net.b(x).tanh() if net.calls % 2 else x)


def overwrite(net: Net, x: Tensor) -> Tensor:
    gate = net.c(x).sigmoid()
    with torch.no_grad():
        gate.mul_(2.0)
    return net.b(net.a(x)) + gate.detach()


def test_argument_that_is_given_twice_and_changed():
    """Both are one tensor, of which the micro-batches have one copy."""
    net, stem = chain(lambda net, x, y: net.b(net.a(F.relu(x, inplace=True))) + y), conv().double()
    nets, stems, x = (net, copy.deepcopy(net)), (stem, copy.deepcopy(stem)), volumes()
    features = [each(x) for each in stems]
    outputs = [run(feature, feature) for run, feature in zip((pipeline(net), nets[1]), features, strict=True)]
    torch.testing.assert_close(*outputs, **ROUND_OFF)
    for output, feature in zip(outputs, features, strict=True):
        (output.sum() + feature.square().sum()).backward()
    torch.testing.assert_close(*map(gradients, stems), **ROUND_OFF)


def test_array_that_is_drawn_is_not_recorded():
    """No function shows what NumPy drew, so every batch did the same to look at, and a replay kept the first factor."""
    net = chain(array_drawn)
    reference = copy.deepcopy(net)
    model = pipeline(net, split_size=4, record=True)
    inputs, found = [volumes() for _ in range(WARM_UP + 3)], []
    for each in (model, reference):
        np.random.seed(1)  # noqa: NPY002
        found.append([each(x) for x in inputs])
    torch.testing.assert_close(*found, **ROUND_OFF)
    assert not model.strategy.is_replaying


class Clips(torch.autograd.Function):
    """Its backward pass branches on a value."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient * 0 if gradient.abs().max().item() > 5 else gradient


PROMPT = torch.ones(2, dtype=torch.float64, requires_grad=True)


def with_buffer(how: Callable[..., object], value: Tensor) -> Net:
    net = chain(how)
    net.register_buffer("t", value.double())
    return net


def with_spectral_norm() -> Net:
    net = chain(lambda net, x: net.b(net.a(x)))
    spectral_norm(net.a)
    return net


def embedded(net: Net, x: Tensor) -> Tensor:
    return net.b(net.a(x)) + net.table(torch.tensor([0, 1])).view(1, 2, 1, 1, 1)


UNUSUAL: dict[str, tuple[Callable[[], Net], dict[str, object]]] = {
    # MONAI's quantiser writes its codes through ``.data`` of a parameter, which has no versions and is no buffer.
    "codebook": (lambda: chain(moving_codebook, t=nn.Parameter(torch.ones(2), requires_grad=False)), {}),
    # ``max_norm`` changes the parameter in forward; runs that do not count must not.
    "embedding": (lambda: chain(embedded, table=nn.Embedding(2, 1, max_norm=0.5)), {}),
    # The attempt to record ran forward twice more and left buffers changed; a copy of a changed buffer on another stage
    # kept the value of the first micro-batch. Refused before it is tried, and copied anew.
    "counter": (lambda: with_buffer(counting, torch.zeros(())), {}),
    "codebook in a buffer": (lambda: with_buffer(moving_codebook, torch.ones(2)), {}),
    "replaced buffer": (lambda: with_buffer(replaced, torch.zeros(())), {}),
    # Measuring computed a gradient that the branch does not need, and failed on the overwritten tensors.
    "overwriting branch": (lambda: chain(overwrite, c=conv()), {"cuts": None, "may_replay": True}),
    # Measuring runs the network several times. It raised a ValueError if the runs called other layers.
    "path that varies": (lambda: chain(alternate, c=conv(), calls=0), {"cuts": None, "may_replay": True}),
    # Its power iteration was taken twice more by the attempt to record.
    "spectral norm": (with_spectral_norm, {"may_replay": True}),
    # A replay kept the branch of the recorded batch, and a trained tensor that is no parameter got no gradient.
    "branch of backward": (lambda: chain(lambda net, x: net.b(Clips.apply(net.a(x)))), {}),
    "no parameter": (
        lambda: chain(lambda net, x: net.b(net.a(x).detach() + PROMPT.view(1, 2, 1, 1, 1)).mul(1.0)),
        {},
    ),
}


@pytest.mark.parametrize("record", RECORDS)
@pytest.mark.parametrize("kind", UNUSUAL)
def test_networks_that_change_themselves_or_vary_train_as_they_do_alone(kind, record):
    make, options = UNUSUAL[kind]
    options = dict(options)
    may_replay = options.pop("may_replay", False)
    model = assert_same_steps(make(), record=record, **options)
    assert may_replay or not model.strategy.is_replaying


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


class KeepsFeatures(nn.Module):
    """Keeps features of its last batch as an attribute, as MONAI's DynUNet does with its heads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv3d(1, 4, 3, padding=1), nn.Conv3d(4, 2, 1)
        self.features: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.features = [self.first(x)]
        return self.second(self.features[0].relu())


def test_a_network_that_was_trained_before_can_be_placed():
    net, volumes = KeepsFeatures(), torch.randn(4, 1, 5, 6, 7)
    wanted = net(volumes)
    wanted.sum().backward()
    actual = ModelParallel(net, devices=DEVICES, split_size=2)(volumes)
    torch.testing.assert_close(actual, wanted, rtol=1e-6, atol=1e-6)
