# ruff: noqa: A002, ARG001  (functions take what operators of aten take, by its names)
"""What operators of torch do on a GPU, where the CPU's do otherwise: layouts, and memory that they take on their way.

A followed step runs on tensors of the CPU. Their sizes and dtypes are those of a GPU; the layout of a convolution's
output, copies of tensors that lie otherwise than a kernel wants, and the mask of a dropout are not. Each function here
does with memory what torch's CUDA implementation of the operator does, step by step [1]_.

Not modelled: partial sums (less than 0.1 % of the steps that were measured), and convolutions of tensors above 2**31
elements where cuDNN is older than 9.3.

References
----------
.. [1] ``aten/src/ATen/native``: ``cudnn/ConvShared.cpp``, ``cudnn/BatchNorm.cpp``, ``cuda/Reduce.cuh``,
   ``cuda/DilatedMaxPool3d.cu``, ``cuda/UpSampleNearest3d.cu``, ``cuda/TensorTransformations.cu``, ``group_norm.cpp``,
   ``Dropout.cpp``, ``cuda/SoftMax.cu``, ``cuda/layer_norm_kernel.cu``, ``cuda/Indexing.cu``
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor

from volseg.device.gpus import count_processors, on_gpu
from volseg.device.torch_internals import overriding_operators, suggest_memory_format
from volseg.estimate.workspaces import ConvolutionPass, find_workspace

__all__ = ["GPU_OPERATORS", "WITHOUT_RESULT", "composing_like_gpus"]

aten = torch.ops.aten
CONTIGUOUS, LAST = torch.contiguous_format, torch.channels_last_3d
Handler = Callable[..., Any]
Note = Callable[[Any], None]

GPU_OPERATORS: dict[Any, Handler] = {}
"""What takes memory in place of an operator: ``(note, plain, *arguments)`` to the operator's result.

