"""Operators that move planes, or combine slabs, against the whole volume: on slabs down to a plane, and on grids.

``test_operator_database`` compares every function; here slabs differ in size, and some halos are several slabs wide.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from volseg.errors import UnsupportedOperatorError
from volseg.parallel.spatial import ShardedVolume
from volseg.parallel.spatial.context import Context
from volseg.parallel.spatial.transport.one_process import LocalDevices
from volseg.parallel.spatial.volume import from_whole

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
    # with an ordinary tensor that is cut, or is not
    "with a plane": lambda x: x + constant(6, 5) * x,
    "with positions": lambda x: x + constant(1, 1, 9, 1, 1),
    "layer norm over the volume": lambda x: F.layer_norm(x, SHAPE[1:], constant(*SHAPE[1:]), constant(*SHAPE[1:])),
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
    "cat the cut": lambda x: torch.cat([x, SAME, x[:, :, :2]], dim=2),
    "chunk the cut": lambda x: x.chunk(2, 2)[0] * 2,
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
    "reshape": lambda x: x.reshape(2, 2, 2, 9, 30),
    "reshape by tensors": lambda x: x.reshape((2, 2, torch.tensor(2), 9, 30)).view([*torch.tensor((2, 4, 9, 30))]),
    "view": lambda x: x.view(8, 9, -1),
    "flatten": lambda x: x.flatten(3).unflatten(3, (6, 5)),
    # dims: the cut one merged with its neighbours, and split again
    "merged": lambda x: (x.flatten(2).relu() + SAME.view(2, 4, -1)).softmax(1),
    "merged statistics": lambda x: x.flatten(2).var(2) + x.flatten(2).amax(-1) + x.view(2, 4, -1).norm(dim=2),
    "merged dice": lambda x: (x.view(2, -1) * SAME.view(2, -1)).sum(1) / x.reshape(2, -1).sigmoid().sum(1),
    "merged with all": lambda x: x.view(-1).pow(2).mean() + torch.dot(x.reshape(-1), SAME.reshape(-1)),
    "merged and back": lambda x: x.flatten(2).transpose(1, 2).mul(2).transpose(1, 2).reshape(SHAPE) + x,
    "merged tokens": lambda x: F.layer_norm(F.linear(x.flatten(2).transpose(1, 2), constant(6, 4)), (6,)),
    "merged norm over all": lambda x: F.layer_norm(x.flatten(2), (270,), constant(270)),
    "merged in place": lambda x: (x * 1).flatten(2).clone().add_(SAME.flatten(2)).mul_(2),
    "merged joins": lambda x: torch.cat([torch.cat([x.flatten(2), SAME.flatten(2)], 1)[:, 2:6], x.flatten(2)], 1),
    "merged, then planes": lambda x: F.conv1d(x[:1].flatten(2), constant(3, 4, 3), padding=1)[..., 9:200:3],
    "merged beside planes": lambda x: x.movedim(1, -1) + x.flatten(2).transpose(1, 2).reshape(2, 9, 6, 5, 4),
    "windows": lambda x: _windows(x),
    "windows and back": lambda x: _from_windows(_windows(x).softmax(1)).roll((1, 2), (1, 2)) + x.movedim(1, -1),
    "shuffle": lambda x: F.conv3d(
        x.reshape(2, 1, 2, 2, 1, 9, 6, 5).permute(0, 1, 5, 2, 6, 3, 7, 4).reshape(2, 1, 18, 12, 5),
        constant(2, 1, 3, 3, 3),
    ),
    "unshuffle": lambda x: x.reshape(2, 4, 3, 3, 3, 2, 5, 1).permute(0, 1, 3, 5, 7, 2, 4, 6).reshape(2, 24, 3, 3, 5),
    "split in groups": lambda x: x.unflatten(2, (3, 3)).sum(3),
    "head": lambda x: F.linear(x.flatten(1), constant(3, 1080), constant(3)),
    # slices as samples
    "slices convolved": lambda x: _slices(x, lambda y: F.conv2d(y, constant(18, 4, 3, 3), constant(18), padding=1)),
    "slices transposed": lambda x: _slices(x, lambda y: F.conv_transpose2d(y, constant(4, 6, 2, 2), stride=2)),
    "slices pooled": lambda x: _slices(x, lambda y: F.max_pool2d(y, 2) + F.adaptive_avg_pool2d(y, (3, 2))),
    "slices resized": lambda x: _slices(x, lambda y: F.interpolate(y, scale_factor=2, mode="bilinear")),
    "slices normed": lambda x: _slices(x, lambda y: F.instance_norm(y) + F.group_norm(y, 2, constant(4))),
    "slices normed together": lambda x: _slices(
        x, lambda y: F.batch_norm(y, None, None, constant(4), constant(4), training=True)
    ),
    "slices padded": lambda x: _slices(x, lambda y: F.prelu(F.pad(y, (1, 1, 1, 1), mode="reflect"), constant(4))),
    # products
    "einsum along channels": lambda x: torch.einsum("bc...,ck->bk...", x, constant(4, 3)),
    "einsum along the cut": lambda x: torch.einsum("bcdhw,dk->bckhw", x[..., :1, :1], constant(9, 3)),
    "einsum of two": lambda x: torch.einsum("bcdhw,bcdhw->bc", x, SAME),
    "einsum without a result": lambda x: torch.einsum("bcdhw,bkdhw,ck", x, SAME, constant(4, 4)),
    "attention by einsum": lambda x: torch.einsum(
        "bxy,byd->bxd", torch.einsum("bxc,byc->bxy", _tokens(x), _tokens(x) / 10).softmax(-1), _tokens(x)
    ),
    "attention": lambda x: F.scaled_dot_product_attention(_tokens(x), _tokens(x) * 2, _tokens(x) + 1),
    "attention masked": lambda x: F.scaled_dot_product_attention(
        _tokens(x), _tokens(x) * 2, _tokens(x) + 1, attn_mask=constant(270, 270) > -0.5, scale=0.3
    ),
    "attention to others": lambda x: F.scaled_dot_product_attention(_tokens(x), constant(2, 7, 4), constant(2, 7, 3)),
    "attention of others": lambda x: F.scaled_dot_product_attention(constant(2, 7, 4), _tokens(x) * 2, _tokens(x)),
    "matmul of tokens": lambda x: (
        (_tokens(x) @ x.flatten(2)).softmax(-1) @ _tokens(x) + torch.bmm(_tokens(x), x.flatten(2) @ _tokens(x))
    ),
    "matmul of vectors": lambda x: x[0].flatten(1) @ constant(270) + torch.mv(x[0].flatten(1), constant(270)),
    "added products": lambda x: torch.baddbmm(constant(2, 270, 270), _tokens(x), x.flatten(2), beta=0.5, alpha=2),
    "outer products": lambda x: torch.outer(x[0, 0, :, 0, 0], constant(4)).sum() * torch.inner(x, constant(3, 5)),
    "tensordot": lambda x: torch.tensordot(x, constant(4, 3), dims=([1], [0])),
    "linear over the cut": lambda x: F.linear(x[..., :1, :1].movedim(2, -1), constant(3, 9), constant(3)),
    # indices
    "list": lambda x: x[:, [0, 2]] + x[:, torch.tensor([3, 0])],
    "lists": lambda x: x[:, None, [1, 2], ..., [0, 3]],
    "table": lambda x: constant(4, 3)[x.argmax(1)] * x[:, :1].movedim(1, -1),
    "embedding": lambda x: F.embedding(x.argmax(1), constant(4, 3), padding_idx=1) * x[:, :1].movedim(1, -1),
    "planes by number": lambda x: x[:, :, [0, 8, 3, 3, 1]] + x.index_select(2, torch.tensor([4, 1, 1, 0, 7])),
    "mask": lambda x: x[x > 0] * SAME[x > 0],
    "mask of channels": lambda x: x[:, torch.tensor([True, False, True, True])],
    "mask in front": lambda x: x[x[:, :, :, 0, 0] > 0],
    "one integer": lambda x: x[:, torch.tensor(1)] * 2,
    "index add": lambda x: torch.index_add(x, 1, torch.tensor([0, 2]), SAME[:, :2], alpha=2).index_fill(
        1, torch.tensor([3]), 1.0
    ),
    "differences": lambda x: (
        x.diff(dim=2)[:, 0].sum(1) + torch.diff(x, n=2, dim=1, prepend=SAME[:, :1])[:, 0, 1:].sum(1)
    ),
    "parts": lambda x: torch.dsplit(x, 3)[1] * 2 + x.hsplit(2)[1].vsplit(2)[0].sum(),
    "assign masked": lambda x: _changed(x, lambda y: y.__setitem__(x > 0.3, 0.0)),
    "assign masked values": lambda x: _changed(x, lambda y: y.__setitem__(SAME > 0.3, constant(1080)[: _count(SAME)])),
    "assign lists": lambda x: _changed(x, lambda y: y.__setitem__((slice(None), [0, 2]), SAME[:, [1, 3]])),
    "assign planes by number": lambda x: _changed(
        x, lambda y: y.__setitem__((slice(None), slice(None), [0, 2, 7]), x[:, :, 1:4])
    ),
}


def _assign(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 0] = 0.0
    y[:, 1] = SAME[:, 1]
    y[:, 2:4] = x[:, :2]
    return y


def _tokens(x: Tensor) -> Tensor:
    return x.flatten(2).transpose(1, 2)


def _windows(x: Tensor) -> Tensor:
    """Cut into windows of 3 x 3 x 1 voxels, all of them in one batch."""
    parts = x.movedim(1, -1).reshape(2, 3, 3, 2, 3, 5, 1, 4)
    return parts.permute(0, 1, 3, 5, 2, 4, 6, 7).reshape(-1, 9, 4)


def _from_windows(windows: Tensor) -> Tensor:
    return windows.view(2, 3, 2, 5, 3, 3, 1, 4).permute(0, 1, 4, 2, 5, 3, 6, 7).reshape(2, 9, 6, 5, 4)


def _slices(x: Tensor, layer: Callable[[Tensor], Tensor]) -> Tensor:
    samples = layer(x.transpose(1, 2).reshape(18, 4, 6, 5))
    return samples.view(2, 9, *samples.shape[1:]).transpose(1, 2)


def _changed(x: Tensor, change: Callable[[Tensor], None]) -> Tensor:
    y = x * 1
    change(y)
    return y


def _count(x: Tensor) -> int:
    return int((x > 0.3).sum())


def context(grid: tuple[int, ...]) -> Context:
    count = 1
    for shards in grid:
        count *= shards
    # "cpu:1" is copied to as a second GPU is.
    return Context(LocalDevices(["cpu", *(f"cpu:{i}" for i in range(1, count))], grid))


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
