"""Steps that are followed without a GPU."""

from dataclasses import dataclass

import torch
from torch import nn

from volseg.forecast.following import FollowedStep, follow
from volseg.forecast.trace import Allocate, Free, KernelRun, Mark


@dataclass(frozen=True)
class Gpu:
    name: str = "a GPU"
    processors: int = 132
    capability: tuple[int, int] = (9, 0)


def test_a_step_is_written_down() -> None:
    def step(followed: FollowedStep) -> None:
        net = followed.copy(nn.Conv3d(1, 4, 3, padding=1, bias=False)).to(followed.devices[0])
        x = followed.empty(1, 1, 8, 8, 8)
        followed.mark("step")
        loss = net(x).square().mean()
        loss.backward()
        assert net.weight.grad is not None
        assert net.weight.grad.device == followed.devices[0]

    (trace,) = follow(step, gpu=Gpu())
    sizes = [event.size for event in trace.events if isinstance(event, Allocate)]
    assert sizes[:2] == [4 * 27 * 4, 8**3 * 4]
    assert 4 * 8**3 * 4 in sizes
    assert Mark("step") in trace.events
    (convolution,) = (e for e in trace.events if isinstance(e, KernelRun) and e.name == "aten.convolution")
    assert convolution.flops == 2 * 8**3 * 4 * 27
    assert convolution.dtype == torch.float32
    assert convolution.bytes_moved == 4 * (8**3 + 4 * 27 + 4 * 8**3)


def test_all_memory_is_given_back() -> None:
    def step(followed: FollowedStep) -> None:
        net = followed.copy(nn.Linear(3, 5)).to(followed.devices[0])
        net(followed.empty(2, 3)).sum().backward()

    (trace,) = follow(step, gpu=Gpu())
    taken = {event.block for event in trace.events if isinstance(event, Allocate)}
    given = [event.block for event in trace.events if isinstance(event, Free)]
    assert sorted(given) == sorted(taken)


def test_each_gpu_has_a_trace_of_its_own() -> None:
    def step(followed: FollowedStep) -> None:
        x = torch.ones(256, device=followed.devices[0])
        y = x.to(followed.devices[1])
        torch.ones(1024)  # the host's
        with followed.recording("graph"):
            assert (y + y).device == followed.devices[1]

    first, second = follow(step, gpu=Gpu(), num_gpus=2)
    assert [(e.size, e.pool) for e in first.events if isinstance(e, Allocate)] == [(1024, "")]
    assert [(e.size, e.pool) for e in second.events if isinstance(e, Allocate)] == [(1024, ""), (1024, "graph")]