It may call operators, which are noted as such. ``note(result)`` says that the operator's own kernel runs now. ``plain``
is the result as of a CPU: of the right shape.
"""

WITHOUT_RESULT: set[Any] = set()
"""Those for whom a CPU's result is not asked: they need none, which takes milliseconds where torch computes it by
parts, or torch has none without values, or not from half to float32."""


def _replaces(*operators: Any) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        GPU_OPERATORS.update(dict.fromkeys(operators, handler))
        return handler

    return register


def _empty(size: Sequence[int], like: Tensor, layout: torch.memory_format, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(tuple(size), dtype=dtype or like.dtype, device=like.device, memory_format=layout)


# Convolutions: cuDNN, channels last if either of two tensors is.


def _choose_layout(first: Tensor, second: Tensor) -> torch.memory_format:
    if torch.float64 in (first.dtype, second.dtype):
        return CONTIGUOUS
    wanted = {suggest_memory_format(first), suggest_memory_format(second)}
    return next((layout for layout in (LAST, torch.channels_last) if layout in wanted), CONTIGUOUS)


def _is_depthwise(slab: Tensor, weight: Tensor, transposed: bool, groups: int) -> bool:
    return not transposed and groups > 1 and slab.shape[1] == groups and weight.shape[0] % slab.shape[1] == 0


def _take_scratch(
    part: ConvolutionPass, first: Tensor, second: Tensor, weight: Tensor, layout: torch.memory_format, settings: Any
) -> Tensor:
    """Return cuDNN's scratch memory: none of torch's own kernels, which convolve every channel by itself."""
    stride, *_, transposed, _, groups = settings
    size = 0
    if not _is_depthwise(first, weight, transposed, groups):
        size = find_workspace(
            part,
            first.shape,
            second.shape,
            weight.shape,
            first.dtype,
            channels_last=layout is not CONTIGUOUS,
            strided=max(stride) > 1,
            transposed=transposed,
        )
    return _empty((size,), first, CONTIGUOUS, torch.uint8)


@_replaces(aten.convolution.default)
def _convolve(note: Note, plain: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any) -> Tensor:
    layout = _choose_layout(input, weight)
    if _is_depthwise(input, weight, settings[3], settings[5]) and input.ndim == 5:
        layout = CONTIGUOUS  # torch's own kernels
    given = input.contiguous(memory_format=layout)
    out = _empty(plain.shape, input, layout)
    copies = given, weight.contiguous(memory_format=layout)
    scratch = _take_scratch("forward", input, out, weight, layout, settings)
    note(out)
    del scratch, copies
    if bias is not None:
        out.add_(bias.reshape(1, -1, *(1,) * (input.ndim - 2)))
    return out


@_replaces(aten.convolution_backward.default)
def _differentiate_convolution(
    note: Note, plain: Any, gradient: Tensor, input: Tensor, weight: Tensor, bias_sizes: Any, *rest: Any
) -> tuple[Tensor | None, ...]:
    *settings, mask = rest
    layout = _choose_layout(input, weight)
    if _is_depthwise(input, weight, settings[3], settings[5]) and input.ndim == 5:
        layout = CONTIGUOUS
    given = input.contiguous(memory_format=layout) if mask[1] else input
    slopes = gradient.contiguous(memory_format=suggest_memory_format(given))
    found: list[Tensor | None] = [None, None, None]
    copies: tuple[Tensor, ...] = ()
    if mask[0]:
        layout = _choose_layout(slopes, weight)
        found[0] = _empty(input.shape, slopes, layout)
        copies = weight.contiguous(memory_format=layout), slopes.contiguous(memory_format=layout)
        _take_scratch("input_gradient", input, slopes, weight, layout, settings)
    copies = ()
    if mask[1]:
        layout = _choose_layout(given, slopes)
        dense = slopes.contiguous(memory_format=layout)
        found[1] = _empty(weight.shape, slopes, layout)
        copies = dense, given.contiguous(memory_format=layout)
        _take_scratch("weight_gradient", input, slopes, weight, layout, settings)
    note(tuple(found))
    del copies
    if mask[2]:
        found[2] = gradient.sum([dim for dim in range(gradient.ndim) if dim != 1])
    return tuple(found)


# Norms. The output lies like the input; what is saved is float32.


@_replaces(aten.native_batch_norm.default)
def _normalize(note: Note, plain: Any, input: Tensor, weight: Any, bias: Any, *rest: Any) -> tuple[Tensor, ...]:
    if weight is not None and weight.numel() != input.shape[1]:
        raise RuntimeError(f"weight should contain {input.shape[1]} elements not {weight.numel()}")  # as torch says it
    training = rest[2]
    out = torch.empty_like(input)
    saved = input.shape[1] if training else 0
    mean, rstd = (_empty((saved,), input, CONTIGUOUS, torch.float32) for _ in range(2))
    note((out, mean, rstd))
    return out, mean, rstd


@_replaces(aten.native_batch_norm_backward.default)
def _differentiate_norm(note: Note, plain: Any, gradient: Tensor, input: Tensor, weight: Any, *rest: Any) -> Any:
    mask = rest[-1]
    slopes = gradient.contiguous(memory_format=suggest_memory_format(input))
    found = torch.empty_like(input) if mask[0] else None
    dtype = torch.float32 if weight is None else weight.dtype
    sums = [_empty((input.shape[1],), input, CONTIGUOUS, dtype) if wanted else None for wanted in mask[1:]]
    note((found, *sums))
    del slopes
    return found, *sums


# Softmax reads and writes densely; from half precision it writes float32 where it is told to.


@_replaces(aten._softmax.default, aten._log_softmax.default)
def _softmax(note: Note, plain: Any, input: Tensor, dim: int, widens: bool) -> Tensor:
    out = _empty(input.shape, input, CONTIGUOUS, torch.float32 if widens else input.dtype)
    dense = input.contiguous()
    note(out)
    del dense
    return out


@_replaces(aten._log_softmax_backward_data.default)
def _differentiate_softmax(
    note: Note, plain: Any, gradient: Tensor, out: Tensor, dim: int, dtype: torch.dtype
) -> Tensor:
    found = _empty(gradient.shape, gradient, CONTIGUOUS, dtype)
    copies = gradient.contiguous(), out.contiguous()
    note(found)
    del copies
    return found


@_replaces(aten._softmax_backward_data.default)
def _differentiate_plain_softmax(
    note: Note, plain: Any, gradient: Tensor, out: Tensor, dim: int, dtype: torch.dtype
) -> Tensor:
    found = _empty(gradient.shape, gradient, CONTIGUOUS, dtype)
    product = torch.empty_like(gradient)  # with the output, which is summed
    note(found)
    del product
    return found


# Layers are normalized densely.


@_replaces(aten.native_layer_norm.default)
def _normalize_layer(note: Note, plain: Any, input: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    dense = input.contiguous()
    out = torch.empty_like(dense)
    mean, rstd = (_empty(saved.shape, input, CONTIGUOUS, torch.float32) for saved in plain[1:])
    note((out, mean, rstd))
    del dense
    return out, mean, rstd


LONG, OF_LONG = 65_536, 32
"""Rows from which on the gradients of a layer norm's weights are summed in two passes, and how many the first sums."""


