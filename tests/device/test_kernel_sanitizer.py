# ruff: noqa: N803  (upper case: what Triton is compiled for)
"""The interpreter finds every kind of planted fault that would appear on a GPU only."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_sanitizer import watching
from kernels import INTERPRETED

from volseg.device.triton_kernels import kernel, tl

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(not INTERPRETED, reason="of Triton's interpreter: TRITON_INTERPRET=1"),
]


@kernel()
def copy_kernel(x, out, V, BV: tl.constexpr):
    v = tl.program_id(0) * BV + tl.arange(0, BV)
    tl.store(out + v, tl.load(x + v, mask=v < V, other=0.0), mask=v < V)


@kernel()
def unmasked_kernel(x, out, V, BV: tl.constexpr):
    v = tl.program_id(0) * BV + tl.arange(0, BV)
    tl.store(out + v, tl.load(x + v), mask=v < V)


@kernel()
def overlapping_kernel(out, BV: tl.constexpr):
    v = tl.program_id(0) * (BV - 1) + tl.arange(0, BV)
    tl.store(out + v, 0.0 * v + tl.program_id(0))


@kernel()
def neighbour_kernel(x, BV: tl.constexpr):
    v = tl.program_id(0) * BV + tl.arange(0, BV)
    tl.store(x + v, tl.load(x + v + BV))


@kernel()
def unfenced_kernel(x, out, BV: tl.constexpr, FENCED: tl.constexpr):
    v = tl.arange(0, BV)
    tl.store(out + v, tl.load(x + v))
    if FENCED:
        tl.debug_barrier()
    tl.store(x + v, tl.load(out + BV - 1 - v))


@kernel()
def turned_kernel(x, BV: tl.constexpr, FENCED: tl.constexpr):
    v = tl.arange(0, BV)
    value = tl.load(x + BV - 1 - v)
    if FENCED:
        tl.debug_barrier()
    tl.store(x + v, value)


@kernel()
def one_place_kernel(out, BV: tl.constexpr):
    tl.store(out + tl.arange(0, BV) // 2, tl.arange(0, BV).to(tl.float32))


@kernel()
def adding_kernel(x, out):
    tl.atomic_add(out, tl.load(x + tl.program_id(0)))


@kernel()
def last_kernel(x, parts, counter, out, BV: tl.constexpr, FENCED: tl.constexpr, SEM: tl.constexpr, SCOPE: tl.constexpr):
    """Sum in the program that comes last: the pattern of ``peer.values.count``."""
    v = tl.arange(0, BV)
    tl.store(parts + tl.program_id(0), tl.sum(tl.load(x + tl.program_id(0) * BV + v), 0))
    if FENCED:
        tl.debug_barrier()
    if tl.atomic_add(counter, 1, sem=SEM, scope=SCOPE) == tl.num_programs(0) - 1:
        tl.store(out, tl.sum(tl.load(parts + tl.arange(0, 4)), 0))


@kernel()
def smaller_kernel(x, out, BV: tl.constexpr):
    v = tl.arange(0, BV)
    tl.store(out + v, tl.minimum(tl.load(x + v), 0.0))


def values(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32) + 1


def test_a_kernel_without_fault_passes_and_what_it_does_not_write_is_no_number() -> None:
    with watching() as launched:
        out, part, whole = torch.empty(30), torch.empty(30), torch.empty(4, dtype=torch.int32)
        copy_kernel[(4,)](values(30), out, 30, BV=8)
        copy_kernel[(3,)](values(30), part, 30, BV=8)
    assert out.equal(values(30))
    assert [launch.name for launch in launched] == [f"{__name__}.copy_kernel"] * 2
    assert part[:24].equal(values(24))
    assert part[24:].isnan().all()
    assert (whole == 2**31 - 1).all()


def run_last(fenced: bool = True, sem: str = "acq_rel", scope: str = "gpu") -> float:
    out = torch.empty(1)
    last_kernel[(4,)](
        values(32), torch.empty(4), torch.zeros(1, dtype=torch.int32), out, BV=8, FENCED=fenced, SEM=sem, SCOPE=scope
    )
    return out.item()


PLANTED: dict[str, Callable[[], Any]] = {
    "ends behind the memory|outside of all memory": lambda: unmasked_kernel[(4,)](values(30), torch.empty(30), 30, 8),
    "beside the part of it": lambda: unmasked_kernel[(4,)](values(64)[:30], torch.empty(30), 30, BV=8),
    "writes what program 0 writes": lambda: overlapping_kernel[(2,)](torch.empty(15), BV=8),
    "what program . (reads|writes), and nothing orders": lambda: neighbour_kernel[(2,)](values(24), BV=8),
    "with no barrier between: another thread": lambda: unfenced_kernel[(1,)](values(8), torch.empty(8), 8, False),
    "read with other lanes": lambda: turned_kernel[(1,)](values(8), 8, FENCED=False),
    "different values to one place": lambda: one_place_kernel[(1,)](torch.empty(4), BV=8),
    "leave other bits behind": lambda: adding_kernel[(4,)](torch.tensor([1e8, 1.0, -1e8, 1.0]), torch.zeros(1)),
    "CUDA takes no grid": lambda: copy_kernel[(1, 65536)](values(30), torch.empty(30), 30, BV=8),
    "it reads what program . writes, and": lambda: run_last(fenced=False),
    "reads what program . writes, and nothing orders": lambda: run_last(sem="relaxed"),
    "reads what program . writes, and nothing": lambda: run_last(scope="cta"),
    "reads what program . writes": lambda: run_last(sem="release"),
}
"""What is said of each fault."""


@pytest.mark.parametrize("said", PLANTED)
def test_a_planted_fault_is_found(said: str) -> None:
    for orders in (2, 3):
        with watching(orders), pytest.raises(Exception, match=said):
            PLANTED[said]()


def test_what_an_atomic_orders_is_no_fault() -> None:
    with watching():
        assert run_last() == 32 * 33 / 2
        unfenced_kernel[(1,)](values(8), torch.empty(8), 8, FENCED=True)
        turned_kernel[(1,)](values(8), 8, FENCED=True)


def test_a_minimum_is_that_of_a_gpu() -> None:
    out = torch.empty(2)
    with watching():
        smaller_kernel[(1,)](torch.tensor([math.nan, -1.0]), out, BV=2)
    assert out.tolist() == [0.0, -1.0]


def test_all_is_as_before_afterwards() -> None:
    from triton.runtime import interpreter

    before = interpreter.GridExecutor.__call__, dict(vars(interpreter.InterpreterBuilder))
    with watching(), pytest.raises(Exception, match="different values"):
        one_place_kernel[(1,)](torch.empty(4), BV=8)
    assert (interpreter.GridExecutor.__call__, dict(vars(interpreter.InterpreterBuilder))) == before
