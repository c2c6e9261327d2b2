"""What a recording holds by its address stays there when another step of the network is recorded."""

from weakref import WeakSet

import torch
from torch import nn

from volseg.device import gpus
from volseg.parallel import recorded_step


class Recording:
    """Stands for a recording, which needs a GPU: its replay writes gradients where they were."""

    def __init__(self, net: nn.Module) -> None:
        self._gradients = [parameter.grad for parameter in net.parameters()]


def test_a_second_optimizer_moves_no_gradients_that_a_recording_writes(monkeypatch):
    """The replays of the first showed old gradients, and wrote where nothing was theirs any more."""
    net = nn.Conv3d(1, 2, 1)
    optimizers = [torch.optim.SGD(net.parameters(), 0.1, momentum=0.9) for _ in range(2)]
    monkeypatch.setattr(gpus, "on_gpu", lambda _: True)
    monkeypatch.setattr(recorded_step, "_RECORDED", WeakSet())
    monkeypatch.setattr(gpus, "empty_cache", lambda _: None)
    moved = []
    for optimizer in optimizers:
        net(torch.randn(1, 1, 2, 2, 2)).sum().backward()
        optimizer.step()
        states = [state["momentum_buffer"] for state in optimizer.state.values()]
        places = [tensor.data_ptr() for tensor in (net.weight.grad, *states)]
        recorded_step._prepare(net, optimizer, torch.device("cpu"))
        found = [tensor.data_ptr() for tensor in (net.weight.grad, *states)]
        moved.append([place != now for place, now in zip(places, found, strict=True)])
        recording = Recording(net)
        recorded_step._RECORDED.add(recording)
    assert moved == [[True] * 3, [False, True, True]]
