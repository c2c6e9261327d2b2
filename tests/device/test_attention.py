"""Our attention kernels against attention in float64: values, every gradient, masks, NaN and infinity."""

import copy
from collections.abc import Sequence
from typing import Any

import plain_kernels
import pytest
import torch
from kernels import DEVICE, INTERPRETED, fewer, with_kernels
from monai.networks.nets.swin_unetr import WindowAttention
from torch import Tensor, nn

from volseg.device import attention
from volseg.device.attention import Addend
from volseg.parallel import FastKernels

pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning")
"""torch's own, of the first product of matrices on its thread for gradients: the reference's."""

ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11}

OF_NUMPY = pytest.mark.filterwarnings(
    "ignore:(invalid value|divide by zero|overflow|All-NaN slice) encountered:RuntimeWarning"
)
"""The interpreter's, where there is no number to compute with."""

SHAPES: list[tuple[tuple[int, int], tuple[int, int], tuple[int, int], str]] = [
    ((2, 3), (70, 70), (16, 16), "bias"),
    ((4, 2), (37, 70), (16, 16), "bias, mask"),
    ((1, 2), (130, 33), (5, 20), "columns, rows"),
    ((2, 2), (9, 3), (64, 32), ""),
    ((3, 1), (66, 40), (16, 16), "own"),
    ((2, 2), (64, 64), (128, 128), "bias"),
    ((54, 12), (343, 343), (16, 16), "bias, mask"),
    ((2, 12), (512, 512), (64, 64), ""),
    ((2, 1), (1000, 777), (80, 48), "bias, mask"),
]
"""Samples and heads, rows and columns, features of queries and of values, terms. The first ones by the interpreter too.
"""


