"""All private names of torch's fake tensors (tensors without values) that this package uses.

``torch_internals`` has those of torch itself.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch.optim import optimizer as _of_optimizers
from torch.utils import _foreach_utils as _of_lists

FakeTensor = fake_tensor.FakeTensor
FakeTensorMode = fake_tensor.FakeTensorMode

UNFOLLOWABLE = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedOperatorException,
)
"""Errors of fake tensors if a value is read, a size depends on values, or an operator has no description; ``func`` is
the operator."""


def make_like_fake(like: FakeTensor, memory: Tensor) -> FakeTensor:
    """Return a fake tensor over a meta tensor, with the mode and the device of another fake tensor.

    It equals ``FakeTensor(mode, memory, device)``, which takes four times as long, mostly to record unknown facts.
    """
    made: FakeTensor = Tensor._make_subclass(  # type: ignore[attr-defined]
        FakeTensor, memory, False, dispatch_device=True, device_for_backend_keys=like.fake_device
    )
    if like.fake_mode._allow_unsafe_data_ptr_access:
        torch._C._set_warn_deprecated_on_mutable_data_ptr(made)
    else:
        torch._C._set_throw_on_mutable_data_ptr(made)
    made.__dict__.update(like.__dict__)
    return made


@contextmanager
def taking_lists() -> Iterator[None]:
    """Let optimizers and the norm of gradients process lists of fake tensors at once, like a GPU's tensors."""
    modules: tuple[Any, ...] = (_of_lists, _of_optimizers)
    before = modules[0]._get_foreach_kernels_supported_devices
    for module in modules:
        module._foreach_supported_types.append(FakeTensor)
        module._get_foreach_kernels_supported_devices = lambda: [*before(), "cpu"]
    try:
        yield
    finally:
        for module in modules:
            module._foreach_supported_types.remove(FakeTensor)
            module._get_foreach_kernels_supported_devices = before


@contextmanager
def quiet_fake_tensors() -> Iterator[None]:
    """Keep torch from logging the traceback of an operator that refuses fake tensors: the error is raised anyway."""
    logger = logging.getLogger(FakeTensorMode.__module__)
    logger.addFilter(_is_no_refusal)
    try:
        yield
    finally:
        logger.removeFilter(_is_no_refusal)


def _is_no_refusal(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("failed while attempting to run meta")
