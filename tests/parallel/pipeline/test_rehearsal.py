import pytest
import torch
from torch import Tensor, nn

from volseg.parallel.pipeline import Pipeline, PipelineStrategy
from volseg.parallel.pipeline.micro_batch import split
from volseg.parallel.pipeline.record.record import record_batch
from volseg.parallel.pipeline.record.rehearsal import rehearse
from volseg.parallel.pipeline.record.replay import Replay

CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.a, self.norm, self.drop, self.b = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout(p), nn.Conv2d(2, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.drop(self.norm(self.a(x))).relu())


def recorded(net: nn.Module, x: Tensor, lanes: int = 1):
    """A rehearsal, and a recording of the same batch."""
    strategy = PipelineStrategy(net, Pipeline(split_size=2, cuts=["b"]), devices=["cpu"] * 2)
    strategy.plan(x)
    calls = split((x,), {}, 2)
    rehearsal = rehearse(net, strategy.placement, calls, [2, 2])
    return rehearsal, Replay(record_batch(net, strategy.placement, calls, lanes), [2, 2], CPU, [True])


@pytest.mark.parametrize("lanes", [1, 2])
def test_right_recording_passes_and_nothing_is_changed(lanes):
    net, x = Net().double(), torch.randn(4, 1, 6, 6, dtype=torch.float64)
    before = {name: state.clone() for name, state in net.state_dict().items()}
    rehearsal, replay = recorded(net, x, lanes)
    assert rehearsal.find_disagreement(replay, [x]) is None
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in net.parameters())
    assert replay.is_free


def spoil_output(replay: Replay) -> None:
    replay.recorded.slots[1].parts[1].edges[0].source = torch.zeros_like(
        replay.recorded.slots[1].parts[1].edges[0].source
    )


def spoil_gradient(replay: Replay) -> None:
    replay.recorded.slots[0].parts[0].sends.clear()


def spoil_reach(replay: Replay) -> None:
    for slot in replay.recorded.slots:
        slot.outputs[0].reaches = frozenset()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_output, "output 0 differs from the eager run"),
        (spoil_gradient, "a gradient differs from the eager run"),
        (spoil_reach, "gradients reach other parameters"),
    ],
)
def test_wrong_recording_is_found(spoil, message):
    x = torch.randn(4, 1, 6, 6, dtype=torch.float64)
    rehearsal, replay = recorded(Net().double(), x)
    spoil(replay)
    assert message in rehearsal.find_disagreement(replay, [x])


def test_random_networks_are_let_through_and_the_generator_is_put_back():
    state = torch.get_rng_state()
    rehearsal, _ = recorded(Net(p=0.5).eval().double(), torch.ones(4, 1, 6, 6, dtype=torch.float64))
    assert rehearsal is not None
    net, x = Net(p=0.5).double(), torch.ones(4, 1, 6, 6, dtype=torch.float64)
    strategy = PipelineStrategy(net, Pipeline(split_size=2, cuts=["b"]), devices=["cpu"] * 2)
    strategy.plan(x)
    state = torch.get_rng_state()
    assert rehearse(net, strategy.placement, split((x,), {}, 2), [2, 2]) is None
    assert torch.equal(torch.get_rng_state(), state)
