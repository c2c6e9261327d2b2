"""Random stacks of operators on random shapes and shards compute what they do on the whole volume."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_up_networks import Apply
from torch import Tensor, nn

from volseg.errors import UnsupportedOperatorError
from volseg.parallel import ModelParallel
from volseg.parallel.verification.comparison import (
    TOLERANCE,
    compare,
    compare_values,
    default_objective,
    eager_step,
    observe,
)

CHANNELS = 4


class Beside(nn.Module):
    """A branch joined with its own input, resized to it: a skip connection."""

    def __init__(self, branch: nn.Module, join: str) -> None:
        super().__init__()
        self.branch, self.join = branch, join
        self.mix = nn.Conv3d(2 * CHANNELS, CHANNELS, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.branch(x)
        if y.shape[2:] != x.shape[2:]:
            y = F.interpolate(y, size=x.shape[2:], mode="trilinear")
        return x + y if self.join == "add" else self.mix(torch.cat([x, y], 1))


def convolutions() -> st.SearchStrategy[nn.Module]:
    def build(kernel: int, stride: int, padding: int, dilation: int, groups: int, bias: bool) -> nn.Module:
        return nn.Conv3d(CHANNELS, CHANNELS, kernel, stride, min(padding, kernel), dilation, groups=groups, bias=bias)

    return st.builds(
        build,
        st.integers(1, 5),
        st.integers(1, 3),
        st.integers(0, 2),
        st.integers(1, 2),
        st.sampled_from([1, 2]),
        st.booleans(),
    )


def transposed() -> st.SearchStrategy[nn.Module]:
    def build(kernel: int, stride: int, padding: int, extra: int) -> nn.Module:
        return nn.ConvTranspose3d(CHANNELS, CHANNELS, kernel, stride, min(padding, kernel - 1), min(extra, stride - 1))

    return st.builds(build, st.integers(1, 4), st.integers(1, 3), st.integers(0, 1), st.integers(0, 1))


def pools() -> st.SearchStrategy[nn.Module]:
    def build(kind: type[nn.Module], kernel: int, stride: int, padding: int, ceil: bool) -> nn.Module:
        return kind(kernel, stride, min(padding, kernel // 2), ceil_mode=ceil)

    kinds = st.sampled_from([nn.MaxPool3d, nn.AvgPool3d])
    return st.builds(build, kinds, st.integers(1, 3), st.integers(1, 2), st.integers(0, 1), st.booleans())


def norms() -> st.SearchStrategy[nn.Module]:
    # MaxPool's ties and a norm's 1/0 aside, every function here is smooth enough for float64 to show any mistake.
    return st.sampled_from(["batch", "instance", "affine", "group"]).map(
        lambda kind: {
            "batch": nn.BatchNorm3d(CHANNELS),
            "instance": nn.InstanceNorm3d(CHANNELS, eps=0.1),
            "affine": nn.InstanceNorm3d(CHANNELS, eps=0.1, affine=True, track_running_stats=True),
            "group": nn.GroupNorm(2, CHANNELS, eps=0.1),
        }[kind]
    )


FUNCTIONS: list[Callable[[Tensor], Tensor]] = [
    lambda x: F.relu(x, inplace=True),
    lambda x: F.leaky_relu(x, 0.1),
    lambda x: F.elu(x, inplace=True),
    lambda x: F.pad(x, (0, 1, 1, 0, 2, 1)),
    lambda x: F.pad(x, (1, 1, 0, 0, 1, 1), mode="replicate"),
    lambda x: x[:, :, 1:],
    lambda x: x[..., 1:, :],
    lambda x: x.flip(2, 3) * 0.5,
    lambda x: x * x.mean((2, 3, 4), keepdim=True).sigmoid(),
    lambda x: x.softmax(1),
    lambda x: x - x.amax((2, 3, 4), keepdim=True),
    lambda x: torch.cat([x, x[:, :, :2]], 2),
    lambda x: torch.cat(x.chunk(2, 1)[::-1], 1),
    lambda x: x.reshape(x.shape[0], 2, -1, *x.shape[2:]).flatten(1, 2).contiguous(),
    lambda x: F.interpolate(x, scale_factor=2),
    lambda x: F.interpolate(x, scale_factor=1.5, mode="trilinear", align_corners=True),
    lambda x: x.movedim(1, -1).movedim(-1, 1),
]


def layers() -> st.SearchStrategy[nn.Module]:
    functions = st.sampled_from(FUNCTIONS).map(Apply)
    plain = st.one_of(convolutions(), norms(), functions, transposed(), pools())
    beside = st.builds(
        lambda inner, join: Beside(nn.Sequential(*inner), join),
        st.lists(plain, min_size=1, max_size=3),
        st.sampled_from(["add", "cat"]),
    )
    return st.one_of(plain, plain, beside)


LARGEST = 200_000
"""Elements of the largest activation: a few upsampling layers on end would take gigabytes."""


def runs(net: nn.Sequential, volume: Tensor) -> bool:
    """Say whether the plain network can be trained on the volume at all, and does not let it grow out of hand."""
    try:
        outline = volume.to("meta")
        for layer in copy.deepcopy(net).to("meta"):
            outline = layer(outline)
            if not 0 < outline.numel() < LARGEST:
                return False
        net(volume).square().mean().backward()
    except (RuntimeError, ValueError):
        return False
    return True


MOVES = 16
"""Of the input, to find results that round-off decides. Behind a norm, and a convolution that pads by its whole kernel,
a mean is zero but for round-off: whether a ReLU there lets the border through changes with most moves, but not all."""


def find_round_off(net: nn.Module, volume: Tensor) -> dict[str, float]:
    """Return how far the plain network's own values move at most where its input moves by round-off."""

    def look(given: Tensor) -> dict[str, Any]:
        own = copy.deepcopy(net)
        return observe(own, [given], eager_step(own, default_objective))[0]

    expected, largest = look(volume), {}
    for _ in range(MOVES):
        moved = volume * (1 + torch.randint_like(volume, -4, 5) * torch.finfo(volume.dtype).eps)
        for name, error in compare_values(expected, look(moved)).errors.items():
            largest[name] = max(largest.get(name, 0.0), error)
    return largest


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(
    stack=st.lists(layers(), min_size=1, max_size=6),
    size=st.tuples(st.integers(3, 17), st.integers(3, 9), st.integers(3, 7)),
    batch=st.integers(1, 2),
    shards=st.sampled_from([1, 2, 3, 4, 8]),
    axes=st.sampled_from(["D", "D", "H", None]),
    last=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_stack_on_slabs_equals_the_stack(
    stack: list[nn.Module],
    size: tuple[int, int, int],
    batch: int,
    shards: int,
    axes: str | None,
    last: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    for module in nn.Sequential(*stack).modules():  # which were made with whatever numbers came next
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()
    first = nn.Conv3d(1, CHANNELS, 3, padding=1)
    plain, other, reference = (copy.deepcopy(nn.Sequential(first, *stack).double().train()) for _ in range(3))
    volume = torch.randn(batch, 1, *size, dtype=torch.float64)
    if not runs(copy.deepcopy(plain), volume):
        return
    model = ModelParallel(
        other, strategy="spatial", devices=["cpu"] * shards, axes=axes, channels_last=last, on_unsupported="raise"
    )
    try:
        errors = compare(plain, model, [volume])
    except UnsupportedOperatorError as refused:
        # What has no sharded form here: padding a volume that stays thinner than the shards, and an activation in place
        # behind a slice, reshape or contiguous(), where torch may have a view and slabs a copy.
        if not any(reason in str(refused) for reason in ("thinner than the number of shards", "(or another view)")):
            raise
        return
    wrong = {name: error for name, error in errors.items() if not error <= TOLERANCE * 1e2}
    if wrong:
        # A result that is zero but for round-off (the mean of what a norm has centred) has no digits to agree in.
        noise = find_round_off(reference, volume)
        wrong = {name: error for name, error in wrong.items() if not error <= TOLERANCE * 1e2 + 100 * noise[name]}
    assert not wrong, wrong
