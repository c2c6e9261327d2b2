"""Refuse second derivatives and forward-mode derivatives of volseg's autograd functions."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from volseg.device.torch_internals import is_changed_in_place, is_forward_mode
from volseg.errors import UnsupportedOperatorError


def refuse_forward_mode(name: str) -> None:
    """Raise `UnsupportedOperatorError` in forward-mode differentiation: volseg's functions do not support it."""
    if is_forward_mode():
        raise UnsupportedOperatorError(
            f"{name} supports only reverse-mode derivatives, but was called in forward mode (torch.func.jvp, or "
            "a dual_level of torch.autograd.forward_ad): use backward(), or call the plain network"
        )


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse second derivatives, and compute the gradient without recording it.

    torch's ``once_differentiable`` raises only if the incoming gradient requires one; after a linear loss it does not,
    and the second derivative would silently be missing. Autograd runs a backward pass with gradients enabled only for
    ``create_graph=True``.

    Raises
    ------
    UnsupportedOperatorError
        For ``create_graph=True``, and if a read or recomputed tensor was changed in place, even if a plain network does
        not save that tensor.
    """

    @wraps(backward)
    def once(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise UnsupportedOperatorError(
                "ModelParallel and volseg's DiceCELoss compute no second derivatives (create_graph=True); use the "
                "plain network with monai.losses.DiceCELoss, or a pipeline with record=False"
            )
        try:
            return backward(ctx, *gradients)
        except CheckpointError as error:
            raise UnsupportedOperatorError(
                "the recomputation of a checkpointed block differs from its forward pass: a tensor that the block "
                "reads, or a part of a concatenated one, was changed in place since. Change a copy, or remove the "
                f"checkpoint. torch says: {str(error).splitlines()[0]}"
            ) from error
        except RuntimeError as error:
            if not is_changed_in_place(error):
                raise
            raise UnsupportedOperatorError(
                "a tensor was changed in place after a norm, a sum, a concatenation, a convolution or attention had "
                "read it, but the gradient needs its old value: change a copy, or change it before it is read. volseg "
                f"saves inputs of some operators where a plain network saves outputs. torch says: {error}"
            ) from error

    return once


class LinearMap(torch.autograd.Function):
    """A linear map of tensors, computed outside autograd; its transpose computes their gradients.

    ``apply`` takes the map, its transpose and the tensors. Both functions take and return one tensor or several. The
    transpose must hold no slab: autograd keeps it until the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Any], transpose: Callable[..., Any], *tensors: Tensor) -> Any:
        """Return the result of ``compute``: a tensor, or a tuple of tensors."""
        ctx.transpose = transpose
        return compute(*tensors)

    @staticmethod
    @first_order
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the result of ``transpose``."""
        found = ctx.transpose(*gradients)
        return None, None, *((found,) if isinstance(found, Tensor) else found)