@_replaces(aten.native_layer_norm_backward.default)
def _differentiate_layer_norm(note: Note, plain: Any, gradient: Tensor, input: Tensor, sides: Any, *rest: Any) -> Any:
    dense = input.contiguous()
    found = torch.empty_like(dense) if plain[0] is not None else None
    sums = [None if one is None else torch.empty_like(one) for one in plain[1:]]
    note((found, *sums))
    values = prod(sides)
    rows = input.numel() // max(1, values)
    if rows > LONG and values // OF_LONG < count_processors(input.device) / 2:
        parts = [None if one is None else one.new_empty((-(-rows // OF_LONG), *one.shape)) for one in sums]
        sums = [None if part is None else part.sum(0) for part in parts]
    del dense
    return found, *sums


# Sums over some dims.


@_replaces(aten.sum.dim_IntList, aten.mean.dim)
def _sum(note: Note, plain: Tensor, input: Tensor, dims: Sequence[int] | None, *rest: Any, **options: Any) -> Tensor:
    out = _empty(plain.shape, input, suggest_memory_format(plain), plain.dtype)
    note(out)
    return out


# Others.


@_replaces(aten.upsample_nearest3d.default, aten._upsample_nearest_exact3d.default)
def _upsample_nearest(note: Note, plain: Any, input: Tensor, size: Sequence[int], *scales: Any) -> Tensor:
    out = _empty((*input.shape[:2], *size), input, suggest_memory_format(input))
    dense_out = out if out.is_contiguous() else _empty(out.shape, input, CONTIGUOUS)
    dense = input.contiguous()
    note(dense_out)
    del dense
    return out if dense_out is out else out.copy_(dense_out)


@_replaces(aten.upsample_trilinear3d_backward.default)
def _differentiate_upsampling(note: Note, plain: Tensor, gradient: Tensor, *rest: Any) -> Tensor:
    found = _empty(plain.shape, gradient, suggest_memory_format(gradient))
    dense = gradient.contiguous()
    dense_found = found if found.is_contiguous() else _empty(found.shape, gradient, CONTIGUOUS)
    note(dense_found)
    if dense_found is not found:
        found.copy_(dense_found)
    # As C++ does at the end of a function: what was made last goes first.
    del dense_found, dense
    return found


@_replaces(aten.roll.default)
def _roll(note: Note, plain: Any, input: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Tensor:
    rolled = [_empty(input.shape, input, CONTIGUOUS) for _ in dims or (0,)]  # dim after dim, each a call within another
    for one in rolled:
        note(one)
    last = rolled.pop()
    while rolled:
        del rolled[-1]
    return last


@_replaces(aten.index_put.default)
def _add_to_places(
    note: Note, plain: Any, input: Tensor, indices: Sequence[Tensor | None], values: Tensor, adds: bool = False
) -> Tensor:
    if not adds:
        out = input.clone()
        note(out)
        return out
    # Gradients of what was read by indices, which torch sorts; it adds to what it made for them.
    many = max(index.numel() for index in indices if index is not None)
    whole = [_empty((many,), input, CONTIGUOUS, torch.int64)]
    whole.append(values.contiguous())
    whole += [_empty((many,), input, CONTIGUOUS, torch.int64) for _ in range(3)]
    whole.append(_empty((2 * many,), input, CONTIGUOUS, torch.int64))
    note(input)
    return input


@_replaces(
    aten._fused_sgd_.default, aten._fused_sgd_.tensor_lr, aten._fused_adam_.default, aten._fused_adam_.tensor_lr,
    aten._fused_adamw_.default, aten._fused_adamw_.tensor_lr, aten._fused_adagrad_.default,
)  # fmt: skip
def _step_fused(note: Note, plain: Any, *lists: Any, **options: Any) -> None:
    note(None)  # in place, without memory of its own


READ_NO_RESULT = (
    _differentiate_convolution, _normalize, _differentiate_norm, _softmax, _differentiate_softmax,
    _differentiate_plain_softmax, _upsample_nearest, _roll, _add_to_places, _step_fused,
)  # fmt: skip

WITHOUT_RESULT |= {operator for operator, handler in GPU_OPERATORS.items() if handler in READ_NO_RESULT}


@contextmanager
def composing_like_gpus() -> Iterator[None]:
    """Compose functions of others as on a GPU, where torch looks at the device in C++: ``dropout``, ``group_norm``."""
    with overriding_operators("AutogradCPU", {"dropout": _drop, "group_norm": _normalize_groups}):
        yield


def _drop(input: Tensor, probability: float, training: bool) -> Tensor:
    if not training or probability == 0 or input.numel() == 0:
        return input
    if on_gpu(input) and probability < 1:
        out: Tensor = aten.native_dropout(input, probability, training)[0]  # with a mask of bytes
        return out
    if probability == 1:
        return input * torch.zeros((), dtype=input.dtype, device=input.device)
    return input * torch.empty_like(input).bernoulli_(1 - probability).div_(1 - probability)


def _normalize_groups(
    input: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5,
    enabled: bool = True,
) -> Tensor:  # fmt: skip
    if not on_gpu(input):
        return aten.group_norm.default.decompose(input, groups, weight, bias, eps, enabled)
    (batch, channels), voxels = input.shape[:2], input.shape[2:].numel()
    dense = input.contiguous()  # channels last too
    out: Tensor = aten.native_group_norm(dense, weight, bias, batch, channels, voxels, groups, eps)[0]
    return out
