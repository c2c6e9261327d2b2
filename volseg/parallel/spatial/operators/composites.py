"""Functions composed of other torch functions, each of which the operator table handles by itself.

For some functions ``as_written`` runs torch's own Python code. The others are written out here, as handlers that get
the torch function's arguments: volumes and ordinary tensors.
"""

from collections.abc import Callable
from functools import cache
from math import sqrt
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from volseg.device.torch_internals import with_overrides
from volseg.parallel.spatial.signatures import fill
from volseg.parallel.spatial.table import composes, handles, refuse


@composes("Products", "F.multi_head_attention_forward")
def multi_head_attention(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Attend with several heads; sequences are ``(L, N, E)``."""
    given = fill(F.multi_head_attention_forward, args, kwargs)
    query, num_heads = given.query, given.num_heads
    extras = given.bias_k, given.bias_v, given.static_k, given.static_v
    if any(extra is not None for extra in extras) or given.add_zero_attn:
        refuse("keys and values that are added to the sequence are not supported")
    if (given.dropout_p and given.training) or given.is_causal or query.ndim != 3:
        refuse("dropout of attention weights, is_causal and sequences without a batch are not supported")
    wanted = given.embed_dim_to_check
    if query.shape[-1] != wanted:  # torch's rule
        raise AssertionError(f"was expecting embedding dimension of {wanted}, but got {query.shape[-1]}")
    weights: Any = (given.q_proj_weight, given.k_proj_weight, given.v_proj_weight)
    if not given.use_separate_proj_weight:
        assert given.in_proj_weight is not None
        weights = given.in_proj_weight.chunk(3)
    biases: Any = (None, None, None) if given.in_proj_bias is None else given.in_proj_bias.chunk(3)
    queries, keys, values = (
        F.linear(tokens, weight, bias).unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3)
        for tokens, weight, bias in zip((query, given.key, given.value), weights, biases, strict=True)
    )
    mask = _mask(given.attn_mask, given.key_padding_mask, query.shape[1], num_heads, query.dtype)
    scores: Tensor | None = None
    if given.need_weights:
        scores = (queries / sqrt(queries.shape[-1])) @ keys.transpose(-2, -1)
        scores = (scores if mask is None else scores + mask).softmax(-1)
        found = scores @ values
        scores = scores.mean(1) if given.average_attn_weights else scores
    else:
        found = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
    return F.linear(found.permute(2, 0, 1, 3).flatten(2), given.out_proj_weight, given.out_proj_bias), scores


def _mask(mask: Tensor | None, padding: Tensor | None, batch: int, heads: int, dtype: torch.dtype) -> Tensor | None:
    """Return the term to add to the scores ``(N, heads, L, S)``, or None without masks."""
    added = [
        torch.zeros(one.shape, dtype=dtype, device=one.device).masked_fill(one, float("-inf"))
        if one.dtype == torch.bool
        else one.to(dtype)
        for one in (
            None if mask is None else mask.unflatten(0, (batch, heads)) if mask.ndim == 3 else mask,
            None if padding is None else padding[:, None, None, :],
        )
        if one is not None
    ]
    return None if not added else added[0] if len(added) == 1 else added[0] + added[1]


@composes("Dims", "torch.broadcast_tensors")
def broadcast_tensors(*tensors: Any) -> tuple[Tensor, ...]:
    """Expand tensors to one shape; no cut dim is expanded."""
    given = tensors[0] if len(tensors) == 1 and isinstance(tensors[0], list | tuple) else tensors
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in given))
    return tuple(tensor.expand(shape) for tensor in given)


@composes("Dims", "torch.pixel_shuffle")
def pixel_shuffle(input: Tensor, upscale_factor: int) -> Tensor:
    """Rearrange channels into rows and columns."""
    factor, (*front, channels, height, width) = upscale_factor, input.shape
    if factor <= 0 or channels % factor**2:
        raise RuntimeError(f"pixel_shuffle expects channels divisible by {factor**2}, got {tuple(input.shape)}")
    parts = input.reshape(-1, channels // factor**2, factor, factor, height, width).permute(0, 1, 4, 2, 5, 3)
    return parts.reshape(*front, channels // factor**2, height * factor, width * factor)


@composes("Dims", "torch.pixel_unshuffle")
def pixel_unshuffle(input: Tensor, downscale_factor: int) -> Tensor:
    """Rearrange rows and columns into channels."""
    factor, (*front, channels, height, width) = downscale_factor, input.shape
    if factor <= 0 or height % factor or width % factor:
        raise RuntimeError(f"pixel_unshuffle expects planes divisible by {factor}, got {tuple(input.shape)}")
    parts = input.reshape(-1, channels, height // factor, factor, width // factor, factor).permute(0, 1, 3, 5, 2, 4)
    return parts.reshape(*front, channels * factor**2, height // factor, width // factor)


@handles(
    "Losses",
    "F.gaussian_nll_loss",
    "F.multilabel_soft_margin_loss",
    "F.triplet_margin_with_distance_loss",
    rehearse=False,
    merged=True,
)
@handles("Along channels", "F.normalize", "F.softmin", rehearse=False, merged=True)
@handles("Pooling", "F.lp_pool1d", "F.lp_pool2d", "F.lp_pool3d", rehearse=False, merged=True)
def as_written(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run torch's own Python code on volumes."""
    with with_overrides():
        return _without_overrides(func)(*args, **kwargs)


@cache
def _without_overrides(func: Any) -> Callable:
    """Return a copy of a torch function that does not look for ``__torch_function__`` overrides."""
    asking = {name for name in func.__code__.co_names if name.startswith("has_torch_function")}
    inside = {**func.__globals__, **dict.fromkeys(asking, lambda *_: False)}
    own = FunctionType(func.__code__, inside, func.__name__, func.__defaults__, func.__closure__)
    own.__kwdefaults__ = func.__kwdefaults__
    return own
