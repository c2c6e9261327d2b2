"""Products of tensors: ``einsum``, matrix products, linear layers, attention.

Each dim of each operand has a letter, as in ``einsum``. If the cut dims' letters are in the result, each slab computes
its part of the result. Other operands with these letters are cut in the same way, and operands without them are whole:
each voxel's query meets all keys. If the letters are summed over, the slabs' sums are added.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from volseg.parallel.spatial.context import active_autocast_dtype
from volseg.parallel.spatial.lazy.attention import attend
from volseg.parallel.spatial.lazy.scores import score
from volseg.parallel.spatial.operators.operands import elementwise, place
from volseg.parallel.spatial.table import handles, refuse, refuse_if
from volseg.parallel.spatial.volume import ShardedVolume, wrap

Letters = Sequence[str]


def contract(
    compute: Callable[..., Tensor], operands: Sequence[Tensor], letters: Sequence[Letters], output: Letters
) -> ShardedVolume | Tensor:
    """Return a product of operands, at least one of which is a volume.

    Parameters
    ----------
    compute
        The product of local operands, linear in each of them.
    letters
        Letters of each operand's dims; a dim of extent one is broadcast.
    output
        Letters of the result's dims; the product is summed over all others.
    """
    given = [(o, own) for o, own in zip(operands, letters, strict=True) if isinstance(o, ShardedVolume)]
    like, own = next(((o, own) for o, own in given if set(_cut(o, own)) <= set(output)), given[0])
    cut = _cut(like, own)
    columns = [_placed(o, own, like, cut) for o, own in zip(operands, letters, strict=True)]
    results = [compute(*row) for row in zip(*columns, strict=True)]
    if set(cut) <= set(output):
        return wrap(like, results, [list(output).index(letter) for letter in cut])
    refuse_if(set(cut) & set(output), "it sums over one cut dim, but not over the other")
    # Partial sums of 16-bit results are added in float32 and rounded once, as on one device.
    dtype = results[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    return like.context.communicator.collect([result.to(wide) for result in results]).sum(0, dtype=wide).to(dtype)


def _cut(volume: ShardedVolume, letters: Letters) -> list[str]:
    return [letters[dim] for dim in volume.dims]


def _placed(operand: Tensor, letters: Letters, like: ShardedVolume, cut: Letters) -> list[Tensor]:
    """Return an operand cut like ``like`` if it has the cut letters, or the whole operand for each slab."""
    refuse_if(any(list(letters).count(letter) > 1 for letter in cut), "it reads a diagonal along the cut")
    dims = [
        list(letters).index(letter) if letter in letters and operand.shape[list(letters).index(letter)] == size else -1
        for letter, size in zip(cut, like.sizes, strict=True)
    ]
    return place(operand, dims, like)


@handles("Products", "einsum", merged=True)
def einsum(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Multiply and sum as the equation says."""
    equation, *operands = args
    refuse_if(not isinstance(equation, str), "it supports only an equation, not lists of dims")
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    widths = [o.ndim - len(term.replace("...", "")) for o, term in zip(operands, terms, strict=True)]
    letters = [_letters(term, width) for term, width in zip(terms, widths, strict=True)]
    if not arrow:
        right = "..." * ("..." in left) + "".join(sorted(c for c in set(left) - set(",.") if left.count(c) == 1))
    output = _letters(right, max((w for w, term in zip(widths, terms, strict=True) if "..." in term), default=0))
    waiting = _attend_einsum(lambda *local: func(equation, *local), operands, letters, output)
    return contract(lambda *local: func(equation, *local), operands, letters, output) if waiting is None else waiting


def _attend_einsum(
    compute: Callable[..., Tensor], operands: Sequence[Any], letters: Sequence[Letters], output: Letters
) -> ShardedVolume | None:
    """Return pending attention scores, or their product with values, if an equation is such a product; else None."""
    if len(operands) != 2 or len(output) < 3 or any(len(set(own)) < len(output) for own in (*letters, output)):
        return None
    if len(letters[0]) != len(output):
        return None
    (*batch, row, inner), second, (*_, column) = letters[0], list(letters[1]), output
    if list(output) != [*batch, row, column] or column in letters[0]:
        return None
    if second == [*batch, inner, column]:
        found = attend(*operands)
        return score(compute, *operands, turned=False) if found is None else found
    return score(compute, *operands, turned=True) if second == [*batch, column, inner] else None


