"""Batch norm over the samples of all replicas.

One process computes the statistics of its whole batch. Replicas do so together: each computes the moments of its own
rows, all gather the moments, and each merges them to the same statistics, bit for bit. In the backward pass each
replica has the gradient of its own part of the loss, to which every sample contributes through the statistics: two sums
per channel are reduced over the replicas.

A replica's forward pass runs in ``norms_over_replicas``, which intercepts every norm. The sharded form of a norm sums
over slabs and replicas, so norms of volumes pass through. Ordinary tensors (after a global pool, tokens, a level with
fewer planes than shards) are normalised here. All shards of a replica hold the same tensor: sums run over the processes
that hold the same shard of different replicas, and give the same bits on every shard.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from volseg.device.compiler_internals import ScriptMethod, watching_scripts
from volseg.device.first_order import first_order
from volseg.device.gpus import has_values, is_recording
from volseg.device.norm.reference import Running, check_sizes
from volseg.device.torch_internals import find_saved_tensors_hooks
from volseg.errors import ParallelError
from volseg.parallel.replicas import Replicas
from volseg.parallel.spatial.volume import ShardedVolume
from volseg.parallel.state.description import is_opaque

BATCH_NORMS = frozenset(
    {"batch_norm", "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "_batch_norm_impl_index"}
) | {"_native_batch_norm_legit", "_native_batch_norm_legit_functional", "_batch_norm_with_update"}
"""Functions behind `F.batch_norm`: called directly, each replica would use the statistics of its own samples."""


def name_batch_norm(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Return the name of a norm that reads all samples of a batch, or updates running statistics; otherwise None.

    Parameters
    ----------
    function
        A torch function, or its name.
    args, kwargs
        Its arguments, or their nodes in a graph.
    """
    name: str = getattr(function, "__name__", str(function)).partition(".")[0]
    default = function is not F.batch_norm
    trains = args[5] if len(args) > 5 else kwargs.get("training", kwargs.get("use_input_stats", default))
    if name == "instance_norm":
        place = 1 if function is F.instance_norm else 3  # torch's own has weight and bias first
        running = args[place] if len(args) > place else kwargs.get("running_mean")
        return name if trains and running is not None else None
    return name if name in BATCH_NORMS and trains else None


@contextmanager
def norms_over_replicas(replicas: Replicas) -> Iterator[None]:
    """Compute the statistics of batch norms over the samples of all replicas within the block."""
    with watching_scripts(refuse_script), _NormsOverReplicas(replicas):
        yield


class _NormsOverReplicas(TorchFunctionMode):
    def __init__(self, replicas: Replicas) -> None:
        super().__init__()
        self._replicas = replicas
        self._hooks = find_saved_tensors_hooks(True)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(args[0] if args else kwargs.get("input"), ShardedVolume):
            return func(*args, **kwargs)  # its sharded form sums over the replicas
        if func is F.batch_norm:
            return self._batch_norm(*args, **kwargs)
        if func is F.instance_norm and name_batch_norm(func, args, kwargs):
            self._replicas.check_norm(False, True)
        if is_opaque(func):
            result = func(*args, **kwargs)
            if reason := func.__self__.explain_replicas():  # type: ignore[attr-defined]
                raise ParallelError(
                    f"the network of {self._replicas.count} replicas cannot run under torch.compile: {reason}; "
                    "run the plain network (in a config training.kernels: torch)"
                )
            return result
        if name := name_batch_norm(func, args, kwargs):
            kind = "InstanceNorm" if name == "instance_norm" else "BatchNorm"
            raise ParallelError(
                f"forward calls torch.{name} in training; replicas need the one of torch.nn.functional, or a module "
                f"({kind})"
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
        if find_saved_tensors_hooks(True) != self._hooks or _is_in_reentrant_checkpoint():
            raise ParallelError(
                "a batch norm is in a checkpointed block, whose recomputation would ignore the other replicas; "
                "checkpoint by Spatial(checkpoint=...), or leave the norm out of the block"
            )
        check_sizes(input.shape[1], weight=weight, bias=bias, running_mean=running_mean, running_var=running_var)
        running = Running.find(running_mean, running_var, momentum)
        result, mean, variance, count = _BatchNorm.apply(input, weight, bias, eps, self._replicas)
        self._check_count(input, count)
        if running is not None:
            with torch.no_grad():
                running.update(mean, variance, count)
        return result

    def _check_count(self, value: Tensor, count: Tensor) -> None:
        """Refuse a batch of fewer than two values per channel; only a replica with fewer than two reads the count."""
        if _count_values(value) > 1 or is_recording(value.device) or not has_values(value.device) or int(count) > 1:
            return
        raise ParallelError(
            "a batch norm in training needs more than 1 value per channel in the whole batch; it got "
            f"{int(count)} over {self._replicas.count} replicas, from an input of shape {tuple(value.shape)} here. "
            "Use a larger batch, or an instance or group norm"
        )


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, value: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, replicas: Replicas
    ) -> tuple[Tensor, ...]:
        dims = [0, *range(2, value.ndim)]
        wide = value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
        number = _count_values(value)
        if number:
            variance, mean = torch.var_mean(wide, dims, correction=0)
        else:  # a replica without rows: moments of weight 0 must not be NaN
            variance = mean = wide.new_zeros(wide.shape[1])
        mean, variance, count = replicas.join_moments(mean, variance, number)
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
        # The sums of the weights stay local: they are reduced with all other gradients.
        weight_gradient = None if weight is None else moment.to(weight.dtype)
        bias_gradient = None if ctx.bias_type is None else total.to(ctx.bias_type)
        total, moment = ctx.replicas.add_up(torch.cat([total, moment])).split(len(total))
        slope = slope - _over(total / count, wide) - normal * _over(moment / count, wide)
        scale = rstd if weight is None else rstd * weight.to(rstd)
        return (slope * _over(scale, wide)).to(value.dtype), weight_gradient, bias_gradient, None, None


def _is_in_reentrant_checkpoint() -> bool:
    """Return whether a checkpoint of ``use_reentrant=True`` runs its block without gradients."""
    if torch.is_grad_enabled():
        return False
    frame, code = sys._getframe(1), CheckpointFunction.forward.__code__
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


def _count_values(value: Tensor) -> int:
    """Return the number of values of each channel."""
    return value.shape[0] * value.shape[2:].numel()


def _over(channels: Tensor, like: Tensor) -> Tensor:
    return channels.reshape(-1, *([1] * (like.ndim - 2)))


def check_norms(net: nn.Module, replicas: Replicas) -> None:
    """Refuse a SyncBatchNorm: it may sum over other processes than the replicas'."""
    synchronized = [name for name, module in net.named_modules() if isinstance(module, nn.SyncBatchNorm)]
    if synchronized and replicas.count > 1:
        raise ParallelError(
            f"{synchronized[0]} is a SyncBatchNorm, which may sum over other processes than those of the replicas; use "
            "a plain BatchNorm, which computes the statistics of the whole batch here"
        )


def refuse_script(script: Any) -> None:
    """Refuse a TorchScript function or method: modes do not see its operators, among which may be a batch norm."""
    graph = script.graph
    owner = f"{next(graph.inputs()).type().name()}." if isinstance(script, ScriptMethod) else ""
    raise ParallelError(
        f"{owner}{script.name} is compiled by torch.jit, and a batch norm in it would use the samples of only one "
        "replica; use the Python function or module"
    )
