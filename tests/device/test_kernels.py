"""A small case of each Triton kernel against plain torch, on a GPU or by Triton's interpreter."""

import ast
import importlib
import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import plain_kernels
import pytest
import torch
import torch.nn.functional as F
from convolution_cases import OWN, check_small
from kernel_launches import Launch
from kernels import DEVICE, INTERPRETED, fewer, with_kernels
from torch import Tensor

import volseg
from volseg.device import attention, broadcast_mul, layer_norm, triton_tiles, upsample2x
from volseg.device import layout as layouts
from volseg.device.convolution import flipped_weights
from volseg.device.norm import addition_passes, choice, exchanged, gathered, passes, reference, statistics
from volseg.device.norm.activation import Activation, Term
from volseg.device.norm.grouping import ALONE, Grouping
from volseg.device.norm.reference import Running
from volseg.device.peer.planes import PlaneMailbox
from volseg.device.peer.values import ValueMailbox
from volseg.inference.sampling import Aligned, Held, sample_grid
from volseg.losses.dice import passes as dice_passes
from volseg.losses.dice import reference as dice_reference
from volseg.losses.dice.reference import Terms
from volseg.transforms.augmentation import triton_reading
from volseg.transforms.augmentation.triton_reading import PatchSources
from volseg.transforms.grid import Grid

if triton_tiles.available():
    from volseg.inference import triton_prediction

ROOT = Path(volseg.__file__).parent
WIDE_AND_HALF = [torch.float32, torch.bfloat16]
HALVES = [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16]
"""What the convolutions' kernels are for: matrix units would round float32. The interpreter (Triton 3.7) multiplies
matrices of bfloat16 as if their bits were whole numbers."""

ACTIVATIONS = [Activation(), Activation("leaky", 0.1), Activation("elu", 1.3)]
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-7 if INTERPRETED else 2**-8, torch.float16: 2**-11}
"""Of the result; the sums before it are in float32. The interpreter cuts bits off where a GPU rounds to bfloat16."""


def find_kernels() -> set[str]:
    """Return the kernels of the package as ``module.name``: compiled functions with a grid."""
    found = set()
    for file in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and any("kernel(" in ast.unparse(d) for d in node.decorator_list):
                module = ".".join(file.relative_to(ROOT.parent).with_suffix("").parts)
                found.add(f"{module}.{node.name}")
    return found


CASES: dict[str, Callable[[], None]] = {}


