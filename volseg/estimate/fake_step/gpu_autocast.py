"""Apply a GPU's ``torch.autocast`` rules to fake GPUs, as a CPU's autocast casts other operators.

torch keeps a list of operators per kind of device, in C++ [1]_. Nearly the same operators run in half precision on
both kinds. A GPU keeps half precision where the CPU returns to float32 (max_pool3d, replication_pad3d), and returns to
float32 where half precision loses too much (exp, layer_norm, softmax, sums). This module overrides the CPU's list with
the GPU's, operator by operator, for the running version of torch. An operator that this version does not cast on GPUs
is not cast; an operator that it casts, but that no list here names, is refused.

References
----------
.. [1] https://docs.pytorch.org/docs/stable/amp.html, "CUDA Op-Specific Behavior"; ``ATen/autocast_mode.h``
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from volseg.device.gpus import on_gpu
from volseg.device.torch_internals import (
    get_schema,
    list_autocast_operators,
    log_softmax,
    overriding_operators,
    softmax,
)
from volseg.errors import FollowError
from volseg.estimate.operator_work import list_tensors


def _split(names: str) -> frozenset[str]:
    return frozenset(names.split())


HALF = _split("""
    _convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm
    bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell
    rnn_relu_cell _scaled_dot_product_flash_attention scaled_dot_product_attention cudnn_convolution
    cudnn_convolution_transpose
""")
"""Operators whose arguments become half precision."""

FLOAT32 = _split("""
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
    pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim
    nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d
    hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss
    soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm
    logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d
    upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa
    upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa
""")
"""Operators whose arguments become float32."""

FLOAT32_RESULT = _split("""
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord sum sum.dim_IntList
""")
"""Operators whose result is float32, unless another type is requested; they read their argument as it is."""

WIDEST = _split("""
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
""")
"""Operators whose arguments all become the widest type among them."""

BANNED = {"binary_cross_entropy"}
"""Operators that torch itself refuses under autocast, with advice."""


@contextmanager
def casting_like_gpus() -> Iterator[None]:
    """Cast as a GPU's autocast does while ``torch.autocast("cpu", ...)`` is on."""
    on_gpus, on_cpus = list_autocast_operators("AutocastCUDA"), list_autocast_operators("AutocastCPU")
    kernels: dict[str, Callable[..., Any] | None] = dict.fromkeys(on_cpus - on_gpus)
    others = on_gpus.difference(HALF, FLOAT32, FLOAT32_RESULT, WIDEST, BANNED)
    kinds = (HALF - on_cpus, _to_half), (FLOAT32, _to_float32), (WIDEST, _to_widest), (FLOAT32_RESULT, _to_result)
    for names, cast in (*kinds, (others, _refuse)):
        kernels |= {name: _make_kernel(name, cast) for name in names & on_gpus}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        with overriding_operators("AutocastCPU", kernels):
            yield


def _is_eligible(value: Any) -> bool:
    is_float = isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64
    return is_float and on_gpu(value)


def _cast_to(values: Any, dtype: torch.dtype) -> Any:
    """Return an operator's arguments in another type; torch's own ``tree_map`` takes ten times as long."""
    if isinstance(values, dict):
        return {name: _cast_to(value, dtype) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return type(values)([_cast_to(value, dtype) for value in values])
    return values.to(dtype) if _is_eligible(values) else values


Call = tuple[Any, Any, Any]
"""An operator, and its arguments."""


def _to_half(operator: Any, args: Any, kwargs: Any) -> Call:
    return operator, *_cast_to((args, kwargs), torch.get_autocast_dtype("cpu"))


def _to_float32(operator: Any, args: Any, kwargs: Any) -> Call:
    return operator, *_cast_to((args, kwargs), torch.float32)


def _to_widest(operator: Any, args: Any, kwargs: Any) -> Call:
    found = [value.dtype for value in list_tensors((args, kwargs)) if _is_eligible(value)]
    cast = _to_float32 if torch.float32 in found else _to_half
    return cast(operator, args, kwargs)


def _refuse(operator: Any, args: Any, kwargs: Any) -> Call:
    if any(map(_is_eligible, list_tensors((args, kwargs)))):
        raise FollowError(
            f"the step cannot be followed without a GPU: torch {torch.__version__} casts {get_schema(operator).name} "
            "under autocast there, and this volseg does not know to which type; turn autocast off around it, or "
            "measure on a GPU"
        )
    return operator, args, kwargs


SOFTMAX = {torch.ops.aten.softmax.int: softmax, torch.ops.aten.log_softmax.int: log_softmax}
"""Operators that read half precision and write float32 on GPUs only."""


def _to_result(operator: Any, args: Any, kwargs: Any) -> Call:
    names = [argument.name for argument in get_schema(operator).arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    if not _is_eligible(args[0]) or given.get("dtype") is not None:
        return operator, args, kwargs
    if operator in SOFTMAX and args[0].dtype != torch.float32:  # a GPU widens inside the kernel
        return SOFTMAX[operator], (given["self"], given["dim"], True), {}
    return operator, args, kwargs | {"dtype": torch.float32}


def _make_kernel(name: str, cast: Callable[[Any, Any, Any], Call]) -> Callable[..., Any]:
    """Return the autocast form of an operator, which calls another operator or casts the arguments."""
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            function, args, kwargs = cast(operator, args, kwargs)
            return function(*args, **kwargs)

    return run
