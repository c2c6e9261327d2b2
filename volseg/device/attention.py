"""Attention without score matrices: ``softmax(scale q k^T + terms) v`` in one pass, and its gradients in three.

A network with explicit attention materializes several float32 score matrices for each head: the product, the sum with
each bias or mask, the softmax, and a gradient of each. Here a tile of scores is in registers, in float32, and is
recomputed for the gradients from the divisor of each row's softmax.

Sums have a fixed order: no atomics. Rows that are entirely minus infinity give NaN, as in torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from volseg.device import attention_kernels
from volseg.device.gpus import on_gpu
from volseg.device.triton_kernels import triton
from volseg.device.triton_tiles import available, count_processors

MOST_FEATURES = 128
"""Limit of features of a query or a value: a tile of rows holds all of them."""

FEW_FEATURES = 32
"""Up to this number, four warps have registers for a tile; with more features and terms, eight warps have."""

MANY_FEATURES = 64
"""Up to this number, four warps suffice without terms; eight would wait for each other half of the time."""

LARGEST = 2**31
"""Limit of elements in one matrix: they are counted in 32 bits."""


OWN = 64
"""Rows of a tile that are its program's own; the other rows come in steps."""


def choose_tile(kernel: str, query: Tensor, value: Tensor, terms: int) -> dict[str, int]:
    """Return the constants of a kernel: ``"result"``, ``"query"``, ``"key"``, whose own rows are keys', or ``"term"``.

    Measured for windows of 343 tokens, 16 features and two terms, and for 64 features without terms, of 512 to 8000
    tokens (``workflows/benchmarks/results/attention_h100_tiles.json``).
    """
    features = [max(16, triton.next_power_of_2(tensor.shape[3])) for tensor in (query, value)]
    most = max(query.shape[3], value.shape[3])
    others, warps, stages = 32, 4 if most <= FEW_FEATURES else 8, 2  # more columns need more registers than exist
    if terms == 0 and FEW_FEATURES < most <= MANY_FEATURES:
        others, warps, stages = 32 if kernel == "key" else 64, 4, 3
    rows, columns = (others, OWN) if kernel == "key" else (OWN, others)
    sides = {"BN": rows, "BM": columns, "BF": features[0], "BG": features[1]}
    return {**sides, "num_warps": warps, "num_stages": stages}


@dataclass(frozen=True, slots=True)
class Addend:
    """Term that is added to the scores: matrix ``r`` of all gets matrix ``r // every % count``.

    Attributes
    ----------
    values
        ``(count, N, M)``; N or M may be expanded.
    every, count
        See above; the number of score matrices is a multiple of ``every * count``.
    """

    values: Tensor
    every: int
    count: int

    def check(self, matrices: int) -> None:
        """Refuse a number of score matrices that uses some of ``values`` less often: gradients need equal counts.

        Raises
        ------
        ValueError
            If ``every * count`` does not divide the number.
        """
        if matrices % (self.every * self.count):
            needed = f"a multiple of {self.every} * {self.count} = {self.every * self.count} matrices of scores"
            raise ValueError(
                f"a term of {self.count} matrices, each for {self.every} in a row, needs {needed}, not {matrices}"
            )


def takes(tensor: Tensor) -> bool:
    """Return whether the kernels support a tensor: half precision, which matrix units multiply exactly."""
    return on_gpu(tensor) and tensor.dtype in (torch.float16, torch.bfloat16) and available()


def fits(query: Sequence[int], key: Sequence[int], value: Sequence[int] | None = None) -> bool:
    """Return whether the kernels support the sizes of queries, keys and values; without values, whether some would fit.

    Parameters
    ----------
    query, key, value
        Their sizes (see ``attend``); also without heads.
    """
    *outer, rows, features = query
    columns, last = key[-2], 1 if value is None else value[-1]
    heads = outer[-1] if len(outer) == 2 else 1
    if 0 in (*outer, rows, columns) or not (0 < features <= MOST_FEATURES and 0 < last <= MOST_FEATURES):
        return False
    return max(rows * columns, rows * features, columns * max(features, last), rows * heads * last) < LARGEST


