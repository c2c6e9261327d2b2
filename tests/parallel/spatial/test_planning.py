"""Layouts and windows against brute force."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from volseg.parallel import ModelParallel
from volseg.parallel.spatial import SpatialStrategy
from volseg.parallel.spatial.plan.shards import bounds, overlap, spans, transfers
from volseg.parallel.spatial.plan.windows import Convolution, Resize, TransposedConvolution, nearest_planes, plan_halo


@given(size=st.integers(1, 200), shards=st.integers(1, 16))
def test_slabs_partition_the_planes_evenly(size: int, shards: int) -> None:
    owned = spans(size, shards)
    assert [plane for start, stop in owned for plane in range(start, stop)] == list(range(size))
    widths = {stop - start for start, stop in owned}
    assert max(widths) - min(widths) <= 1
    assert bounds(size, shards)[0] == 0


@given(data=st.data(), size=st.integers(1, 40), shards=st.integers(1, 6))
def test_transfers_deliver_each_wanted_plane_once_and_in_order(data: st.DataObject, size: int, shards: int) -> None:
    wanted = []
    for _ in range(shards):
        start = data.draw(st.integers(-size, size))  # over an end they go on at the other one
        wanted.append((start, data.draw(st.integers(start, min(start + size, 2 * size)))))
    unit = data.draw(st.sampled_from([count for count in range(1, size + 1) if size % count == 0]))
    owned = spans(size, shards, unit)
    for target, want in enumerate(wanted):
        moves = [move for move in transfers(size, wanted, unit) if move.target == target]
        assert [p for move in moves for p in range(move.start, move.stop)] == [p % size for p in range(*want)]
        assert [p for move in moves for p in range(move.place, move.place + move.stop - move.start)] == [
            p - want[0] for p in range(*want)
        ]
        assert all(overlap((move.start, move.stop), owned[move.source]) == (move.start, move.stop) for move in moves)


WINDOW = {"kernel": st.integers(1, 5), "stride": st.integers(1, 4), "padding": st.integers(0, 3)}
DILATION, SIZE = st.integers(1, 3), st.integers(1, 20)


@given(**WINDOW, dilation=DILATION, size=SIZE)
def test_convolution_reads_what_it_needs(kernel: int, stride: int, padding: int, dilation: int, size: int) -> None:
    window = Convolution(kernel, stride, padding, dilation)
    if size + 2 * padding < (kernel - 1) * dilation + 1:
        return
    x = torch.randn(1, 1, size, dtype=torch.float64, requires_grad=True)
    w = torch.ones(1, 1, kernel, dtype=torch.float64)
    y = F.conv1d(x, w, stride=stride, padding=padding, dilation=dilation)
    assert window.outputs(size, padding) == y.shape[-1]
    for plane in range(y.shape[-1]):
        (gradient,) = torch.autograd.grad(y[0, 0, plane], x, retain_graph=True)
        used = gradient[0, 0].nonzero().flatten().tolist()
        start, stop = window.need(plane, plane + 1)
        assert all(start <= plane < stop for plane in used)


@given(**WINDOW, dilation=DILATION, extra=st.integers(0, 3), size=SIZE, data=st.data())
def test_transposed_convolution_on_the_needed_planes_gives_the_wanted_ones(
    kernel: int, stride: int, padding: int, dilation: int, extra: int, size: int, data: st.DataObject
) -> None:
    window = TransposedConvolution(kernel, stride, padding, dilation)
    outputs = window.outputs(size, extra)
    if outputs < 1 or extra >= max(stride, dilation):
        return
    x, w = torch.randn(1, 1, size, dtype=torch.float64), torch.randn(1, 1, kernel, dtype=torch.float64)
    settings = {"stride": stride, "dilation": dilation}
    whole = F.conv_transpose1d(x, w, padding=padding, output_padding=extra, **settings)
    assert whole.shape[-1] == outputs
    start = data.draw(st.integers(0, outputs - 1))
    stop = data.draw(st.integers(start + 1, outputs))
    low, high = window.need(start, stop)
    planes = F.pad(x, (99, 99))[..., low + 99 : high + 99]  # nothing but zeros outside the volume
    local = F.conv_transpose1d(planes, w, **settings)
    skip = start - window.first(start, stop)
    assert skip >= 0
    torch.testing.assert_close(local[..., skip : skip + stop - start], whole[..., start:stop])


@given(**WINDOW, size=SIZE, shards=st.integers(1, 4))
def test_a_halo_is_the_planes_of_direct_neighbours_that_are_read(
    kernel: int, stride: int, padding: int, size: int, shards: int
) -> None:
    """By brute force: the planes that each shard's outputs read, its own slab among them, and nobody else's."""
    window = Convolution(kernel, stride, padding)
    outputs = window.outputs(size, padding)
    assume(outputs >= shards and size >= shards)
    found = plan_halo(size, shards, window, outputs)
    expected = []
    owned = spans(size, shards)
    for index, (own, (first, last)) in enumerate(zip(owned, spans(outputs, shards), strict=True)):
        read = [plane * stride - padding + tap for plane in range(first, last) for tap in range(kernel)]
        before, behind = own[0] - min(read), max(read) + 1 - own[1]
        # A neighbour sends planes of its own only: zeros beyond it are not among them. At the border nobody sends any.
        near = min(read) if index == 0 else owned[index - 1][0]
        far = max(read) + 1 if index == shards - 1 else owned[index + 1][1]
        simple = min(before, behind) >= 0 and near <= min(read) and max(read) < far
        expected.append((before, behind) if simple else None)
    assert found == (None if None in expected else tuple(expected))


@given(size=st.integers(1, 20), outputs=st.integers(1, 40), corners=st.booleans())
def test_resize_blends_the_planes_that_torch_blends(size: int, outputs: int, corners: bool) -> None:
    window = Resize(size, outputs, align_corners=corners)
    x = torch.randn(1, 1, size, dtype=torch.float64)
    expected = F.interpolate(x, size=outputs, mode="linear", align_corners=corners)[0, 0]
    sources = [window.source(plane) for plane in range(outputs)]
    got = torch.stack([x[0, 0, low] * (1 - w) + x[0, 0, high] * w for low, high, w in sources])
    torch.testing.assert_close(got, expected)


@given(
    mode=st.sampled_from(["nearest", "nearest-exact"]),
    size=st.integers(1, 20),
    times=st.sampled_from([1, 2, 4, 8]),
    down=st.booleans(),
    scaled=st.booleans(),
)
def test_nearest_takes_the_planes_that_torch_takes(mode: str, size: int, times: int, down: bool, scaled: bool) -> None:
    size, outputs = (size * times, size) if down else (size, size * times)
    scale = outputs / size if scaled else None
    planes = nearest_planes(size, outputs, mode, scale)
    assert planes is not None
    x = torch.randn([2, 2, size, 3, 3], requires_grad=True)
    factors: dict[str, Any] = {"scale_factor": (scale, 1.0, 1.0)} if scaled else {"size": (outputs, 3, 3)}
    expected = F.interpolate(x, mode=mode, **factors)
    taken = x.index_select(2, torch.tensor(planes))
    torch.testing.assert_close(taken, expected)
    weights = torch.randn_like(expected)
    torch.testing.assert_close(*(torch.autograd.grad((y * weights).sum(), x)[0] for y in (taken, expected)))
    assert nearest_planes(7, 15, mode, None) is nearest_planes(4, 8, mode, 2.05) is None


@pytest.mark.parametrize(
    ("size", "dim"), [((32, 96, 96), 2), ((31, 96, 96), 3), ((31, 64, 96), 4), ((96, 96, 96), 2), ((8, 8, 8), 2)]
)
def test_a_volume_is_cut_along_depth_unless_that_is_thin(size: tuple[int, int, int], dim: int) -> None:
    model = ModelParallel(nn.Conv3d(1, 1, 3, padding=1), strategy="spatial", devices=["cpu"] * 2)
    assert isinstance(model.strategy, SpatialStrategy)
    assert model.strategy.dims_of(torch.Size((1, 1, *size))) == [dim]
    chosen = ModelParallel(nn.Conv3d(1, 1, 3, padding=1), strategy="spatial", devices=["cpu"] * 2, axes="H")
    assert isinstance(chosen.strategy, SpatialStrategy)
    assert chosen.strategy.dims_of(torch.Size((1, 1, *size))) == [3]
