"""Each operator on slabs against the same operator on the whole volume: values and gradients in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from volseg.errors import UnsupportedOperatorError
from volseg.parallel.sharding import ShardedVolume
from volseg.parallel.sharding.context import Context
from volseg.parallel.sharding.local import LocalDevices
from volseg.parallel.sharding.table import TABLE
from volseg.parallel.sharding.volume import from_whole

SHAPE = (2, 4, 9, 6, 5)


def constant(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


W3, W2 = constant(6, 4, 3, 3, 3), constant(4, 3, 2, 2, 2)
W5 = constant(3, 4, 5, 3, 1)
SAME = constant(*SHAPE, seed=2)

OPERATORS: dict[str, Callable[[Tensor], Any]] = {
    # convolution
    "conv padded": lambda x: F.conv3d(x, W3, padding=1),
    "conv valid": lambda x: F.conv3d(x, W3),
    "conv strided dilated": lambda x: F.conv3d(x, W3, constant(6), stride=2, padding=3, dilation=2),
    "conv even stride three": lambda x: F.conv3d(x, constant(3, 4, 2, 2, 2), stride=3, padding=1),
    "conv grouped": lambda x: F.conv3d(x, constant(4, 2, 3, 3, 3), padding=1, groups=2),
    "conv same": lambda x: F.conv3d(x, W5, padding="same"),
    "conv same dilated": lambda x: F.conv3d(x, constant(3, 4, 2, 3, 1), padding="same", dilation=2),
    "transposed": lambda x: F.conv_transpose3d(x, W2, stride=2),
    "transposed output padded": lambda x: F.conv_transpose3d(
        x, constant(4, 3, 3, 3, 3), constant(3), stride=2, padding=1, output_padding=1
    ),
    "transposed sparse": lambda x: F.conv_transpose3d(x, constant(4, 3, 1, 1, 1), constant(3), stride=3),
    "transposed dilated grouped": lambda x: F.conv_transpose3d(x, constant(4, 2, 3, 3, 3), dilation=2, groups=2),
    # pooling
    "max pool": lambda x: F.max_pool3d(x, 2),
    "max pool overlapping": lambda x: F.max_pool3d(x, 3, stride=2, padding=1),
    "max pool ceil": lambda x: F.max_pool3d(x, 3, stride=2, ceil_mode=True),
    "max pool dilated": lambda x: F.max_pool3d(x, 2, stride=1, dilation=2),
    "avg pool": lambda x: F.avg_pool3d(x, 3, stride=3),
    "avg pool overlapping": lambda x: F.avg_pool3d(x, 3, stride=2, padding=1),
    "avg pool excluding": lambda x: F.avg_pool3d(x, 3, stride=2, padding=1, count_include_pad=False),
    "avg pool ceil": lambda x: F.avg_pool3d(x, 3, stride=2, padding=1, ceil_mode=True),
    "avg pool ceil excluding": lambda x: F.avg_pool3d(
        x, (4, 2, 2), stride=(3, 2, 2), ceil_mode=True, count_include_pad=False
    ),
    "avg pool divisor": lambda x: F.avg_pool3d(x, 2, stride=1, padding=1, divisor_override=3),
    "adaptive avg": lambda x: F.adaptive_avg_pool3d(x, (5, 4, 2)),
    "adaptive avg to one": lambda x: F.adaptive_avg_pool3d(x, 1),
    "adaptive avg to one plane": lambda x: F.adaptive_avg_pool3d(x, (1, 3, 2)),
    "adaptive max": lambda x: F.adaptive_max_pool3d(x, (4, 1, 3)),
    "adaptive max few": lambda x: F.adaptive_max_pool3d(x, 2),
    # interpolation
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "nearest odd": lambda x: F.interpolate(x, size=(13, 4, 7)),
    "nearest down": lambda x: F.interpolate(x, scale_factor=0.6),
    "nearest exact": lambda x: F.interpolate(x, size=(14, 4, 7), mode="nearest-exact"),
    "trilinear": lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"),
    "trilinear corners": lambda x: F.interpolate(x, scale_factor=2, mode="trilinear", align_corners=True),
    "trilinear down": lambda x: F.interpolate(x, size=(5, 3, 3), mode="trilinear"),
    "trilinear odd factor": lambda x: F.interpolate(x, scale_factor=1.7, mode="trilinear"),
    "trilinear recomputed": lambda x: F.interpolate(x, scale_factor=1.7, mode="trilinear", recompute_scale_factor=True),
    "area": lambda x: F.interpolate(x, size=(5, 3, 2), mode="area"),
    # norms
    "instance": lambda x: F.instance_norm(x, weight=constant(4), bias=constant(4)),
    "instance plain": lambda x: F.instance_norm(x),
    "batch": lambda x: F.batch_norm(x, None, None, constant(4), constant(4), training=True),
    "batch no bias": lambda x: F.batch_norm(x, None, None, constant(4), None, training=True),
    "batch evaluated": lambda x: F.batch_norm(x, constant(4), constant(4).abs(), constant(4), constant(4)),
    "group": lambda x: F.group_norm(x, 2, constant(4), constant(4)),
    "layer over the volume": lambda x: F.layer_norm(x, SHAPE[1:], constant(*SHAPE[1:]), constant(*SHAPE[1:])),
    "layer within": lambda x: F.layer_norm(x, SHAPE[-2:]),
    "layer over channels": lambda x: F.layer_norm(x.movedim(1, -1), (4,), constant(4), constant(4)).movedim(-1, 1),
    "local response": lambda x: F.local_response_norm(x, 3),
    # pointwise
    "arithmetic": lambda x: (2 * x - 1) / (x.square() + 1) ** 0.5 + -x,
    "reversed": lambda x: 1 - x + 2 / (x.abs() + 1) + 2**x,
    "with a volume": lambda x: x * SAME + SAME - x,
    "with a channel": lambda x: x * constant(4, 1, 1, 1) + constant(2, 1, 1, 1, 1),
    "with a plane": lambda x: x + constant(6, 5) * x,
    "with positions": lambda x: x + constant(1, 1, 9, 1, 1),
    "with a number tensor": lambda x: x * constant(1)[0],
    "where": lambda x: torch.where(x > 0, x, SAME),
    "masked fill": lambda x: x.masked_fill(x > 0.5, 0.0),
    "clamp lerp": lambda x: torch.lerp(x.clamp(-1, 1), SAME, 0.3),
    "in place": lambda x: (x * 1).add_(SAME).mul_(2).relu_(),
    "in place operators": lambda x: _in_place_operators(x),
    "prelu": lambda x: F.prelu(x, constant(4)),
    "activations": lambda x: F.gelu(x) + F.silu(x) + F.elu(x) + F.softplus(x) + F.leaky_relu(x, 0.1) + F.mish(x),
    "more activations": lambda x: F.hardswish(x) + F.celu(x) + F.selu(x) + F.relu6(x) + F.logsigmoid(x) + x.tanh(),
    "maximum": lambda x: torch.maximum(x, SAME) + x.minimum(SAME),
    "conversions": lambda x: x.float().double().contiguous().to(torch.float64).type_as(SAME).clone(),
    "zeros like": lambda x: x + torch.zeros_like(x) + torch.ones_like(x),
    # along channels
    "softmax": lambda x: x.softmax(1),
    "log softmax": lambda x: F.log_softmax(x, dim=1) + torch.softmax(x, -1),
    "argmax": lambda x: x.argmax(1),
    "argmax keepdim": lambda x: x.argmax(dim=1, keepdim=True) * x,
    "max along": lambda x: x.max(1)[0],
    "topk": lambda x: torch.topk(x, 2, dim=1).values,
    "cumsum": lambda x: x.cumsum(1),
    "one hot": lambda x: torch.zeros(2, 4, 9, 6, 5, dtype=x.dtype).scatter_(1, x.argmax(1, keepdim=True), 1) * x,
    "gather": lambda x: x.gather(1, x.argmax(1, keepdim=True)),
    "index select": lambda x: x.index_select(1, torch.tensor([2, 0])),
    "normalize": lambda x: F.normalize(x, dim=1),
    "glu": lambda x: F.glu(x, 1),
    "linear": lambda x: F.linear(x.movedim(1, -1), constant(3, 4), constant(3)),
    "matmul right": lambda x: x.movedim(1, -1) @ constant(4, 3),
    "matmul batches": lambda x: x.transpose(1, 2) @ SAME.transpose(1, 2).transpose(-1, -2),
    "matmul left": lambda x: constant(3, 4) @ x.permute(0, 2, 3, 1, 4),
    # reductions
    "mean of all": lambda x: x.mean() * x,
    "sum": lambda x: x.sum((2, 3, 4)),
    "mean keepdim": lambda x: x * x.mean((-1, -2, -3), keepdim=True),
    "mean elsewhere": lambda x: x.mean(1) + x.mean(dim=(0, 1)),
    "sum over the cut alone": lambda x: x.sum(2),
    "amax": lambda x: x.amax((2, 3)) + x.max() - x.min(),
    "var": lambda x: x.var((2, 3, 4)) + x.std(dim=(2, 3, 4), unbiased=False),
    "var elsewhere": lambda x: x.var(1),
    "var mean": lambda x: torch.var_mean(x, (0, 2, 3, 4), correction=0),
    "norm": lambda x: x.norm() + torch.norm(x, p=1, dim=2).sum(),
    "logsumexp": lambda x: x.logsumexp((2, 3, 4)),
    "prod": lambda x: x.prod(2),
    "counts": lambda x: ((x > 0).any().double() + (x < 9).all() + torch.count_nonzero(x > 0)) * x.sum(),
    # slices and joins
    "narrow the cut": lambda x: x.narrow(2, 1, 7),
    "slice with step": lambda x: x[:, :, 1::2, ::2],
    "slice elsewhere": lambda x: x[:, 1:3, ..., 2:],
    "slice few": lambda x: x[:, :, 4:6] * 2,
    "one plane": lambda x: x[:, :, 4] + x.select(2, -1),
    "indices": lambda x: x[0, :, :, 1] + x[1][:, :, 2],
    "new dim": lambda x: x[:, None] * 2,
    "cat channels": lambda x: torch.cat([x, SAME, x * 2], 1),
    "cat the cut": lambda x: torch.cat([x, SAME, x[:, :, :2]], dim=2),
    "cat batch": lambda x: torch.cat((x, x), 0),
    "stack": lambda x: torch.stack([x, SAME], 1),
    "chunk": lambda x: x.chunk(2, 1)[1],
    "chunk the cut": lambda x: x.chunk(2, 2)[0] * 2,
    "split": lambda x: x.split([1, 3], dim=1)[1],
    "unbind": lambda x: x.unbind(1)[2] + torch.unbind(x, dim=2)[3].sum(),
    "assign": lambda x: _assign(x),
    # padding and mirroring
    "pad": lambda x: F.pad(x, (1, 2, 0, 1, 3, 0)),
    "pad value crop": lambda x: F.pad(x, (0, 0, 0, 0, -1, 2), value=1.5),
    "pad reflect": lambda x: F.pad(x, (0, 0, 0, 0, 2, 3), mode="reflect"),
    "pad replicate": lambda x: F.pad(x, (1, 1, 1, 1, 2, 2), mode="replicate"),
    "pad circular": lambda x: F.pad(x, (1, 0, 0, 2, 2, 1), mode="circular"),
    "flip": lambda x: x.flip(2, 4) + torch.flip(x, [3]),
    "roll": lambda x: x.roll((2, 1), (2, 3)),
    "roll back": lambda x: torch.roll(x, -3, 2),
    # dims
    "permute": lambda x: x.permute(0, 2, 3, 4, 1) * constant(4),
    "transpose": lambda x: x.transpose(1, 2).contiguous().movedim(2, 1),
    "reshape": lambda x: x.reshape(2, 2, 2, 9, 30),
    "view": lambda x: x.view(8, 9, -1),
    "flatten": lambda x: x.flatten(3).unflatten(3, (6, 5)),
    "squeeze": lambda x: x.unsqueeze(2).squeeze(2).unsqueeze(-1).squeeze(),
    "expand": lambda x: x[:, :1].expand(-1, 3, -1, -1, -1) + x[:, :1].expand(2, 3, 9, 6, 5),
    "repeat": lambda x: x.repeat(1, 2, 1, 1, 1),
    "repeat interleave": lambda x: x.repeat_interleave(2, dim=1),
    # metadata
    "sizes": lambda x: x * (x.size(2) + x.numel() + x.dim() + len(x.shape) + x.size()[3]),
    "new zeros": lambda x: x + x.new_zeros(1) + x.new_tensor(2.0),
}


def _in_place_operators(x: Tensor) -> Tensor:
    y = x * 1
    y += SAME
    y *= 2
    y -= x
    y /= 3
    return y


def _assign(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 0] = 0.0
    y[:, 1] = SAME[:, 1]
    y[:, 2:4] = x[:, :2]
    return y


def context(grid: tuple[int, ...]) -> Context:
    count = 1
    for shards in grid:
        count *= shards
    return Context(LocalDevices(["cpu"] * count, grid))


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, ShardedVolume) else value


def weighted(values: list[Tensor]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for value in values:
        if value.is_floating_point():
            total = total + (value * torch.arange(1, value.numel() + 1).reshape(value.shape).sin()).sum()
    return total


CUTS = [((2,), (2,)), ((3,), (2,)), ((8,), (2,)), ((2,), (3,)), ((3,), (4,)), ((2, 2), (2, 3)), ((2, 3), (2, 4))]


@pytest.mark.parametrize(("grid", "dims"), CUTS, ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_slabs_compute_what_the_whole_volume_does(name: str, grid: tuple[int, ...], dims: tuple[int, ...]) -> None:
    operator = OPERATORS[name]
    x = constant(*SHAPE, seed=5).requires_grad_()
    expected = operator(x)
    wanted = None
    if any(leaf.requires_grad for leaf in tree_leaves(expected)):
        (wanted,) = torch.autograd.grad(weighted(tree_leaves(expected)), x)
    try:
        actual = operator(from_whole(x, dims, context(grid)))
    except UnsupportedOperatorError:
        # Refusing is right where the cut runs through what the operator needs whole; never along D alone.
        assert dims != (2,)
        pytest.skip("this operator needs a dim whole that is cut here")
    leaves = [whole(leaf) for leaf in tree_leaves(actual)]
    torch.testing.assert_close(leaves, tree_leaves(expected))
    if wanted is not None:
        (gradient,) = torch.autograd.grad(weighted(leaves), x)
        torch.testing.assert_close(gradient, wanted)


def test_every_family_of_the_table_is_tried_here() -> None:
    """The table lists only what an operator test, a network or a loss runs."""
    assert len(TABLE) > 400
    assert len(OPERATORS) > 100