def _letters(term: str, width: int) -> list[str]:
    """Return one letter per dim; dims of an ellipsis are numbered from its end."""
    before, dots, after = term.partition("...")
    return [*before, *(str(-i) for i in range(width, 0, -1) if dots), *after]


@handles("Products", "Tensor.__rmatmul__", merged=True)
def reversed_matmul(func: Callable, input: Any, other: Any) -> Any:
    """Multiply ``other @ input``."""
    return matmul(torch.matmul, other, input)


@handles("Products", "matmul", "Tensor.__matmul__", "bmm", "mm", merged=True)
def matmul(func: Callable, input: Any, other: Any) -> Any:
    """Multiply matrices and vectors."""
    waiting = attend(input, other)
    waiting = score(func, input, other, turned=False) if waiting is None else waiting
    if waiting is not None:
        return waiting
    batch = [str(-i) for i in range(max(input.ndim, other.ndim) - 2, 0, -1)]
    rows, columns = ["m"] * (input.ndim > 1), ["n"] * (other.ndim > 1)
    first = [*batch[len(batch) - max(input.ndim - 2, 0) :], *rows, "k"]
    second = [*batch[len(batch) - max(other.ndim - 2, 0) :], "k", *columns]
    return contract(func, [input, other], [first, second], [*batch, *rows, *columns])


@handles("Products", "nn.linear", "F.linear", merged=True)
def linear(func: Callable, input: Any, weight: Tensor, bias: Tensor | None = None) -> Any:
    """Apply a linear layer to the last dim."""
    if not isinstance(input, ShardedVolume) or isinstance(weight, ShardedVolume) or isinstance(bias, ShardedVolume):
        refuse("weight and bias must be ordinary tensors")
    if input.ndim - 1 in input.dims or weight.ndim != 2:
        letters = [str(i) for i in range(input.ndim - 1)]
        columns = ["n"] * (weight.ndim - 1)
        result = contract(F.linear, [input, weight], [[*letters, "k"], [*columns, "k"]], [*letters, *columns])
        return result if bias is None else elementwise(torch.add, result, bias)
    spread = input.context.spread
    weights = spread(weight)
    dtype = active_autocast_dtype(input)
    if dtype is not None and weight.dtype == torch.float32:
        weights = [input.context.cast(copy, dtype) for copy in weights]
    # Autocast casts the bias at each use, as torch does: a cast that is shared would sum its gradients in 16 bits.
    biases = [None] * len(weights) if bias is None else spread(bias)
    rows = zip(input.slabs, weights, biases, strict=True)
    return wrap(input, [func(slab, w, b) for slab, w, b in rows])


@handles("Products", "F.scaled_dot_product_attention", merged=True)
def attention(
    func: Callable, query: Tensor, key: Tensor, value: Tensor, attn_mask: Any, dropout_p: float, is_causal: bool,
    scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """Let each query of a slab attend to all keys: the query stays cut, keys and values are gathered."""
    refuse_if(dropout_p, "dropout of attention weights is not supported on slabs: pass dropout_p=0")
    batch = [str(-i) for i in range(max(t.ndim for t in (query, key, value)) - 2, 0, -1)]
    letters = [[*batch[len(batch) - t.ndim + 2 :], *own] for t, own in ((query, "me"), (key, "ne"), (value, "nv"))]
    operands = [query, key, value]
    if attn_mask is not None:
        operands.append(attn_mask)
        letters.append([*batch, "m", "n"][-attn_mask.ndim :] if attn_mask.ndim else [])
    output = [*batch, "m", "v"]
    asked = {"scale": scale, "is_causal": is_causal, "enable_gqa": enable_gqa}
    settings = {name: value for name, value in asked.items() if value is not None and value is not False}

    def compute(*local: Tensor) -> Tensor:
        return func(*local[:3], attn_mask=local[3] if attn_mask is not None else None, **settings)

    pairs = [(o, own) for o, own in zip(operands, letters, strict=True) if isinstance(o, ShardedVolume)]
    cuts = [_cut(o, own) for o, own in pairs if set(_cut(o, own)) <= set(output)]
    if not cuts:  # only keys and values, or features, are cut: the result is whole
        return compute(*(o.full_tensor() if isinstance(o, ShardedVolume) else o for o in operands))
    if ("is_causal" in settings and "m" in cuts[0]) or ("enable_gqa" in settings and set(cuts[0]) != {"m"}):
        refuse("a causal mask along the cut and grouped heads that are cut are not supported: pass attn_mask")
    return contract(compute, operands, letters, output)
