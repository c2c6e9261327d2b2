"""Batch norm over the samples of all replicas, for networks that run with torch's own kernels.

One process computes the statistics of its whole batch. So do replicas together: each computes those of its rows, all
gather them, and each comes to the same ones, bit for bit, as do their running statistics. Backward, each replica's loss
is a part of the whole loss, to which every sample contributes through the statistics: two sums per channel are summed
over the replicas.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from volseg.device.first_order import first_order
from volseg.device.torch_internals import find_saved_tensors_hooks
from volseg.errors import ParallelError
from volseg.parallel.replicas import Replicas
from volseg.parallel.state.opaque import is_opaque

__all__ = ["NormsOverReplicas", "check_synchronized", "find_norm_of_batch"]


BATCH_NORMS = frozenset(
    {"batch_norm", "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "_batch_norm_impl_index"}
) | {"_native_batch_norm_legit", "_native_batch_norm_legit_functional", "_batch_norm_with_update"}
"""What `F.batch_norm` comes to: called by itself, each replica would take the statistics of its own samples."""


def find_norm_of_batch(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Return the name of a norm that looks at all samples of a batch, or moves statistics by them; None of all else.

    Parameters
    ----------
    function
        Any of torch's.
    args, kwargs
        It is called with, or their nodes in a graph.
    """
    name: str = getattr(function, "__name__", str(function)).partition(".")[0]
    trains = args[5] if len(args) > 5 else kwargs.get("training", kwargs.get("use_input_stats", True))
    if name == "instance_norm":
        place = 1 if function is F.instance_norm else 3  # torch's own has weight and bias first
        running = args[place] if len(args) > place else kwargs.get("running_mean")
        return name if trains and running is not None else None
    return name if name in BATCH_NORMS and trains else None


class NormsOverReplicas(TorchFunctionMode):
    """Runs what is called in here with norms over the samples of all replicas.

    Parameters
    ----------
    replicas
        Who has the other samples.
    """

    def __init__(self, replicas: Replicas) -> None:
        super().__init__()
        self._replicas = replicas
        self._hooks = find_saved_tensors_hooks(True)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm:
            return self._batch_norm(*args, **kwargs)
        if func is F.instance_norm:
            return self._instance_norm(*args, **kwargs)
        if is_opaque(func):
            result = func(*args, **kwargs)
            if reason := func.__self__.explain_replicas():  # type: ignore[attr-defined]
                raise ParallelError(
                    f"the network of {self._replicas.count} replicas cannot run as torch.compile makes it: {reason}; "
                    "run the plain one (in a config training.kernels: torch)"
                )
            return result
        if name := find_norm_of_batch(func, args, kwargs):
            kind = "InstanceNorm" if name == "instance_norm" else "BatchNorm"
            raise ParallelError(
                f"torch's {name} is called for training; replicas take torch.nn.functional's, or a module ({kind})"
            )
        return func(*args, **kwargs)

    def _batch_norm(
        self,
        input: Tensor,  # noqa: A002 (torch's name)
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if not training:
            return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
        self._replicas.check_norm(True, running_mean is not None)
        if find_saved_tensors_hooks(True) is not self._hooks:
            raise ParallelError(
                "batch norm stands in a checkpointed block, whose recomputation would know nothing of the other "
                "replicas; checkpoint by Spatial(checkpoint=...), or leave the norm out of the block"
            )
        result, mean, variance, count = _BatchNorm.apply(input, weight, bias, eps, self._replicas)
        if running_mean is not None and running_var is not None:
            with torch.no_grad():
                running_mean.lerp_(mean.to(running_mean), momentum)
                # Towards the unbiased variance, count / (count - 1) times the biased one.
                running_var.lerp_((variance * (count / (count - 1))).to(running_var), momentum)
        return result

    def _instance_norm(
        self,
        input: Tensor,  # noqa: A002 (torch's name)
        running_mean: Tensor | None = None,
        running_var: Tensor | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        use_input_stats: bool = True,
        *settings: Any,
        **named: Any,
    ) -> Tensor:
        if use_input_stats:
            self._replicas.check_norm(False, running_mean is not None)
        return F.instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, *settings, **named)


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, value: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, replicas: Replicas
    ) -> tuple[Tensor, ...]:
        dims = [0, *range(2, value.ndim)]
        wide = value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
        variance, mean = torch.var_mean(wide, dims, correction=0)
        mean, variance, count = replicas.join_moments(mean, variance, value.numel() // value.shape[1])
        rstd = (variance + eps).rsqrt()
        scale = rstd if weight is None else rstd * weight.to(rstd)
        shift = -mean * scale if bias is None else torch.addcmul(bias.to(rstd), mean, scale, value=-1)
        result = torch.addcmul(_over(shift, wide), wide, _over(scale, wide)).to(value.dtype)
        ctx.save_for_backward(value, weight, mean, rstd, count)
        ctx.replicas, ctx.bias_type = replicas, None if bias is None else bias.dtype
        ctx.mark_non_differentiable(mean, variance, count)
        return result, mean, variance, count

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        value, weight, mean, rstd, count = ctx.saved_tensors
        dims = [0, *range(2, value.ndim)]
        wide, slope = value.to(mean.dtype), gradient.to(mean.dtype)
        normal = (wide - _over(mean, wide)) * _over(rstd, wide)
        total, moment = slope.sum(dims), (slope * normal).sum(dims)
        # Those of the weights stay the own ones: they are summed with all other gradients.
        weight_gradient = None if weight is None else moment.to(weight.dtype)
        bias_gradient = None if ctx.bias_type is None else total.to(ctx.bias_type)
        total, moment = ctx.replicas.add_up(torch.cat([total, moment])).split(len(total))
        slope = slope - _over(total / count, wide) - normal * _over(moment / count, wide)
        scale = rstd if weight is None else rstd * weight.to(rstd)
        return (slope * _over(scale, wide)).to(value.dtype), weight_gradient, bias_gradient, None, None


def _over(channels: Tensor, like: Tensor) -> Tensor:
    return channels.reshape(-1, *([1] * (like.ndim - 2)))


def check_synchronized(net: nn.Module, replicas: Replicas) -> None:
    """Refuse a SyncBatchNorm over other processes than the replicas'; over theirs it is exact."""
    for name, module in net.named_modules():
        if isinstance(module, nn.SyncBatchNorm) and replicas.count > 1:
            group = module.process_group or (dist.group.WORLD if dist.is_initialized() else None)
            ranks = [] if group is None else dist.get_process_group_ranks(group)
            own = [] if replicas.group is None else dist.get_process_group_ranks(replicas.group)
            if ranks != own or len(replicas.own) > 1:
                raise ParallelError(
                    f"{name} is a SyncBatchNorm over the processes {ranks}, and the replicas are on {own}; use a plain "
                    "BatchNorm, which takes the statistics of the whole batch here"
                )