def draw(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def draw_matrices(samples: int) -> list[Tensor]:
    """Return the result's gradient, queries, keys and values of two heads, 40 rows and 70 columns."""
    return [draw(samples, 2, rows, 16) for rows in (40, 40, 70, 70)]


def make_terms(kinds: str, outer: tuple[int, int], sides: tuple[int, int]) -> list[Addend]:
    """Return terms as networks have them: a bias of heads, a mask of windows, of columns or rows, of each matrix."""
    batch, heads = outer
    rows, columns = sides
    masked = torch.rand(2, rows, columns, device=DEVICE) < 0.3
    makers: dict[str, Any] = {
        "bias": lambda: Addend(torch.randn(heads, rows, columns, device=DEVICE), 1, heads),
        "mask": lambda: Addend(torch.where(masked, -100.0, 0.0), heads, 2),
        "columns": lambda: Addend(torch.randn(batch, 1, columns, device=DEVICE).expand(-1, rows, -1), heads, batch),
        "rows": lambda: Addend(torch.randn(1, rows, 1, device=DEVICE).expand(-1, -1, columns), 1, 1),
        "own": lambda: Addend(torch.randn(batch * heads, columns, rows, device=DEVICE).mT, 1, batch * heads),
    }
    return [makers[kind]() for kind in kinds.split(", ") if kind]


def exact(*tensors: Tensor) -> list[Tensor]:
    return [tensor.double() for tensor in tensors]


def widen(terms: Sequence[Addend]) -> list[Addend]:
    return [Addend(term.values.double(), term.every, term.count) for term in terms]


def run(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, terms: Sequence[Addend], scale: float,
    attend: Any = attention.attend, differentiate: Any = attention.differentiate,
) -> list[Tensor]:  # fmt: skip
    """Return the kernels' results with the gradients of all terms."""
    out, logs = attend(query, key, value, terms, scale)
    *found, slopes = differentiate(gradient, query, key, value, out, logs, terms, scale, [True] * len(terms))
    return [out, logs, *found, *slopes]


def run_exactly(*given: Any) -> list[Tensor]:
    """Return the same in float64, by plain torch."""
    *tensors, terms, scale = given
    plain = plain_kernels.attend, plain_kernels.differentiate_attention
    return run(*exact(*tensors), widen(terms), scale, *plain)


def assert_near(got: Sequence[Tensor], wanted: Sequence[Tensor], rounding: float) -> None:
    """Compare within so much of the largest value of each."""
    for place, (one, other) in enumerate(zip(got, wanted, strict=True)):
        assert one.shape == other.shape, place
        assert one.isfinite().equal(other.isfinite()), place
        error = float((one.double() - other).abs().max() / other.abs().max())
        assert error <= rounding, (place, error)


@with_kernels
@pytest.mark.parametrize(("outer", "sides", "features", "kinds"), fewer(SHAPES, 5), ids=str)
@pytest.mark.parametrize("dtype", fewer([torch.float16, torch.bfloat16], 1), ids=str)
def test_kernels_equal_float64(outer, sides, features, kinds, dtype):
    (rows, columns), (inner, last) = sides, features
    # As a joint projection of queries, keys and values leaves them.
    query = draw(outer[0], rows, 2, outer[1], inner, dtype=dtype)[:, :, 1].transpose(1, 2)
    key, value = draw(*outer, inner, columns, dtype=dtype).mT, draw(*outer, columns, last, dtype=dtype)
    gradient = draw(*outer, rows, last, dtype=dtype)
    assert attention.fits(query.shape, key.shape, value.shape)
    terms = make_terms(kinds, outer, sides)
    given = gradient, query, key, value, terms, inner**-0.5
    got = run(*given)
    for one, other in zip(got, run(*given), strict=True):
        assert one.equal(other)  # sums have an order
    # Weights and their gradients are rounded before they are multiplied, as torch rounds them.
    assert_near(got, run_exactly(*given), 4 * ROUNDING[dtype])


@with_kernels
def test_a_term_that_does_not_divide_the_matrices_is_refused() -> None:
    """Two masks for two matrices each, of two in all: the second gets none, and its gradient was other memory."""
    _, query, key, value = draw_matrices(1)
    with pytest.raises(ValueError, match="a multiple of 2 \\* 2 = 4 matrices of scores, not 2"):
        attention.attend(query, key, value, [Addend(torch.zeros(2, 40, 70, device=DEVICE), 2, 2)], 0.25)


@with_kernels
@pytest.mark.parametrize("hidden", [-100.0, -torch.inf], ids=str)
def test_masks_hide_what_they_hide(hidden: float) -> None:
    """Also where a row's first columns are hidden, and the row is finite all the same."""
    gradient, query, key, value = draw_matrices(2)
    mask = torch.zeros(2, 40, 70, device=DEVICE)
    mask[0, :20, :66] = mask[1, 3:, 35:] = hidden
    given = gradient, query, key, value, [Addend(mask, 2, 2)], 0.25
    assert_near(run(*given), run_exactly(*given), 4 * ROUNDING[torch.float16])


@OF_NUMPY
@with_kernels
def test_a_row_that_sees_nothing_is_no_number() -> None:
    gradient, query, key, value = draw_matrices(1)
    mask = torch.zeros(1, 40, 70, device=DEVICE)
    mask[0, 7] = -torch.inf
    given = gradient, query, key, value, [Addend(mask, 1, 1)], 0.25
    (out, _, of_query, of_key, of_value, of_mask), wanted = run(*given), run_exactly(*given)
    for got, other in ((out, wanted[0]), (of_query, wanted[2]), (of_mask, wanted[5])):
        assert got.isnan().equal(other.isnan())
        assert got.isnan().any()
        assert got[..., :7, :].isfinite().all()
    for got, other in ((of_key, wanted[3]), (of_value, wanted[4])):
        assert got.isnan().equal(other.isnan())


@OF_NUMPY
@with_kernels
@pytest.mark.parametrize("broken", [0, 1, 2, 3], ids=["query", "key", "value", "term"])
@pytest.mark.parametrize("number", [torch.nan, torch.inf], ids=str)
def test_what_is_no_number_stays_none(broken: int, number: float) -> None:
    given = [*draw_matrices(1)[1:], torch.zeros(2, 40, 70, device=DEVICE)]
    given[broken].view(-1)[5 * 16 + 3] = number
    query, key, value, term = given
    got, _ = attention.attend(query, key, value, [Addend(term, 1, 2)], 0.25)
    wanted, _ = plain_kernels.attend(*exact(query, key, value), widen([Addend(term, 1, 2)]), 0.25)
    assert got.isfinite().equal(wanted.isfinite())
    assert not got.isfinite().all()
    assert got[:, 1].isfinite().all()


@with_kernels
def test_large_scores_do_not_overflow() -> None:
    """Float16 ends at 65504; scores are in float32."""
    query, key, value, gradient = (draw(1, 1, 40, 16) for _ in range(4))
    given = gradient, 200 * query, 200 * key, value, [], 1.0
    out, logs, *_ = run(*given)
    wanted = run_exactly(*given)
    assert float(wanted[1].abs().max()) > 65504
    assert_near([out, logs], wanted[:2], 4 * ROUNDING[torch.float16])


def test_sizes_that_do_not_fit() -> None:
    def fits(batch: int, heads: int, rows: int, columns: int, inner: int, last: int) -> bool:
        query, key = (batch, heads, rows, inner), (batch, heads, columns, inner)
        return attention.fits(query, key, (batch, heads, columns, last))

    assert fits(2, 3, 5, 7, 128, 128)
    assert fits(1, 8, 2**24 - 1, 16, 16, 16)
    for sizes in ((2, 3, 5, 7, 129, 16), (2, 3, 5, 7, 16, 129), (2, 3, 0, 7, 16, 16), (2, 3, 5, 0, 16, 16)):
        assert not fits(*sizes), sizes
    assert not fits(0, 3, 5, 7, 16, 16)
    assert not fits(1, 1, 2**16, 2**15, 16, 16)
    assert not fits(1, 8, 2**24, 16, 16, 16)  # of the result, whose rows hold all heads
    assert not fits(1, 1, 2**24, 16, 128, 16)
    assert attention.fits((2, 5, 16), (2, 7, 16))


def test_a_cpu_has_no_kernels() -> None:
    for dtype in (torch.float16, torch.float32):
        assert not attention.takes(torch.empty(1, dtype=dtype))


@pytest.mark.gpu
def test_their_own_gradients_are_those_of_autograd() -> None:
    """In the networks' type, against torch's own operators step by step."""
    query, key, value = (draw(8, 3, 343, 16, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    bias = torch.randn(3, 343, 343, device=DEVICE, requires_grad=True)
    weights = torch.softmax((query @ key.mT) * 0.25 + bias, -1).to(torch.bfloat16)
    gradient = draw(8, 3, 343, 16, dtype=torch.bfloat16)
    wanted = torch.autograd.grad(weights @ value, (query, key, value, bias), gradient)
    terms = [Addend(bias.detach(), 1, 3)]
    given = gradient, query.detach(), key.detach(), value.detach(), terms, 0.25
    exactly = run_exactly(*given)[2:]
    for own, torchs, right in zip(run(*given)[2:], wanted, exactly, strict=True):
        error, other = (float((each.double() - right).norm() / right.norm()) for each in (own, torchs))
        assert error <= 1.1 * other + 1e-3


class Windows(nn.Module):
    """MONAI's attention of shifted windows, with a projection before, as a network has it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv3d(1, 24, 1)
        self.attention = WindowAttention(24, num_heads=3, window_size=(2, 4, 5), qkv_bias=True)
        self.register_buffer("mask", torch.where(torch.rand(2, 40, 40) < 0.4, -100.0, 0.0))

    def forward(self, image: Tensor) -> Tensor:
        x = self.first(image).flatten(2).transpose(1, 2)
        return self.attention(x.reshape(-1, 40, 24), self.mask)


@with_kernels
def test_a_network_trains_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the operators that a network calls, in half precision."""
    if INTERPRETED:  # of a GPU's path, by tensors of a CPU
        monkeypatch.setattr("volseg.parallel.spatial.lazy.scores._has_kernel", lambda slab: slab.dtype.itemsize == 2)
    calls: list[int] = []
    attend = attention.attend
    monkeypatch.setattr(attention, "attend", lambda *given: (calls.append(1), attend(*given))[1])
    plain = Windows().to(DEVICE)
    ours, image = copy.deepcopy(plain), torch.randn(2, 1, 4, 4, 5, device=DEVICE)

    def look(net: nn.Module, call: nn.Module, image: Tensor) -> dict[str, Tensor]:
        with torch.autocast(DEVICE, torch.float16, enabled=image.dtype == torch.float32):
            output = call(image)
        output.double().square().mean().backward()
        return {name: p.grad.double() for name, p in net.named_parameters() if p.grad is not None} | {
            "output": output.detach()
        }

    got = look(ours, FastKernels(ours, DEVICE), image)
    wanted = look(plain.double(), plain, image.double())
    assert calls
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert float((got[name] - value).norm()) <= 0.02 * float(value.norm()), name
