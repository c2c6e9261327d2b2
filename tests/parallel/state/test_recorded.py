"""Events that end a recording, and the clean state after an attempt to record, tested without CUDA."""

import copy
import random
from collections.abc import Callable
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from volseg.device.graph import RecordedFunction, describe_inputs
from volseg.errors import ParallelError
from volseg.models.fit_grid import FitGrid
from volseg.parallel import FastKernels
from volseg.parallel.record_policy import Recorder
from volseg.parallel.state.recorded import RecordedState
from volseg.parallel.state.watch import Watch


def closing_over(cell: dict[str, float]) -> Callable[[], float]:
    return lambda: cell["alpha"]


class Block(nn.Module):
    """Configuration of every kind, and a cache that forward writes, as networks with deep supervision have it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv3d(1, 2, 1), nn.BatchNorm3d(2), nn.Dropout(0.5)
        self.config: dict[str, Any] = {"alpha": 1.0, "sizes": [3, 3]}
        self.heads: list[Any] = [torch.rand(1)]
        self.scale = torch.ones(1)
        self.path = (1, 2)
        self.settings, self.array = SimpleNamespace(deep=SimpleNamespace(alpha=1.0)), np.ones(3)
        self.host, self.cell = torch.ones(1), {"alpha": 1.0}
        self.closure = closing_over(self.cell)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.norm(self.conv(x))) * self.config["alpha"] * self.scale
        self.heads[0] = x
        return x


class Played:
    """A recording of the function as it was."""

    is_free = True

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.released = function, False

    def __call__(self, *inputs: Any) -> str:
        return "replayed"

    def release(self) -> None:
        self.released = True


@pytest.fixture
def made() -> SimpleNamespace:
    """A network, an optimizer with state, and a recorder whose recordings do not run the step, as in CUDA."""
    torch.manual_seed(0)
    net = Block()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    found = SimpleNamespace(net=net, optimizer=optimizer, step=step, recordings=[], during=lambda: None, agree=True)

    def record(*inputs: Any) -> Played:
        found.during()
        net.heads[0] = torch.rand(1, generator=torch.Generator())  # what forward writes anew
        found.recordings.append(Played(step))
        return found.recordings[-1]

    state = RecordedState(net, optimizer)
    found.recorder = Recorder(step, record, lambda yes: yes and found.agree, warm_up=1, limit=2, state=state)
    return found


def kind(result: Any) -> str:
    return result if isinstance(result, str) else "ran"


X = torch.randn(2, 1, 4, 4, 4)


def calls(made: SimpleNamespace, count: int, x: torch.Tensor = X) -> list[str]:
    return [kind(made.recorder(x)) for _ in range(count)]


CHANGES: dict[str, Callable[[SimpleNamespace], Any]] = {
    "drop.training": lambda made: made.net.drop.eval(),
    "drop.p": lambda made: setattr(made.net.drop, "p", 0.25),
    "config": lambda made: made.net.config.update(alpha=2.0),
    "config, nested": lambda made: made.net.config["sizes"].append(1),
    "another list": lambda made: setattr(made.net, "config", {"alpha": 3.0}),
    "path": lambda made: setattr(made.net, "path", (1, 3)),
    "added": lambda made: setattr(made.net, "added", 1),
    "removed": lambda made: delattr(made.net, "path"),
    "tensor": lambda made: setattr(made.net, "scale", torch.ones(1)),
    "requires_grad": lambda made: made.net.conv.requires_grad_(False),
    "data": lambda made: setattr(made.net.conv.weight, "data", made.net.conv.weight.data.clone()),
    "parameter": lambda made: setattr(made.net.conv, "weight", nn.Parameter(torch.ones(2, 1, 1, 1, 1))),
    "assigned": lambda made: made.net.load_state_dict(copy.deepcopy(made.net.state_dict()), assign=True),
    "buffer": lambda made: setattr(made.net.norm, "running_mean", torch.ones(2)),
    "module": lambda made: setattr(made.net, "drop", nn.Dropout(0.5)),
    "object": lambda made: setattr(made.net.settings.deep, "alpha", 2.0),
    "array": lambda made: made.net.array.__setitem__(0, 2.0),
    "closure": lambda made: made.net.cell.update(alpha=2.0),
    "tensor of the host": lambda made: made.net.host.add_(1),
    "slot": lambda made: made.net.heads.append(3),
    "class of a module": lambda made: setattr(made.net.drop, "__class__", nn.Dropout3d),
    "hook": lambda made: made.net.conv.register_forward_hook(lambda *_: None),
    "forward": lambda made: setattr(made.net.conv, "forward", lambda x: x),
    "rate": lambda made: made.optimizer.param_groups[0].update(lr=0.01),
    "weight decay": lambda made: made.optimizer.param_groups[0].update(weight_decay=0.5),
    "optimizer's state": lambda made: made.optimizer.load_state_dict(copy.deepcopy(made.optimizer.state_dict())),
    "optimizer's parameters": lambda made: made.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_python_would_do_differently_ends_the_recording(name: str, made: SimpleNamespace) -> None:
    """The old step was replayed, whatever had changed but for the inputs."""
    assert calls(made, 3) == ["ran", "replayed", "replayed"]
    CHANGES[name](made)
    made.step = made.recorder._run = lambda x: "eager"  # the changed network need not run
    assert calls(made, 1) == ["eager"]
    assert made.recordings[0].released
    assert calls(made, 2) == ["replayed", "replayed"]  # recorded anew


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(Block, "forward", lambda self, x: self.conv(x)),
        lambda patch: patch.setattr(Block, "gain", 2.0, raising=False),
        lambda patch: patch.setattr(nn.Conv3d, "_conv_forward", lambda self, x, weight, bias: x),
        lambda patch: patch.setitem(nn.modules.module._global_forward_hooks, 0, lambda *_: None),
    ],
    ids=["forward", "attribute", "method", "hook of all modules"],
)
def test_what_changes_beside_the_network_ends_the_recording(
    change: Callable[[pytest.MonkeyPatch], None], made: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only ``forward`` of a class was looked at."""
    assert calls(made, 2) == ["ran", "replayed"]
    change(monkeypatch)
    made.recorder._run = lambda x: "eager"
    assert calls(made, 2) == ["eager", "replayed"]