def attend(query: Tensor, key: Tensor, value: Tensor, terms: Sequence[Addend], scale: float) -> tuple[Tensor, Tensor]:
    """Return the attended values of each query, and the logarithm of the divisor of its row's softmax.

    Parameters
    ----------
    query, key, value
        ``(B, H, N, F)``, ``(B, H, M, F)`` and ``(B, H, M, G)``, in half precision, in any layout.
    terms
        At most two terms.
    scale
        Factor of the products.

    Returns
    -------
    tuple
        ``(B, H, N, G)``, in the layout of ``(B, N, H, G)``, as heads are usually joined next. ``(B * H, N)`` in
        float32.

    Raises
    ------
    ValueError
        If a term does not divide the score matrices evenly.
    """
    query, key, value = map(_reach, (query, key, value))
    terms = [Addend(_reach(term.values), term.every, term.count) for term in terms]
    (batch, heads, rows, _), last = query.shape, value.shape[3]
    for term in terms:
        term.check(batch * heads)
    # Not a view: torch would refuse in-place changes of it behind a custom function.
    out = query.new_empty_strided((batch, heads, rows, last), (rows * heads * last, last, heads * last, 1))
    logs = torch.empty((batch * heads, rows), dtype=torch.float32, device=query.device)
    attention_kernels.attention_kernel[(batch * heads * triton.cdiv(rows, OWN),)](
        query, key, value, out, logs, *_read(query, key, value, out), *_describe(terms, query),
        *_measure(query, key, value), scale, TERMS=len(terms), **choose_tile("result", query, value, len(terms)),
    )  # fmt: skip
    return out, logs


def differentiate(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logs: Tensor, terms: Sequence[Addend],
    scale: float, wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None]]:  # fmt: skip
    """Return the gradients of query, key, value and terms.

    Parameters
    ----------
    gradient
        Gradient of the first result of ``attend``.
    query, key, value, terms, scale
        See ``attend``.
    out, logs
        Results of ``attend``.
    wanted
        Whether each term needs a gradient: float32, ``(count, N, M)``.
    """
    gradient, query, key, value = map(_reach, (gradient, query, key, value))
    terms = [Addend(_reach(term.values), term.every, term.count) for term in terms]
    batch, heads, rows, _ = query.shape
    columns = key.shape[2]
    found = [torch.empty_like(tensor) for tensor in (query, key, value)]
    sums = torch.empty_like(logs)  # sum of the products of each row of out with its gradient
    given = query, key, value, gradient
    described = *_describe(terms, query), *_measure(query, key, value)
    attention_kernels.attention_query_kernel[(batch * heads * triton.cdiv(rows, OWN),)](
        *given, out, found[0], logs, sums, *_read(*given, out, found[0]), *described, scale,
        TERMS=len(terms), **choose_tile("query", query, value, len(terms)),
    )  # fmt: skip
    attention_kernels.attention_key_kernel[(batch * heads * triton.cdiv(columns, OWN),)](
        *given, found[1], found[2], logs, sums, *_read(*given, found[1], found[2]), *described, scale,
        TERMS=len(terms), **choose_tile("key", query, value, len(terms)),
    )  # fmt: skip
    slopes = [
        _differentiate_term(given, logs, sums, terms, described, scale, term) if own else None
        for term, own in zip(terms, wanted, strict=True)
    ]
    return found[0], found[1], found[2], slopes


def _differentiate_term(
    given: Sequence[Tensor], logs: Tensor, sums: Tensor, terms: Sequence[Addend], described: Sequence[object],
    scale: float, term: Addend,
) -> Tensor:  # fmt: skip
    """Return a term's gradient: for each of its matrices, the sum over all score matrices that use it."""
    query, key, value, _ = given
    rows, columns = query.shape[2], key.shape[2]
    members = len(logs) // term.count
    tile = choose_tile("term", query, value, len(terms))
    tiles = triton.cdiv(rows, tile["BN"]) * triton.cdiv(columns, tile["BM"])
    per_program = triton.cdiv(members, max(1, 8 * count_processors(query.device) // (tiles * term.count)))
    parts = triton.cdiv(members, per_program)
    out = torch.empty((parts, term.count, rows, columns), dtype=torch.float32, device=query.device)
    attention_kernels.attention_term_kernel[(parts * tiles * term.count,)](
        *given, logs, sums, out, *_read(*given), *described, scale, term.every, term.count, members,
        per_program, TERMS=len(terms), **tile,
    )  # fmt: skip
    return out[0] if parts == 1 else out.sum(0)


def _reach(tensor: Tensor) -> Tensor:
    """Return a tensor whose matrices each span less than 32 bits of elements."""
    far = sum((size - 1) * stride for size, stride in zip(tensor.shape[-2:], tensor.stride()[-2:], strict=True))
    return tensor if far < LARGEST else tensor.contiguous()


def _read(*tensors: Tensor) -> list[int]:
    """Return the strides of batch, head, row and feature of each tensor."""
    return [stride for tensor in tensors for stride in tensor.stride()]


def _describe(terms: Sequence[Addend], like: Tensor) -> list[object]:
    """Return values, ``every``, ``count`` and strides of each of two terms; any values for a missing term."""
    rows: list[list[object]] = [[t.values, t.every, t.count, *t.values.stride()] for t in terms]
    rows += [[like, 1, 1, 0, 0, 0]] * (2 - len(rows))
    return [value for row in rows for value in row]


def _measure(query: Tensor, key: Tensor, value: Tensor) -> tuple[int, ...]:
    """Return heads, rows, columns, and features of queries and values."""
    return query.shape[1], query.shape[2], key.shape[2], query.shape[3], value.shape[3]
