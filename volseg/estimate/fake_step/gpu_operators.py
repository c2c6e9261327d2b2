# ruff: noqa: A002, ARG001  (handlers have the parameters of aten's operators, by name)
"""Reproduce torch's GPU operators where they differ from the CPU's: layouts, and temporary memory.

A traced step runs on tensors of the CPU. Their sizes and dtypes are those of a GPU. The layout of a convolution's
output, the copies of tensors into the layout that a kernel needs, and the mask of a dropout differ. Each function here
allocates memory step by step as torch's CUDA implementation of the operator does [1]_.

Not modelled: partial sums, dense copies of the inputs of upsampling, rolls, layer norms and writes by indices (none
occurred in the measured steps), and convolutions of tensors above 2**31 elements with cuDNN older than 9.3.

References
----------
.. [1] ``aten/src/ATen/native``: ``cudnn/ConvShared.cpp``, ``cudnn/BatchNorm.cpp``, ``group_norm.cpp``, ``Dropout.cpp``,
   ``cuda/SoftMax.cu``
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from volseg.device.gpus import on_gpu
from volseg.device.torch_internals import overriding_operators, suggest_memory_format
from volseg.estimate.workspaces import ConvolutionPass, estimate_workspace

aten = torch.ops.aten
CONTIGUOUS, LAST = torch.contiguous_format, torch.channels_last_3d
Handler = Callable[..., Any]
Note = Callable[[Any], None]

GPU_OPERATORS: dict[Any, Handler] = {}
"""Handlers by operator: each takes ``(note, plain, *arguments)`` and returns the operator's result.

A handler may call operators, which are recorded as usual. It calls ``note(result)`` where the operator's own kernel
runs. ``plain`` is the CPU's result, which has the right shape, for the operators in ``WITH_RESULT``.
"""

WITH_RESULT = frozenset({aten.convolution.default})
"""Operators whose handler needs the CPU's result. Others go without: the result takes milliseconds if torch decomposes
the operator, and some operators have no CPU result for fake tensors, or from half to float32."""


def _replaces(*operators: Any) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        GPU_OPERATORS.update(dict.fromkeys(operators, handler))
        return handler

    return register


def _empty(size: Sequence[int], like: Tensor, layout: torch.memory_format, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(tuple(size), dtype=dtype or like.dtype, device=like.device, memory_format=layout)


# Convolutions: cuDNN runs with channels last if either of the two tensors has them last.


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
    """Return cuDNN's workspace; it is empty for depthwise convolutions, which run torch's own kernels."""
    stride, *_, transposed, _, groups = settings
    size = 0
    if not _is_depthwise(first, weight, transposed, groups):
        size = estimate_workspace(
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


# Norms. The output has the layout of the input; the saved statistics are float32.


@_replaces(aten.native_batch_norm.default)
def _normalize(note: Note, plain: Any, input: Tensor, weight: Any, bias: Any, *rest: Any) -> tuple[Tensor, ...]:
    if weight is not None and weight.numel() != input.shape[1]:
        raise RuntimeError(f"weight should contain {input.shape[1]} elements not {weight.numel()}")  # torch's message
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


# Softmax reads and writes dense tensors; from half precision it writes float32 on request.


@_replaces(aten._softmax.default, aten._log_softmax.default)
def _softmax(note: Note, plain: Any, input: Tensor, dim: int, widens: bool) -> Tensor:
    out = _empty(input.shape, input, CONTIGUOUS, torch.float32 if widens else input.dtype)
    dense = input.contiguous()
    note(out)
    del dense
    return out


@_replaces(aten._log_softmax_backward_data.default)
def _differentiate_log_softmax(note: Note, plain: Any, gradient: Tensor, out: Tensor, *rest: Any) -> Tensor:
    found = _empty(gradient.shape, gradient, CONTIGUOUS, rest[-1])
    copies = gradient.contiguous(), out.contiguous()
    note(found)
    del copies
    return found


@_replaces(aten._softmax_backward_data.default)
def _differentiate_softmax(note: Note, plain: Any, gradient: Tensor, out: Tensor, *rest: Any) -> Tensor:
    found = _empty(gradient.shape, gradient, CONTIGUOUS, rest[-1])
    product = torch.empty_like(gradient)  # with the output, which is summed
    note(found)
    del product
    return found


# Others.


@_replaces(
    aten._fused_sgd_.default, aten._fused_sgd_.tensor_lr, aten._fused_adam_.default, aten._fused_adam_.tensor_lr,
    aten._fused_adamw_.default, aten._fused_adamw_.tensor_lr, aten._fused_adagrad_.default,
)  # fmt: skip
def _step_fused(note: Note, plain: Any, *lists: Any, **options: Any) -> None:
    note(None)  # in place, without memory of its own


@contextmanager
def composing_like_gpus() -> Iterator[None]:
    """Decompose ``dropout`` and ``group_norm`` as on a GPU; torch's C++ code chooses by device."""
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
