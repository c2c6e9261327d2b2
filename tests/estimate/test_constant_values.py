"""What is made of numbers alone has values where tensors have none."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from volseg.errors import FollowError
from volseg.estimate.fake_step.tracing import tracing
from volseg.estimate.gpu_kinds import find_kind

READ: dict[str, Callable[[torch.device], Any]] = {
    "a list of dims": lambda device: torch.arange(2, 5, device=device).tolist(),
    "rows": lambda device: [row.tolist() for row in torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=device)],
    "a place": lambda device: torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=device)[1, 0].item(),
    "a sum": lambda device: (
        torch.stack([torch.full((3,), 0.5, device=device), torch.ones(3, device=device)]).sum().item()
    ),
    "a question": lambda device: bool((torch.tensor([0.2, -0.3]).to(device) < 0).any()),
    "a single number on a device": lambda device: torch.tensor(0.5, device=device).item(),
}


@pytest.mark.parametrize("read", READ.values(), ids=READ)
def test_numbers_are_what_they_are_with_values(read: Callable[[torch.device], Any]) -> None:
    expected = read(torch.device("cpu"))
    with tracing(find_kind("h200")) as followed:
        assert read(torch.device("cpu")) == expected
        assert read(followed.devices[0]) == expected


def change(tensor: Tensor) -> Tensor:
    return tensor.add_(1.0)


CHANGED: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda made: change(made)[2],
    "by a view": lambda made: (change(made[1:]), made[2])[1],
    "the base of a view": lambda made: (made[2], change(made))[0],
    "by a copy": lambda made: made.copy_(torch.empty(3, device=made.device))[2],
}


@pytest.mark.parametrize("look", CHANGED.values(), ids=CHANGED)
def test_what_was_changed_is_not_told_as_it_was(look: Callable[[Tensor], Tensor]) -> None:
    """A stale number would be a wrong forecast without a word."""
    with pytest.raises(FollowError, match=r"asks for a tensor's value"), tracing(find_kind("h200")) as followed:
        look(torch.zeros(3, device=followed.devices[0])).item()