def covers(*kernels: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Register a case of these kernels."""

    def register(case: Callable[[], None]) -> Callable[[], None]:
        CASES.update(dict.fromkeys((f"volseg.{name}" for name in kernels), case))
        return case

    return register


def group_by_case() -> list[list[str]]:
    """Return the kernels of each case."""
    groups: dict[int, list[str]] = {}
    for kernel, case in CASES.items():
        groups.setdefault(id(case), []).append(kernel)
    return list(groups.values())


def test_each_kernel_has_a_case() -> None:
    assert set(CASES) == find_kernels()


def volume(*shape: int, dtype: torch.dtype = torch.float32, last: bool = False) -> Tensor:
    x = torch.randn(shape, device=DEVICE).to(dtype)
    return x.contiguous(memory_format=torch.channels_last_3d) if last else x


LAYOUTS = ["contiguous", "channels last", "slice of channels", "room"]


def lay_out(x: Tensor, layout: str) -> Tensor:
    """Return the same values in a layout: of its own, or as a part of a larger volume."""
    last = x.contiguous(memory_format=torch.channels_last_3d)
    if layout == "slice of channels":
        return torch.cat([last, last], 1).contiguous(memory_format=torch.channels_last_3d)[:, x.shape[1] :]
    return with_room(last)[1].copy_(x) if layout == "room" else last if layout == "channels last" else x.contiguous()


def values(*shape: int) -> Tensor:
    return torch.rand(shape, device=DEVICE) + 0.5


def draw_others() -> Iterator[tuple[Activation, Tensor | None]]:
    """Yield more activations, with their slopes."""
    for kind, slopes in (("prelu", 3), ("prelu", 1), ("sigmoid", 0), ("silu", 0), ("gelu", 0)):
        yield Activation(kind), values(slopes) if slopes else None


def assert_near(got: Tensor, wanted: Tensor, rounding: float) -> None:
    """Compare to a result in float64, within so much of its largest value."""
    assert got.shape == wanted.shape
    assert float((got.double() - wanted).abs().max()) <= rounding * float(wanted.abs().max())


def wide(*tensors: Tensor | None) -> list[Any]:
    return [None if tensor is None else tensor.double() for tensor in tensors]


def widen(term: Term) -> Term:
    """Return a term in float64."""
    return Term(*wide(*term[:4]), term.activation, *wide(term.slope))


@covers("device.layout._copy_kernel")
def copy() -> None:
    for dtype, layout in itertools.product((*WIDE_AND_HALF, torch.uint8, torch.int32), LAYOUTS):
        for last in (False, True):
            x = lay_out((10 * values(2, 3, 3, 4, 5)).to(dtype), layout)
            target = torch.full((2, 8, 3, 4, 5), 77, device=DEVICE, dtype=dtype)
            target = target.contiguous(memory_format=torch.channels_last_3d) if last else target
            layouts.copy_by_triton(x, target[:, 4:7])
            assert target[:, 4:7].equal(x)
            assert bool((target[:, [0, 1, 2, 3, 7]] == 77).all())


@covers("device.norm.passes._affine_kernel")
def affine() -> None:
    for dtype in WIDE_AND_HALF:
        for number, layout in enumerate(LAYOUTS):
            x, scale, shift = lay_out(volume(2, 3, 5, 3, 4, dtype=dtype), layout), values(2, 3), values(2, 3) - 1
            for activation in ACTIVATIONS if number < 2 else ACTIVATIONS[:1]:
                term = Term(x, None, scale, shift, activation)
                wanted, got = reference.affine(widen(term)), passes.affine(term)
                assert got.dtype == dtype
                assert_near(got, wanted, ROUNDING[dtype])
                ends = torch.zeros_like(x)
                passes.affine(term, ends, (1, 2))
                assert ends[:, :, [0, 3, 4]].equal(got[:, :, [0, 3, 4]])
                assert not ends[:, :, 1:3].any()
    x, pairs = volume(2, 3, 2, 3, 1), (values(2, 3), values(2, 3) - 1)
    for activation, slope in draw_others():
        term = Term(x, None, *pairs, activation, slope)
        assert_near(passes.affine(term), reference.affine(widen(term)), 1e-5)


@covers("device.norm.passes._sums_kernel")
def gradient_sums() -> None:
    for dtype in WIDE_AND_HALF:
        gradient, mean, scale, shift = volume(2, 3, 5, 3, 4, dtype=dtype), values(2, 3), values(2, 3), values(2, 3) - 1
        for layout, activation in zip(LAYOUTS[1:], ACTIVATIONS, strict=True):
            x = lay_out(volume(2, 3, 5, 3, 4, dtype=dtype), layout)
            term = Term(x, mean, scale, shift, activation)
            wanted = reference.gradient_sums(gradient.double(), widen(term))
            # Nothing is rounded but sums in float32.
            assert_near(passes.gradient_sums(gradient, term).sum(0), wanted, 1e-5)
    x, gradient = volume(2, 3, 2, 3, 1), volume(2, 3, 2, 3, 1)
    for activation, slope in draw_others():
        term = Term(x, mean, scale, shift, activation, slope)
        wanted = reference.gradient_sums(gradient.double(), widen(term))
        assert_near(passes.gradient_sums(gradient, term).sum(0), wanted, 1e-5)


@covers("device.norm.passes._input_kernel")
def gradient_input() -> None:
    for dtype in WIDE_AND_HALF:
        gradient, pairs = volume(2, 3, 5, 3, 4, dtype=dtype, last=True), [values(2, 3) - 0.7 for _ in range(4)]
        for layout, activation in zip(["contiguous", *LAYOUTS[2:]], ACTIVATIONS, strict=True):
            x = lay_out(volume(2, 3, 5, 3, 4, dtype=dtype), layout)
            term = Term(x, None, *pairs[:2], activation)
            wanted = reference.gradient_input(gradient.double(), widen(term), *wide(*pairs[2:]))
            assert_near(passes.gradient_input(gradient, term, *pairs[2:]), wanted, ROUNDING[dtype])
    x, gradient = volume(2, 3, 2, 3, 1), volume(2, 3, 2, 3, 1)
    for activation, slope in draw_others():
        term = Term(x, None, *pairs[:2], activation, slope)
        wanted = reference.gradient_input(gradient.double(), widen(term), *wide(*pairs[2:]))
        assert_near(passes.gradient_input(gradient, term, *pairs[2:]), wanted, 1e-5)


ADDED = [("leaky", "none", "leaky"), ("prelu", None, "elu"), ("none", "prelu", "none"), ("elu", None, "none")]
"""The first one's activation, the second one's, where that is a norm, and the sum's."""


Types = tuple[torch.dtype, torch.dtype]
"""Of what is added."""


def terms(first: str, second: str | None, dtypes: Types) -> tuple[list[Term], list[Term]]:
    """Return the terms of the sum, and the same in float64."""
    found = []
    for kind, dtype, last in zip((first, second), dtypes, (True, False), strict=True):
        x = volume(2, 3, 2, 3, 1, dtype=dtype, last=last)
        if kind is None:
            found.append(Term(x if first == "prelu" else x[:, :1].expand(x.shape)))  # an image that is repeated
        else:
            slope = values(3) if kind == "prelu" else None
            found.append(Term(x, values(2, 3), values(2, 3), values(2, 3) - 1, Activation(kind, 0.3), slope))
    return found, [widen(term) for term in found]


def compute_terms(exact: list[Term], activation: Activation) -> Tensor:
    """Return the sum by plain torch."""
    parts = [reference.affine(term) if term.is_norm else term.slab for term in exact]
    return activation.apply(parts[0] + parts[1])


def list_sums() -> list[tuple[str, str | None, Activation, Types]]:
    """Return activations and types: of one type, and of two."""
    wide, half = WIDE_AND_HALF
    types = [(wide, wide), (half, half), (wide, wide), (half, half), (half, wide), (wide, half), (wide, half)]
    types.append((half, wide))
    rows = zip(ADDED * 2, types, strict=True)
    return [(first, second, Activation(behind, 0.2), dtypes) for (first, second, behind), dtypes in rows]


@covers("device.norm.addition_passes._add_kernel")
def add_norms() -> None:
    for first, second, activation, dtypes in list_sums():
        given, exact = terms(first, second, dtypes)
        dtype = torch.promote_types(*dtypes)
        wanted = compute_terms(exact, activation)
        got = addition_passes.add(*given, activation)
        assert got.dtype == dtype
        assert_near(got, wanted, ROUNDING[dtype])
        assert_near(choice.add(*exact, activation), wanted, 1e-12)
        for row, rounding in ((given, ROUNDING[dtype]), (exact, 1e-12)):
            whole, out = with_room(row[0].slab.to(torch.promote_types(row[0].slab.dtype, row[1].slab.dtype)))
            assert (addition_passes if row is given else choice).add(*row, activation, out) is out
            assert_near(out, wanted, rounding)
            assert_untouched(whole)


def with_room(slab: Tensor) -> tuple[Tensor, Tensor]:
    """Return memory for a slab with a plane before and behind, and that of the slab itself."""
    batch, channels, planes, *within = slab.shape
    whole = volume(batch, channels, planes + 2, *within, dtype=slab.dtype, last=slab.stride(1) == 1).fill_(7.0)
    return whole, whole.narrow(2, 1, planes)


def assert_untouched(whole: Tensor) -> None:
    assert bool((whole[:, :, [0, -1]] == 7.0).all())


@covers("device.norm.addition_passes._sums_kernel", "device.norm.addition_passes._input_kernel")
def differentiate_added_norms() -> None:
    for first, second, activation, dtypes in list_sums():
        given, exact = terms(first, second, dtypes)
        gradient = volume(2, 3, 2, 3, 1, dtype=torch.promote_types(*dtypes))
        exact_sums = choice.add_sums(gradient.double(), *exact, activation)
        for got, wanted in zip(addition_passes.add_sums(gradient, *given, activation), exact_sums, strict=True):
            assert_near(got.sum(0), wanted[0], 1e-5)
        found = [(values(2, 3), values(2, 3)) for _ in exact_sums]
        exact_found = [tuple(wide(*pair)) for pair in found]
        exact_gradients = choice.add_gradients(gradient.double(), *exact, exact_found, activation)
        for got, wanted, dtype in zip(
            addition_passes.add_gradients(gradient, *given, found, activation), exact_gradients, dtypes, strict=True
        ):
            assert got.dtype == dtype
            assert_near(got, wanted, ROUNDING[dtype])
        if second is None:
            alone, nothing = addition_passes.add_gradients(gradient, *given, found, activation, both=False)
            assert nothing is None
            assert_near(alone, exact_gradients[0], ROUNDING[dtypes[0]])
        for module, row, own, each in (
            (addition_passes, given, found, gradient),
            (choice, exact, exact_found, gradient.double()),
        ):
            rooms = [with_room(term.slab) if term.is_norm else (None, None) for term in row]
            got = module.add_gradients(each, *row, own, activation, [out for _, out in rooms])
            for (whole, out), one, wanted, dtype in zip(rooms, got, exact_gradients, dtypes, strict=True):
                assert_near(one, wanted, ROUNDING[dtype])
                if whole is not None:
                    assert one is out
                    assert_untouched(whole)


@covers("device.norm.statistics._moments_kernel", "device.norm.statistics._join_kernel")
def moments() -> None:
    for dtype, channels in zip(WIDE_AND_HALF, (3, 20), strict=True):
        for layout in LAYOUTS:
            x = lay_out(volume(2, channels, 5, 7, 4, dtype=dtype) * 3 + 20, layout)
            assert_near(statistics.moments(x), reference.moments(x.double()), 1e-5)


@covers("device.norm.gathered._given_kernel")
def given_coefficients() -> None:
    slab, mean, variance = volume(2, 7, 3, 3, 4), values(7), values(7)
    for weight, bias in ((values(7), values(7)), (None, None)):
        wanted = reference.given_coefficients(slab, *wide(mean, variance, weight, bias), 1e-5)
        assert_near(gathered.given_coefficients(slab, mean, variance, weight, bias, 1e-5), wanted, 1e-5)


GROUPINGS = [
    (7, ALONE),
    (7, Grouping(over_batch=True)),
    (6, Grouping(groups=2)),
    (6, Grouping(groups=6)),
    (70, Grouping(groups=1)),
]


@covers("device.norm.exchanged._exchange_coefficients_kernel", "device.norm.exchanged._exchange_backward_kernel")
def exchange_coefficients() -> None:
    """Of one slab, and of the last one of two: the first has sent before, and not waited."""
    for (channels, grouping), shards in fewer(list(itertools.product(GROUPINGS, (1, 2))), 8):
        average = grouping.average
        slabs = [volume(2, channels, depth, 2, 1) * 3 + 7 for depth in (2, 3)]
        weight, bias = values(channels), values(channels)
        # Pairs that share their statistics have the same ones.
        mean, rstd = (average(values(2, channels)).contiguous() for _ in range(2))
        memory, boxes = mailboxes(shards)
        counts = [slab[0, 0].numel() for slab in slabs[:shards]]
        shares = torch.tensor(counts, device=DEVICE).reshape(-1, 1, 1) / sum(counts)
        sums = [volume(3, 2, 2, channels) for _ in slabs[:shards]]
        for box, slab in zip(boxes, slabs, strict=False):
            got, _ = exchanged.exchange_coefficients(slab, shares, weight, bias, 1e-5, box, grouping)
        stacked = torch.stack([reference.moments(slab.double()) for slab in slabs[:shards]])
        assert_near(got, reference.coefficients(stacked, *wide(shares, weight, bias), 1e-5, average), 1e-5)
        stacked = torch.stack([partials.double().sum(0) for partials in sums])
        for given in (False, True):
            for box, partials in zip(boxes, sums, strict=True):
                settings = grouping, given
                back = exchanged.exchange_backward_coefficients(
                    partials, mean, rstd, weight, sum(counts), box, *settings
                )
            exact = wide(mean, rstd, weight)
            wanted = reference.backward_coefficients(stacked, *exact, sum(counts), average, given)
            for value, exactly in zip(back, (*wanted[:2], *wanted[2:].sum(1)), strict=True):
                assert_near(value, exactly, 1e-5)
        assert all(box is None or box.calls.tolist() == [3, 0] for box in boxes)
        del memory
    exchange_with_replicas()


def exchange_with_replicas() -> None:
    """Between two slabs each of two replicas with one row and with three; who runs last has heard all others."""
    channels, rows, depths, grouping = 13, (1, 3), (2, 3), Grouping(over_batch=True)
    whole = [volume(count, channels, sum(depths), 2, 1) * 3 + 7 for count in rows]
    slabs = [slab.contiguous() for own in whole for slab in own.split(depths, 2)]
    sums = [volume(3, 2, count, channels) for count in rows for _ in depths]
    weight, bias = values(channels), values(channels)
    samples = torch.cat(whole).double()
    number, voxels = samples[:, 0].numel(), samples[0, 0].numel()
    stacked = reference.moments(samples).unsqueeze(0)
    share = torch.ones(1, 1, 1, device=DEVICE).double()
    wanted = reference.coefficients(stacked, share, *wide(weight, bias), 1e-5, grouping.average)
    running = [values(channels) for _ in range(2)]
    moved = [value.double() for value in running]
    F.batch_norm(samples, *moved, None, None, True, 0.3)
    memory, boxes = mailboxes(4)
    for first in range(4):
        order = [(first + 1 + n) % 4 for n in range(4)]
        for rank in order:
            box = boxes[rank]
            box.hears = rank == first
            own = Running(running[0].clone(), running[1].clone(), 0.3)
            got, count = exchanged.exchange_coefficients(
                slabs[rank], None, weight, bias, 1e-5, box, grouping, own, voxels, 2
            )
        assert count.item() == number
        assert_near(got, wanted[:, : rows[first // 2]], 1e-5)
        for value, exactly in zip((own.mean, own.variance), moved, strict=True):
            assert_near(value, exactly, 1e-5)
        mean, _, rstd, _, _ = got.unbind(0)
        for rank in order:
            of_rows = mean[:1].expand(rows[rank // 2], -1).contiguous(), rstd[:1].expand(rows[rank // 2], -1)
            back = exchanged.exchange_backward_coefficients(
                sums[rank], of_rows[0], of_rows[1].contiguous(), weight, count, boxes[rank], grouping, False, 2
            )
        of_samples = torch.cat([sum(sums[2 * n + m].double().sum(0) for m in range(2)) for n in range(2)], 1)
        exact = wide(*(value[:1].expand(4, -1) for value in (mean, rstd)), weight)
        found = reference.backward_coefficients(of_samples.unsqueeze(0), *exact, voxels, grouping.average)
        begin = 0 if first < 2 else 1
        found = found[:, begin : begin + rows[first // 2]]
        for value, exactly in zip(back, (*found[:2], *found[2:].sum(1)), strict=True):
            assert_near(value, exactly, 1e-5)
    del memory


def mailboxes(shards: int) -> tuple[Tensor, list[ValueMailbox | None]]:
    """Return memory and mailboxes for so many shards, which never wait; None for a single shard."""
    memory = torch.zeros(shards, ValueMailbox.size(shards), dtype=torch.uint8, device=DEVICE)
    places = [box.data_ptr() for box in memory]
    boxes = [ValueMailbox(places, rank, memory.device, patience=0) for rank in range(shards)]
    return memory, [None] if shards == 1 else [*boxes]


@covers("device.upsample2x._double_kernel", "device.upsample2x._gather_kernel")
def double_volume() -> None:
    """The whole volume, and a part of it with the planes next to it."""
    for dtype, last, linear, planes, outputs in (
        (torch.float32, True, True, (0, 3), (0, 6)),
        (torch.bfloat16, False, True, (1, 3), (3, 5)),
        (torch.bfloat16, True, False, (1, 3), (3, 5)),
    ):
        part, slab = upsample2x.DoubledPart(3, planes[0], outputs), volume(1, 3, 3, 2, 1, dtype=dtype, last=last)
        slab = slab[:, :, slice(*planes)]
        exact = slab.double().requires_grad_()
        wanted = plain_kernels.double(exact, part, linear)
        assert_near(upsample2x.double(slab, part, linear), wanted.detach(), ROUNDING[dtype])
        gradient = volume(*wanted.shape, dtype=dtype, last=last)
        (of_slab,) = torch.autograd.grad(wanted, exact, gradient.double())
        assert_near(upsample2x.gather_gradient(gradient, slab.shape, part, linear), of_slab, ROUNDING[dtype])
    exact = volume(1, 3, 2, 4, 2).double().requires_grad_()
    wanted = F.avg_pool3d(exact, 2)
    gradient = volume(*wanted.shape)
    (of_slab,) = torch.autograd.grad(wanted, exact, gradient.double())
    assert_near(upsample2x.halve(exact.detach().float()), wanted.detach(), 1e-6)
    assert_near(upsample2x.spread_gradient(gradient), of_slab, 1e-6)


@covers(*(f"device.attention_kernels.attention{part}_kernel" for part in ("", "_query", "_key", "_term")))
def attend() -> None:
    """Of several tiles, none of them whole, with a term that has a gradient and one that has none."""
    query, key, value, gradient = (
        torch.randn(2, 2, *s, device=DEVICE).half() for s in ((70, 5), (40, 5), (40, 3), (70, 3))
    )
    terms = [attention.Addend(values(2, 70, 40), 1, 2), attention.Addend(values(2, 70, 40), 2, 2)]
    exact = [attention.Addend(term.values.double(), term.every, term.count) for term in terms]
    out, logs = attention.attend(query, key, value, terms, 0.5)
    wanted = plain_kernels.attend(*wide(query, key, value), exact, 0.5)
    assert_near(out, wanted[0], 2 * ROUNDING[torch.float16])
    assert_near(logs, wanted[1], 1e-5)
    given = gradient, query, key, value, out, logs
    *found, slopes = attention.differentiate(*given, terms, 0.5, [True, False])
    *right, exactly = plain_kernels.differentiate_attention(*wide(*given), exact, 0.5, [True, False])
    assert slopes[1] is None
    for one, other in zip([*found, slopes[0]], [*right, exactly[0]], strict=True):
        assert_near(one, other, 4 * ROUNDING[torch.float16])


@covers("device.layer_norm._layer_norm_kernel", "device.layer_norm._layer_norm_backward_kernel")
def normalize_lines() -> None:
    """Of several programs, the last of them not full."""
    for dtype in (torch.float32, torch.float16):
        lines, weight, bias = torch.randn(333, 20, device=DEVICE).to(dtype), values(20), values(20)
        exact = [tensor.double().requires_grad_() for tensor in (lines, weight, bias)]
        wanted = F.layer_norm(exact[0], (20,), *exact[1:])
        out, means, rstds = layer_norm.normalize_lines(lines, weight, bias, 1e-5, torch.float32)
        assert_near(out, wanted.detach(), 1e-5)
        right = torch.autograd.grad(wanted, exact, out.double())
        for one, other in zip(layer_norm.differentiate_lines(out, lines, weight, means, rstds), right, strict=True):
            assert_near(one, other, 2 * ROUNDING[dtype])


@covers("device.broadcast_mul._multiply_kernel", "device.broadcast_mul._differentiate_kernel")
def gate_volume() -> None:
    """In both layouts, and with more channels than a tile has."""
    for dtype, channels, last, gradient_last in (
        (torch.float32, 3, True, True),
        (torch.bfloat16, 5, False, True),
        (torch.float32, 5, False, False),
    ):
        compare_gated(dtype, channels, last, gradient_last)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_tiles, "TILE", 256)
        compare_gated(torch.float32, 130, True, False)


def compare_gated(dtype: torch.dtype, channels: int, last: bool, gradient_last: bool) -> None:
    x, gate = volume(2, channels, 2, 3, 2, dtype=dtype, last=last), volume(2, 1, 2, 3, 2, dtype=dtype)
    gradient = volume(2, channels, 2, 3, 2, dtype=dtype, last=gradient_last)
    got = broadcast_mul.multiply(x, gate)
    assert got.stride() == x.stride()
    assert_near(got, x.double() * gate.double(), ROUNDING[dtype])
    wanted = plain_kernels.differentiate_product(*wide(gradient, x, gate))
    for one, other in zip(broadcast_mul.differentiate(gradient, x, gate), wanted, strict=True):
        assert one.dtype == dtype
        assert_near(one, other, ROUNDING[dtype])


@covers("device.peer.values._exchange_values_kernel")
def exchange_values() -> None:
    memory, boxes = mailboxes(2)
    for call in range(4):  # odd and even, and the words of two calls before
        sent = [values(2, 300) + call for _ in boxes]
        order = (0, 1) if call % 2 else (1, 0)
        got = {}
        for rank in order:
            box = boxes[rank]
            got[rank] = box.stack(sent[rank])
        assert got[order[0]][order[0]].equal(sent[order[0]])
        assert bool(got[order[0]][order[1]].isnan().all())  # who had not come yet
        assert got[order[1]].equal(torch.stack(sent))
    del memory


@covers("device.peer.planes._exchange_planes_kernel")
def exchange_planes() -> None:
    memory = torch.zeros(3, PlaneMailbox.size(), dtype=torch.uint8, device=DEVICE)
    places = [box.data_ptr() for box in memory]
    sides = [PlaneMailbox(places, rank, memory.device, patience=0) for rank in range(3)]
    for dtype in (*WIDE_AND_HALF, torch.float64):
        slabs = [volume(2, 4, 3, 4, 5, dtype=dtype, last=dtype == torch.bfloat16) for _ in sides]
        edges = [torch.full_like(slab[:, :, :1], 7) for slab in slabs]
        far = [torch.full_like(slab[:, :, :1], 7) for slab in slabs]
        waits = [
            side.start((slab[:, :, :1], slab[:, :, -1:]), (before, behind))
            for side, slab, before, behind in zip(sides, slabs, edges, far, strict=True)
        ]
        for wait in waits:
            wait()
        nothing = torch.zeros_like(edges[0])
        for rank, (before, behind) in enumerate(zip(edges, far, strict=True)):
            assert before.equal(slabs[rank - 1][:, :, -1:] if rank > 0 else nothing)
            assert behind.equal(slabs[rank + 1][:, :, :1] if rank < 2 else nothing)


for _name, _own in OWN.items():
    covers(*(f"device.convolution.{_name}.{kernel}" for kernel in _own.kernels))(partial(check_small, _name, HALVES))


@covers("device.convolution.flipped_weights._turn_kernel")
def turn_weights_round() -> None:
    for dtype, last in itertools.product(WIDE_AND_HALF, (True, False)):
        weight = volume(70, 5, 2, 1, 3, dtype=dtype, last=last)  # more than a tile of channels
        got = flipped_weights.turn_by_triton(weight)
        assert got.is_contiguous(memory_format=torch.channels_last_3d)
        assert got.equal(weight.flip(2, 3, 4).transpose(0, 1))


@covers("losses.dice.passes._sums_kernel", "losses.dice.passes._combine_kernel", "losses.dice.passes._gradient_kernel")
def dice() -> None:
    everything = Terms(
        0.3, 2.0, include_background=False, batch=True, squared=True, jaccard=True, smooth_nr=0.2, smooth_dr=0.4
    )
    for dtype in WIDE_AND_HALF:
        for terms, layout, classes, kind in (
            (Terms(), "contiguous", 3, torch.uint8),
            (everything, "channels last", 3, torch.int64),
            (everything, "room", 20, torch.float32),
            (Terms(), "room", 2, torch.uint8),
        ):
            x = lay_out(3 * volume(2, classes, 4, 5, 6, dtype=dtype), layout)
            y = torch.randint(0, classes, (2, 1, 8, 5, 12), device=DEVICE).to(kind)
            y = y[:, :, 1::2, :, 1::2]  # a coarser head's
            got, wanted = (compute(x_, y, terms.squared) for compute, x_ in sums_of(x))
            assert_near(got.sum(0), wanted.sum(0), 1e-5)
            assert got.equal(dice_passes.sums(x, y, terms.squared))
            (loss, slopes), (exact, exact_slopes) = (
                combine(sums, terms, x.shape)
                for combine, sums in ((dice_passes.combine, got), (dice_reference.combine, wanted))
            )
            assert math.isclose(float(loss), float(exact), rel_tol=1e-5)
            assert_near(slopes, exact_slopes, 1e-5)
            by_pair, exact_by_pair = (s.expand(4, 2, classes) for s in (slopes, exact_slopes))
            gradient = dice_passes.gradient(x, y, by_pair, terms.squared)
            exact_gradient = dice_reference.gradient(x.double(), y, exact_by_pair, terms.squared)
            assert_near(gradient, exact_gradient, 2 * ROUNDING[dtype])


def sums_of(x: Tensor) -> list[tuple[Callable[..., Tensor], Tensor]]:
    return [(dice_passes.sums, x), (dice_reference.sums, x.double())]


@covers("transforms.augmentation.triton_reading._read_kernel")
def read_patches() -> None:
    """Patches that are cut out and mirrored: each voxel is one of the case's."""
    images = values(2, 2, 6, 5, 7)
    labels = torch.randint(0, 3, (2, 1, 6, 5, 7), device=DEVICE, dtype=torch.uint8)
    size = (3, 3, 5)
    sources = PatchSources(
        stored=(images.flatten(), labels.flatten()),
        boxes=(images.new_zeros(0, 2, *size), labels.new_zeros(0, 1, *size)),
        begins=torch.tensor([6 * 5 * 7, 0], device=DEVICE),
        shapes=torch.tensor([[6, 5, 7]] * 2, device=DEVICE),
        corners=torch.tensor([[1, 0, 2], [2, 1, 0]], device=DEVICE),
    )
    columns = torch.eye(3, device=DEVICE).repeat(2, 1, 1)
    columns[1, 2, 2] = -1.0  # the second one backwards along its last axis
    for num_classes in (3, None):
        got = triton_reading.read_patches(sources, (columns, None), size, size, num_classes)
        for of, found in zip((images, labels), got, strict=True):
            first, second = of[1, :, 1:4, 0:3, 2:7], of[0, :, 2:5, 1:4, 0:5].flip(-1)
            torch.testing.assert_close(found, torch.stack([first, second]), rtol=1e-6, atol=0)


@covers("inference.triton_prediction._add_kernel", "inference.triton_prediction._add_tiles_kernel")
def add_windows() -> None:
    """Add classes one after another, and tile by tile if a case has many."""
    for num_classes in (3, 9):
        window = volume(1, num_classes, 3, 4, 5).contiguous(memory_format=torch.channels_last_3d)[0]
        importance, blend = volume(3, 4, 5).abs(), volume(num_classes, 6, 7, 8)
        expected = blend.clone()
        triton_prediction.add_window(blend, window, importance, (5, 0, 1), 0, "softmax", ())
        for plane, place in enumerate((5, 0, 1)):  # around the end of the ring
            expected[:, place, :4, 1:6] += window.softmax(0)[:, plane] * importance[plane]
        assert_near(blend, expected, 1e-5)


@covers("inference.triton_prediction._decide_kernel")
def decide_labels() -> None:
    """Twice as many voxels along W, on and between those of the source."""
    source, target = torch.eye(4, dtype=torch.float64), torch.diag(torch.tensor([1, 1, 0.5, 1], dtype=torch.float64))
    sampling = sample_grid(Grid((3, 4, 9), target), Grid((3, 4, 5), source))
    assert isinstance(sampling, Aligned)
    probabilities = volume(3, 3, 4, 5).softmax(0)
    between = (probabilities[..., 1:] + probabilities[..., :-1]) / 2
    expected = torch.stack([probabilities, F.pad(between, (0, 1))], -1).flatten(-2)[..., :9].argmax(0)
    cells = range(3), range(4), range(5)
    ((_, labels, _),) = triton_prediction.decide(sampling, Held(probabilities), cells, None, torch.uint8)
    assert labels.long().equal(expected)


@with_kernels
@pytest.mark.parametrize("kernels", [pytest.param(names, id=names[0]) for names in group_by_case()])
def test_kernels_equal_plain_torch(kernels, monkeypatch, watched_kernels):
    monkeypatch.setattr(triton_tiles, "TILE", 32)  # several programs, of a few voxels
    ran: set[str] = set()

    def spy(kernel: str) -> None:
        module, name = kernel.rsplit(".", 1)
        compiled = getattr(importlib.import_module(module), name)

        class Spy:
            def __getitem__(self, grid: Any) -> Any:
                ran.add(kernel)
                return compiled[grid]

        monkeypatch.setattr(importlib.import_module(module), name, Spy())

    for kernel in kernels:
        spy(kernel)
    CASES[kernels[0]]()
    assert ran == set(kernels), "the case runs each"
    watched = {launch.name for launch in watched_kernels if type(launch) is Launch}
    assert not INTERPRETED or watched >= set(kernels), "a launch that is not watched has too many programs, or bytes"
