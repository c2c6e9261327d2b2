"""`verify` names what is wrong: fake strategies, each wrong in one way, and networks that cannot be compared."""

import json
import random
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from volseg.errors import GridError, ParallelError, UnsupportedOperatorError
from volseg.parallel import ModelParallel, Report, verify
from volseg.parallel.verification.comparison import compare_values

SHAPE = (2, 1, 8, 4, 4)
CPU = ["cpu"] * 2


class Net(nn.Module):
    """Two convolutions, a norm with running statistics, a buffer and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv3d(1, 3, 3, padding=1)
        self.norm = nn.BatchNorm3d(3)
        self.last = nn.Conv3d(3, 2, 3, padding=1)
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.add_(1)
        return self.last(F.relu(self.norm(self.first(x))))


class Function(nn.Module):
    """A function as a module, with some layers."""

    def __init__(self, function: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


def conv(inputs: int = 1, outputs: int = 1) -> nn.Conv3d:
    return nn.Conv3d(inputs, outputs, 3, padding=1)


class Right(ModelParallel):
    """A strategy that runs the plain network, so that only the faults of ``run`` are wrong."""

    run: Callable[..., Any] | None = None

    def __init__(self, net: nn.Module, *args: Any, checkpoint: Any = None, **options: Any) -> None:
        super().__init__(net, *args, checkpoint=checkpoint, **options)
        self.recomputed, self.steps = checkpoint is not None, 0

    def forward(self, *args: Any) -> Any:
        self.steps += 1
        return self.module(*args) if self.run is None else self.run(*args)


def halved_gradient(fake: Right, x: Tensor) -> Tensor:
    y = fake.module(x)
    fake.module.last.weight.register_hook(lambda grad: grad / 2)
    return y


def stale_buffer(fake: Right, x: Tensor) -> Tensor:
    before = fake.module.norm.running_mean.clone()
    y = fake.module(x)
    fake.module.norm.running_mean = before
    return y


def counted_twice_when_recomputed(fake: Right, x: Tensor) -> Tensor:
    if fake.recomputed and fake.training:
        fake.module.norm(fake.module.first(x.detach()))
    return fake.module(x)


def without_halo(fake: Right, x: Tensor) -> Tensor:
    fake.module.calls -= 1
    fake.module.seen.sub_(1)
    return torch.cat([fake.module(part) for part in x.chunk(2, 2)], 2)


def called_twice(fake: Right, x: Tensor) -> Tensor:
    fake.module.calls += 1
    return fake.module(x)


def changes_its_input(fake: Right, x: Tensor) -> Tensor:
    y = fake.module(x.clone())
    x.detach().mul_(2)
    return y


def without_a_gradient(fake: Right, x: Tensor) -> Tensor:
    bias = fake.module.first.bias
    bias.requires_grad_(False)
    y = fake.module(x)
    bias.requires_grad_(True)
    return y


def nan_in_one_place(fake: Right, x: Tensor) -> Tensor:
    y = fake.module(x).clone()
    y[0, 0, 1, 2, 3] = float("nan")
    return y


def leaves_the_mode(fake: Right, x: Tensor) -> Tensor:
    y = fake.module(x)
    fake.module.norm.eval()
    return y


def refuses_recomputation(fake: Right, x: Tensor) -> Tensor:
    if fake.recomputed:
        raise UnsupportedOperatorError("torch.frobnicate has no sharded form")
    return fake.module(x)


@pytest.fixture
def verify_with(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Report]:
    """Return `verify` with a fake ``ModelParallel`` that runs a network by a function."""

    def verify_fake(run: Callable[..., Any] | None, net: nn.Module | None = None, **options: Any) -> Report:
        fake = type("Fake", (Right,), {"run": run})
        monkeypatch.setattr(sys.modules["volseg.parallel.verification.modes"], "ModelParallel", fake)
        monkeypatch.setattr(sys.modules["volseg.parallel.verification.comparison"], "ModelParallel", fake)
        return verify(net or Net(), SHAPE, CPU, **options)

    return verify_fake


def different(report: Report) -> dict[str, list[str]]:
    return {mode.name: list(mode.wrong) for mode in report.modes if mode.status == "different"}


ALL = {"train", "train, recomputed", "eval", "eval, recomputed", "eval, without gradients"}
TRAINED = ALL - {"eval, without gradients"}
IN_TRAINING = {"train", "train, recomputed"}

PLAIN = "where the plain network has"
WRONG = {
    "halved gradient": (halved_gradient, TRAINED, "gradient of last.weight", ""),
    "stale buffer": (stale_buffer, IN_TRAINING, "buffer norm.running_mean", ""),
    "counted twice": (counted_twice_when_recomputed, {"train, recomputed"}, "buffer norm.num_batches_tracked", ""),
    "without halo": (without_halo, ALL, "output 0", ""),
    "in evaluation": (
        lambda fake, x: fake.module(x) * (1 if fake.training else 1.001),
        ALL - IN_TRAINING,
        "output 0",
        "",
    ),
    "without gradients": (
        lambda fake, x: fake.module(x) * (1 if torch.is_grad_enabled() else 1.001),
        {"eval, without gradients"},
        "output 0",
        "",
    ),
    "called twice": (called_twice, ALL, "attribute calls", f": 2, {PLAIN} 1"),
    "changed input": (changes_its_input, ALL, "input 0 after the call", ""),
    "no gradient": (without_a_gradient, TRAINED, "gradient of first.bias", f": None, {PLAIN} a tensor (3,)"),
    "nan": (nan_in_one_place, ALL, "output 0", f": nan at (0, 0, 1, 2, 3), {PLAIN} "),
    "tuple": (lambda fake, x: (fake.module(x),), ALL, "output structure", ""),
    "single": (
        lambda fake, x: fake.module(x).float(),
        ALL,
        "output 0",
        f": dtype torch.float32, {PLAIN} torch.float64",
    ),
    "mode": (leaves_the_mode, IN_TRAINING, "attribute norm.training", f": False, {PLAIN} True"),
}


@pytest.mark.parametrize(("fake", "modes", "name", "reason"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_named_in_the_modes_where_it_is(fake, modes, name, reason, verify_with):
    report = verify_with(fake)
    assert not report.ok
    found = different(report)
    assert set(found) == modes
    assert all(name in wrong for wrong in found.values())
    assert "are DIFFERENT on a volume of" in str(report)
    assert name + reason in str(report)


def test_what_is_wrong_in_the_second_step_is_right_in_the_first(verify_with):
    report = verify_with(lambda fake, x: fake.module(x) * (1 if fake.steps == 1 else 1.001))
    found = different(report)
    assert set(found) == ALL
    assert all("output 0, step 2" in wrong for wrong in found.values())
    assert all(name.endswith(", step 2") for wrong in found.values() for name in wrong)
    assert "output 0, step 2" in str(report)


@pytest.mark.parametrize(
    ("run", "verdict", "text"),
    [
        (None, "equal", "2 shards and one device are equal to round-off"),
        (lambda fake, x: [][1], "different", "eval, recomputed +failed: IndexError"),
        (refuses_recomputation, "equal", "eval, recomputed +refused: torch.frobnicate has no sharded form\n"),
    ],
    ids=["right", "fails", "refuses"],
)
def test_a_refused_mode_is_named_and_an_untyped_error_is_a_difference(run, verdict, text, verify_with):
    report = verify_with(run)
    assert report.verdict == verdict
    assert re.search(text, str(report))
    assert verdict == "different" or set(report.errors.values()) == {0.0}


def test_a_network_that_is_refused_in_every_mode_raises():
    net = Function(lambda net, x: torch.atleast_3d(net.a(x)), a=conv())
    with pytest.raises(UnsupportedOperatorError):
        verify(net, SHAPE, CPU)


def test_a_network_of_convolutions_is_equal_in_every_mode():
    net = nn.Sequential(conv(1, 3), nn.InstanceNorm3d(3, affine=True), nn.ReLU(), conv(3, 2))
    report = verify(net, SHAPE, CPU)
    assert report.ok, report
    text = str(report)
    assert "2 shards and one device are equal to round-off on a volume of (2, 1, 8, 4, 4) (float64)." in text
    assert {mode.name for mode in report.modes} >= ALL
    assert report.devices == ("cpu", "cpu:1")  # real copies, though "cpu" was named twice
    if not torch.cuda.is_available():
        assert re.search("train, recorded +not compared: needs a GPU", text)


def test_a_pipeline_is_compared_by_micro_batches_and_recorded():
    net = nn.Sequential(conv(1, 3), nn.BatchNorm3d(3), nn.ReLU(), conv(3, 2))
    report = verify(net, SHAPE, CPU, strategy="pipeline")
    assert report.ok, report
    modes = {mode.name: mode for mode in report.modes}
    assert set(modes) == {
        "train, one micro-batch",
        "train, micro-batches of 1",
        "eval, micro-batches of 1",
        "eval, without gradients",
        "train, recorded",
    }
    assert modes["train, one micro-batch"].errors["buffer 1.running_var"] < 1e-12
    assert "buffer 1.running_var" not in modes["train, micro-batches of 1"].errors
    assert any("a pipeline takes those of the whole batch" in note for note in report.notes)
    report = verify(nn.Sequential(conv(), conv()), (1, *SHAPE[1:]), CPU, strategy="pipeline")
    assert report.ok
    assert "a batch of 1 makes one micro-batch of 1; give a larger first side" in str(report)


def test_dropout_is_off():
    net = nn.Sequential(conv(1, 3), nn.Dropout3d(0.5), nn.ReLU(), nn.Dropout(0.2), conv(3, 2))
    report = verify(net, SHAPE, CPU)
    assert report.ok, report
    assert "train: compared with dropout off" in report.notes


DRAW = random.Random(0)
OUTSIDE = "differs between two seeds with dropout off: it draws random numbers outside of Dropout modules"


@pytest.mark.parametrize(
    ("function", "evaluated", "reason"),
    [
        (lambda net, x: net.a(x) + net.a(x).mean() * torch.rand(()).to(x), "not compared", OUTSIDE),
        (lambda net, x: net.a(F.dropout(x, 0.5, net.training)), "equal", OUTSIDE),
        (lambda net, x: net.a(x) * DRAW.random(), "not compared", "or does not repeat itself"),
    ],
)
def test_what_draws_random_numbers_is_not_compared(function, evaluated, reason):
    report = verify(Function(function, a=conv()), SHAPE, CPU)
    status = {mode.name: mode.status for mode in report.modes}
    assert (status["train"], status["eval"]) == ("not compared", evaluated)
    assert report.ok == (evaluated == "equal")
    assert ("NOT COMPARED" in str(report)) != report.ok
    assert reason in str(report)


def build_frozen_norm() -> nn.Module:
    net = nn.Sequential(conv(1, 3), nn.BatchNorm3d(3), nn.ReLU(), conv(3, 2))
    net[1].eval()
    return net


@pytest.mark.parametrize(
    ("net", "note"),
    [
        (build_frozen_norm(), "in eval mode inside train: 1"),
        (Function(lambda net, x: torch.sqrt(net.a(x)), a=conv()), "NaN in the same places on both sides: output 0"),
        (Function(lambda net, x: net.a(x.mul_(2)), a=conv()), "train: the network changes input 0 in place"),
    ],
)
def test_what_is_compared_otherwise_is_told(net, note, verify_with):
    report = verify_with(None, net)
    assert report.ok, report
    assert any(note in one for one in report.notes)


def test_a_pipeline_that_changes_its_input_is_refused_and_the_plain_network_is_not_blamed():
    net = Function(lambda net, x: net.b(net.a(x.mul_(2))), a=conv(), b=conv())
    report = verify(net, (2, 1, 4, 4, 4), ["cpu"] * 2, strategy="pipeline", split_size=1)
    assert report.ok
    assert {mode.status for mode in report.modes} >= {"equal", "refused"}


def chaotic(net: Function, x: Tensor) -> Tensor:
    """Double every difference some 25 times: round-off becomes 1e-8."""
    y = net.a(x).sigmoid()
    for _ in range(25):
        y = 4 * y * (1 - y)
    return y


def test_round_off_that_the_plain_network_blows_up_counts_as_equal(verify_with):
    report = verify_with(lambda fake, x: fake.module(x * (1 + 2**-52)), Function(chaotic, a=conv()))
    assert report.ok, report
    assert not verify_with(lambda fake, x: fake.module(x * (1 + 1e-9)), Function(chaotic, a=conv())).ok


def test_the_caller_keeps_network_and_random_state():
    net = nn.Sequential(conv(1, 3), nn.BatchNorm3d(3), conv(3, 2)).eval()
    state = {name: value.clone() for name, value in net.state_dict().items()}
    random_state, python_state = torch.get_rng_state(), random.getstate()
    verify(net, SHAPE, CPU)
    torch.testing.assert_close(net.state_dict(), state)
    assert not net.training
    assert all(parameter.dtype == torch.float32 for parameter in net.parameters())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert random.getstate() == python_state


def test_further_arguments_go_to_the_network():
    net = Function(lambda net, x, scale: net.a(x) * scale, a=conv())
    report = verify(net, SHAPE, CPU, more=[torch.tensor(2.0)])
    assert report.ok, report
    assert report.errors["input 1"] < 1e-12


class Scaled(nn.Sequential):
    """Two convolutions with one factor per channel between them."""

    def forward(self, x: Tensor, factors: Tensor) -> Tensor:
        return self[1](self[0](x) * factors[:, None, None, None])


@pytest.mark.parametrize("batched", [[0], ["x"]])
def test_an_input_as_long_as_the_batch_that_is_not_cut_is_no_difference(batched):
    # The plain network had a part of the factors for each micro-batch, and a right pipeline was called different.
    options = {"strategy": "pipeline", "split_size": 1, "batched": batched, "more": [torch.tensor([1.0, 2.0])]}
    assert verify(Scaled(conv(1, 2), conv(2)), SHAPE, CPU, **options).ok


def test_the_report_is_json_too(verify_with):
    told = json.loads(json.dumps(verify_with(without_a_gradient).as_dict(), allow_nan=False))
    assert told["verdict"] == "different"
    train = next(mode for mode in told["modes"] if mode["name"] == "train")
    assert train["errors"]["gradient of first.bias"] is None
    assert train["reasons"]["gradient of first.bias"].startswith("None, where")
    assert train["errors"]["output 0"] == 0.0


@pytest.mark.parametrize(
    ("net", "shape", "options", "error", "message"),
    [
        (conv(), (1, 8, 4), {}, ParallelError, r"shape must be \(B, C, D, H, W\) or \(B, C, H, W\)"),
        (conv(), SHAPE, {"devices": ["cpu"]}, ParallelError, r"got 1; name one several times.*\['cpu'\] \* 2"),
        (conv(), (1, 1, 2, 2, 2), {"devices": ["cpu"] * 4}, ParallelError, "too thin to be cut over 4 devices"),
        (conv(), SHAPE, {"strategy": "auto"}, ParallelError, "'spatial' or 'pipeline', got 'auto'"),
        (conv(3), SHAPE, {}, GridError, "the plain network itself fails on this shape: Conv3d in train mode"),
        (nn.LazyConv3d(2, 3), SHAPE, {}, ParallelError, "lazy parameters .* call it once before verify"),
    ],
    ids=["dims", "one device", "thin", "strategy", "channels", "lazy"],
)
def test_errors_say_what_to_do(net, shape, options, error, message):
    with pytest.raises(error, match=message):
        verify(net, shape, **{"devices": CPU, **options})


def test_a_fault_of_the_plain_network_in_the_backward_pass_is_its_own():
    def forward(net: Function, x: Tensor) -> Tensor:
        y = net.a(x).exp()
        z = y * 1
        y.mul_(2)  # the backward pass of exp needs it as it was
        return z

    with pytest.raises(GridError, match="the plain network itself fails on this shape"):
        verify(Function(forward, a=conv()), SHAPE, CPU)


def test_nan_on_one_side_differs_and_on_both_does_not():
    nan, one = torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 2.0])
    assert compare_values({"output 0": nan}, {"output 0": nan.clone()}).both_nan == ("output 0",)
    assert not compare_values({"output 0": nan}, {"output 0": nan.clone()}).wrong
    assert compare_values({"output 0": nan}, {"output 0": one}).wrong
    assert compare_values({"output 0": one}, {"output 0": nan}).wrong
    inf = torch.tensor([1.0, float("inf")])
    assert not compare_values({"output 0": inf}, {"output 0": inf.clone()}).wrong
    assert compare_values({"output 0": inf}, {"output 0": -inf}).wrong


@pytest.mark.gpu
def test_a_recorded_step_is_compared_on_a_gpu():
    net = nn.Sequential(conv(1, 3), nn.InstanceNorm3d(3, affine=True), nn.ReLU(), conv(3, 2))
    report = verify(net, (2, 1, 16, 8, 8), ["cuda:0"] * 2)
    assert report.ok, report
    status = {mode.name: (mode.status, mode.message) for mode in report.modes}
    assert status["train, recorded"] == ("equal", "")
    assert status["train, copies on the CPU"] == ("equal", "")
