"""What autograd writes in place, and what it makes anew: of plain tensors, and so of followed ones."""

from typing import ClassVar

import pytest
import torch

from tests.following import count_kernels, follow, pick
from volseg.estimate.gpu_kinds import find_kind
from volseg.estimate.trace import Allocate, Mark

SIDE = 1000
BYTES = SIDE * SIDE * 4


def follow_backward(function):
    """Return the kernels of a backward pass, and the bytes that it takes."""

    def step(followed):
        weight = followed.empty(SIDE, SIDE).requires_grad_()
        result = function(followed.empty(SIDE, SIDE) @ weight).sum()
        followed.mark("backward")
        result.backward()

    (trace,) = follow(step, gpu=find_kind("h200"))
    begin = trace.events.index(Mark("backward"))
    events = trace.events[begin:]
    return count_kernels(events), [event.size for event in pick(events, Allocate) if event.size >= BYTES]


@pytest.mark.parametrize(
    ("function", "uses"), [(lambda x: x.exp() * x.sin(), 2), (lambda x: x.exp() + x.sin() + x.cos(), 3)]
)
def test_a_gradient_that_nobody_else_holds_takes_the_sum(function, uses):
    names, _ = follow_backward(function)
    assert names["aten.add_"] == uses - 1
    assert "aten.add" not in names


def test_a_gradient_that_comes_twice_is_summed_anew():
    names, _ = follow_backward(lambda x: (x + x).exp())
    assert "aten.add" in names


class Twice(torch.autograd.Function):
    """Doubles, and notes where the gradient lies that its backward makes."""

    seen: ClassVar[list[int]] = []

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        made = gradient * 2
        Twice.seen.append(made.data_ptr())
        return made


def test_real_gradients_are_summed_in_place():
    """What is modelled is what plain tensors do: the first gradient's memory holds the sum."""
    Twice.seen.clear()
    sums = []
    x = torch.ones(SIDE, requires_grad=True) * 2
    x.register_hook(lambda gradient: sums.append(gradient.data_ptr()))
    (Twice.apply(x) * Twice.apply(x)).sum().backward()
    assert sums == Twice.seen[:1]


def test_what_was_read_by_indices_is_summed_in_place():
    names, _ = follow_backward(lambda x: x.index_select(0, torch.zeros(SIDE, dtype=torch.int64, device=x.device)))
    assert "aten.index_add_" in names
