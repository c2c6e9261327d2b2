"""Choice of a kernel's tile: the number of memory sectors that it loads."""

import itertools

import pytest
import torch
from torch import Tensor

from volseg.device import fusions
from volseg.device.triton_tiles import choose_tile, compute_divider, is_narrow, read_strides

SECTOR = 32
"""Bytes that a GPU reads or writes at least, wherever they are wanted."""

LAYOUTS = ["contiguous", "channels last", "slice of channels"]


def volume(channels: int, layout: str) -> Tensor:
    whole = torch.empty(1, 2 * channels, 16, 16, 16, dtype=torch.bfloat16)
    if layout == "contiguous":
        return whole[:, :channels].contiguous()
    last = whole.contiguous(memory_format=torch.channels_last_3d)
    if layout == "slice of channels":
        return last[:, channels:]
    return last[:, :channels].contiguous(memory_format=torch.channels_last_3d)


def count_sector_bytes(tensor: Tensor, tile: tuple[int, int]) -> tuple[int, int]:
    """Return the bytes of the sectors that a first tile reads, and of its elements."""
    _, step, stride = read_strides(tensor)
    voxels, channels = torch.arange(tile[0]), torch.arange(min(tile[1], tensor.shape[1]))
    places = tensor.element_size() * (int(tensor.storage_offset()) + voxels[:, None] * stride + channels[None] * step)
    return SECTOR * len(set((places // SECTOR).flatten().tolist())), tensor.element_size() * places.numel()


@pytest.mark.parametrize("channels", [1, 2, 3, 8, 16, 32, 200])
@pytest.mark.parametrize("layouts", [*itertools.product(LAYOUTS, repeat=2)], ids=", ".join)
def test_whole_lines_are_read_however_the_volumes_lie(layouts: tuple[str, str], channels: int) -> None:
    volumes = [volume(channels, layout) for layout in layouts]
    tile = choose_tile(*volumes)
    for own, layout in zip(volumes, layouts, strict=True):
        read, wanted = count_sector_bytes(own, tile)
        # Twice where only every second channel is wanted.
        assert read <= 2 * wanted, layout


@pytest.mark.parametrize("voxels", [(16, 16, 16), (3, 5, 7)])
def test_one_channel_is_addressed_alike_in_both_layouts(voxels: tuple[int, ...]) -> None:
    contiguous = torch.empty(2, 1, *voxels)
    last = torch.empty(2, 1, *voxels).contiguous(memory_format=torch.channels_last_3d)
    assert read_strides(contiguous) == read_strides(
        last.as_strided(last.shape, [last.stride(0), 1, *last.stride()[2:]])
    )
    assert read_strides(contiguous) == (contiguous.stride(0), 0, 1)
    assert choose_tile(contiguous) == choose_tile(last)


@pytest.mark.parametrize(("channels", "narrow"), [(1, False), (3, True), (8, False), (12, True), (80, False)])
def test_channels_that_are_loaded_one_by_one(channels: int, narrow: bool) -> None:
    last, first = volume(channels, "channels last"), volume(channels, "contiguous")
    assert is_narrow(last, choose_tile(last)) == narrow
    assert not is_narrow(first, choose_tile(first))


@pytest.mark.parametrize("n", [1, 2, 3, 5, 7, 10, 127, 128, 129, 160, 1000, 2**20 + 7])
def test_divider(n: int) -> None:
    multiplier, shift = compute_divider(n)
    assert -(2**31) <= multiplier < 2**31
    for v in (0, 1, n - 1, n, n + 1, 5 * n - 1, 5 * n, 2**30 + 3, 2**31 - 2, 2**31 - 1):
        assert ((v * (multiplier % 2**32) >> 32) + v) >> shift == v // n


# Which fusions are on.


def test_all_are_on_but_where_they_are_switched_off() -> None:
    assert all(map(fusions.is_on, fusions.NAMES))
    with fusions.without("pairs", "attention"):
        with fusions.without("pairs"):
            assert {name for name in fusions.NAMES if not fusions.is_on(name)} == {"pairs", "attention"}
        assert {name for name in fusions.NAMES if not fusions.is_on(name)} == {"pairs", "attention"}
    with pytest.raises(RuntimeError), fusions.without("sums"):
        raise RuntimeError
    assert all(map(fusions.is_on, fusions.NAMES))


def test_an_unknown_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown fusions \['paris'\]; available: pooled statistics, "):
        fusions.without("paris").__enter__()