def test_a_failed_attempt_leaves_earlier_recordings_watched(made: SimpleNamespace) -> None:
    """After a second shape failed to record, changes no longer ended the first recording."""
    assert calls(made, 2) == ["ran", "replayed"]
    made.during = lambda: 1 / 0
    assert calls(made, 2, torch.randn(1, 1, 4, 4, 4)) == ["ran", "ran"]
    made.net.drop.p = 0.25
    assert calls(made, 1) == ["ran"]
    assert made.recordings[0].released


def test_what_could_change_unnoticed_is_not_recorded(made: SimpleNamespace) -> None:
    made.net.drawing = np.random.default_rng(0)
    assert calls(made, 3) == ["ran"] * 3
    assert "has drawing, whose changes cannot be detected" in made.recorder.refused


def test_what_a_step_changes_itself_does_not_end_the_recording(made: SimpleNamespace) -> None:
    """Parameters, buffers and optimizer state change, and forward assigns new tensors."""
    calls(made, 2)
    made.step(X)
    made.net.drop.p = float("0.5")  # an equal value
    made.net.config, made.net.path = copy.deepcopy(made.net.config), tuple([1, 2])  # noqa: C409
    assert calls(made, 2) == ["replayed", "replayed"]


def test_the_modes_of_torch_are_part_of_what_is_recorded(made: SimpleNamespace) -> None:
    calls(made, 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert calls(made, 1) == ["ran"]
    with torch.no_grad():
        made.recorder._run = lambda x: "eager"
        assert calls(made, 1) == ["eager"]
    assert calls(made, 1) == ["replayed"]


def test_what_changes_in_every_call_is_not_recorded_for_ever(made: SimpleNamespace, caplog: Any) -> None:
    for number in range(100):
        made.net.drop.p = number / 100
        made.recorder(X)
    assert len(made.recordings) <= 21
    assert "drop.p keeps changing" in made.recorder.refused
    assert caplog.text.count("runs kernel by kernel from now on") == 1


def snapshot(made: SimpleNamespace) -> Any:
    optimizer = copy.deepcopy(made.optimizer.state_dict())
    gradients = [None if p.grad is None else p.grad.clone() for p in made.net.parameters()]
    attributes = copy.deepcopy({name: getattr(made.net, name) for name in ("config", "path", "scale")})
    numbers = torch.get_rng_state(), random.getstate()
    return copy.deepcopy(made.net.state_dict()), optimizer, gradients, attributes, numbers


def counted(made: SimpleNamespace) -> None:
    made.net.config["alpha"] += 1
    made.net.counter = 1


TRACES: dict[str, tuple[Callable[[SimpleNamespace], Any], str]] = {
    "counter": (counted, "in Python, which a replay does not repeat"),
    "attribute": (lambda made: setattr(made.net, "path", (4,)), "the step changes path"),
    "buffer": (lambda made: made.net.norm.running_mean.add_(1), "the step changes norm.running_mean on the CPU"),
    "optimizer": (
        lambda made: made.optimizer.state[made.net.conv.weight]["step"].add_(1),
        "optimizer's step on the CPU",
    ),
    "torch's numbers": (lambda made: torch.rand(1), "draws random numbers on the CPU"),
    "Python's numbers": (lambda made: random.random(), "draws random numbers on the CPU"),
    "rate": (lambda made: made.optimizer.param_groups[0].update(lr=3.0), "the step changes the optimizer's lr"),
    "replaced": (
        lambda made: setattr(made.net, "scale", made.net.scale * 2),
        "the step reads scale and then replaces it",
    ),
    "replaced buffer": (
        lambda made: setattr(made.net.norm, "running_mean", made.net.norm.running_mean + 1),
        "the step reads norm.running_mean and then replaces it",
    ),
    "gradients": (lambda made: [setattr(made.net.conv.bias, "grad", None), 1 / 0], "division by zero"),
    "failure": (lambda made: [counted(made), made.net.norm.running_var.zero_(), 1 / 0], "division by zero"),
}


@pytest.mark.parametrize("name", TRACES)
def test_an_attempt_that_is_given_up_leaves_no_trace(name: str, made: SimpleNamespace) -> None:
    """It left buffers, attributes, random numbers and the optimizer changed, or was replayed without the change."""
    calls(made, 1)
    before = snapshot(made)
    made.recorder._run = lambda x: "eager"
    made.during, reason = (lambda change=TRACES[name][0]: change(made)), TRACES[name][1]
    assert calls(made, 2) == ["eager", "eager"]
    assert reason in made.recorder.refused
    torch.testing.assert_close(snapshot(made), before)
    assert not hasattr(made.net, "counter")


def test_an_attempt_that_another_process_gives_up_leaves_no_trace(made: SimpleNamespace) -> None:
    calls(made, 1)
    before = snapshot(made)
    made.recorder._run = lambda x: "eager"
    made.agree, heads = False, made.net.heads[0]
    assert calls(made, 1) == ["eager"]
    torch.testing.assert_close(snapshot(made), before)
    assert made.net.heads[0] is heads
    assert made.recordings[0].released


@pytest.mark.parametrize("agree", [True, False])
def test_what_is_prepared_for_a_recording_is_undone_with_it(made: SimpleNamespace, agree: bool) -> None:
    """A captured step has its rates on the device; without a recording they are numbers again."""
    group = made.optimizer.param_groups[0]
    state = RecordedState(made.net, made.optimizer, lambda: group.update(lr=torch.tensor(0.1)))
    recorder = Recorder(
        lambda x: "ran", made.recorder._record, lambda yes: yes and agree, warm_up=0, limit=1, state=state
    )
    assert recorder(X) == ("replayed" if agree else "ran")
    assert isinstance(group["lr"], torch.Tensor if agree else float)
    assert recorder.refused == (None if agree else "in another process")


def test_a_signature_tells_types_apart_and_refuses_what_it_cannot_know() -> None:
    """True, 1 and 1.0 are equal to Python; an object may hold something else in the next call."""

    class Mode(Enum):
        FAST = 1
        PAIR = (1, "a")

    class Open(Enum):
        LIST = (["may change"],)

    x = torch.zeros(2)
    given = [
        (x, True),
        (x, 1),
        (x, 1.0),
        (x, "1"),
        (x, Mode.FAST),
        (x, Mode.PAIR),
        (x, torch.float32),
        (x, torch.device("cpu")),
        (x.clone().requires_grad_(), 1),
        (nn.Parameter(x), 1),
    ]
    assert len({describe_inputs(inputs) for inputs in given}) == len(given)
    assert describe_inputs((x, object())) is None
    assert describe_inputs((x, SimpleNamespace(alpha=1))) is None
    assert describe_inputs((x, Open.LIST)) is None


def test_an_input_that_needs_a_gradient_is_not_recorded() -> None:
    """Its gradient would have gone to the recording's copy."""
    with pytest.raises(ParallelError, match=r"pass input.detach\(\)"):
        RecordedFunction(lambda x: x, {"x": X.clone().requires_grad_()})


def test_an_argument_that_cannot_be_known_is_never_recorded(made: SimpleNamespace) -> None:
    state = RecordedState(made.net)
    recorder = Recorder(lambda x, y: "ran", made.recorder._record, bool, warm_up=1, limit=2, state=state)
    assert [recorder(X, SimpleNamespace()) for _ in range(4)] == ["ran"] * 4


@pytest.mark.parametrize(
    "wrap", [lambda net: FitGrid(net, (1, 1, 1)), lambda net: FitGrid(FastKernels(net, "cpu"), (1, 1, 1))]
)
def test_what_a_wrapped_network_reads_is_watched(wrap: Callable[[nn.Module], nn.Module]) -> None:
    """A wrapper has the network's children, and not its attributes."""
    net = Block()
    watch = Watch(wrap(net))
    assert not watch.changes()
    net.path = (1, 3)
    net.config["alpha"] = 2.0
    assert {change.name.rpartition(".")[2] for change in watch.changes()} == {"path", "config"}
    assert not watch.changes()
    net.conv.stride = (2, 2, 2)
    assert [change.name for change in watch.changes()] == ["conv.stride"]
    assert not watch.changes()
