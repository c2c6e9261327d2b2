"""The strategies of one replica: a plain network on one device, and a pipeline.

The stages of a pipeline are recorded with the parameters themselves, so stand-ins cannot replace them (see
``gradient_sums``); torch's ``DistributedDataParallel`` works instead, by hooks on the parameters. It averages, which is
right for gradients of several backward passes too; each gradient is first multiplied by the number of replicas, so that
the mean is the sum.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from volseg.device.compiler_internals import watching_scripts
from volseg.device.gpus import has_values, observer
from volseg.device.torch_internals import tree_flatten, tree_map_only, tree_unflatten
from volseg.errors import ParallelError
from volseg.parallel.fixed_order import sum_in_order
from volseg.parallel.gradient_sums import GradientSums
from volseg.parallel.norms import name_batch_norm, norms_over_replicas, refuse_script
from volseg.parallel.pipeline.strategy import PipelineStrategy
from volseg.parallel.replicas import Replicas


class OneDevice:
    """The strategy of a plain network on one device: its own ``forward``, with torch's kernels."""

    is_shared = False
    is_recordable = True
    is_replaying = False
    group = None

    def __init__(self, net: nn.Module, replicas: Replicas) -> None:
        devices = {tensor.device for tensor in (*net.parameters(), *net.buffers())}
        if len(devices) > 1:
            raise ParallelError(
                f"the network is on {', '.join(sorted(map(str, devices)))}; move it to one device, or place it by "
                "ModelParallel(net, strategy='pipeline')"
            )
        self.net, self.replicas = net, replicas
        self.step_devices = [next(iter(devices), torch.device("cpu"))]
        self.sums: GradientSums | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the network; the backward pass of its outputs sums the gradients."""
        with norms_over_replicas(self.replicas) if self._shares_norms else nullcontext():
            marked = self.sums.mark(self.net) if self.sums is not None and torch.is_grad_enabled() else None
            if marked is None:
                return self.net(*args, **kwargs)
            with marked.used(self.net):
                result = self.net(*args, **kwargs)
        leaves, structure = tree_flatten(result)
        marked.check_outputs(leaves)
        places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        for place, tensor in zip(places, marked.tie([leaves[place] for place in places]), strict=True):
            leaves[place] = tensor
        return tree_unflatten(leaves, structure)

    @property
    def _shares_norms(self) -> bool:
        # A network in evaluation may contain a norm in training: by its mode, or by an argument in forward.
        return self.replicas.count > 1 and (self.net.training or torch.is_grad_enabled())

    @property
    def partition(self) -> str:
        """Assignment of layers to devices."""
        return f"the network on {self.step_devices[0]}"

    @property
    def volumes(self) -> NoReturn:
        """Raise a ParallelError: volumes are whole here.

        Raises
        ------
        ParallelError
            Always.
        """
        raise ParallelError("volumes are cut for strategy='spatial', and each replica of this network has whole ones")

    def prepare_recording(self) -> list[torch.Generator]:
        """Prepare a CUDA graph of a step: nothing to do."""
        return []

    def replaying(self, generators: Sequence[torch.Generator]) -> AbstractContextManager[None]:
        """Replay in this block: nothing to do."""
        assert not generators
        return nullcontext()


class Piped:
    """Call one replica that is a pipeline.

    Parameters
    ----------
    model
        The pipeline's `ModelParallel`.
    strategy
        Its strategy.
    replicas
        All replicas, and the processes that compute them.
    """

    def __init__(self, model: nn.Module, strategy: PipelineStrategy, replicas: Replicas) -> None:
        processes = replicas.num_processes
        if replicas.fixed_order and processes & (processes - 1):
            raise ParallelError(
                f"sums over {processes} pipelines keep no fixed order; take a power of two, or fixed_order=False"
            )
        self._model, self._strategy, self._replicas = model, strategy, replicas
        self._wrapped: nn.Module | None = None
        self._summed: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the pipeline; its backward pass sums the gradients."""
        # As on one device: a network in evaluation mode may hold a norm that takes the statistics of the batch.
        if self._replicas.count > 1 and (self._strategy.net.training or torch.is_grad_enabled()):
            with watching_scripts(refuse_script), _NoNormsOfBatch():
                return self._run(*args, **kwargs)
        return self._run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if self._replicas.group is None or not torch.is_grad_enabled():
            return self._model(*args, **kwargs)
        if self._wrapped is None:
            self._strategy.plan(*args, **kwargs)  # parameters stay where they are
            self._wrapped = self._wrap(self._replicas.group)
        self._require_summed()
        return self._wrapped(*args, **kwargs)

    def _require_summed(self) -> None:
        """Refuse to train parameters that `DistributedDataParallel` does not know: it reads the parameters once."""
        trained = [(name, p) for name, p in self._strategy.net.named_parameters() if p.requires_grad]
        if unknown := [name for name, parameter in trained if self._summed.get(id(parameter)) is not parameter]:
            raise ParallelError(
                f"{unknown[0]} is trained now, but was frozen or another parameter when the replicas of this "
                "pipeline first ran, so its gradient would not be summed; wrap the network again: "
                "DataParallel(ModelParallel(model.module, strategy='pipeline', ...), replicas)"
            )

    def _wrap(self, group: dist.ProcessGroup) -> nn.Module:
        trained = [parameter for parameter in self._strategy.net.parameters() if parameter.requires_grad]
        self._summed.update((id(parameter), parameter) for parameter in trained)
        if not has_values():
            return FollowedReplicas(self._model, trained, self._replicas.num_processes)
        wrapped = DistributedDataParallel(
            self._model, process_group=group, broadcast_buffers=False, find_unused_parameters=True
        )
        if self._replicas.fixed_order:
            wrapped.register_comm_hook(group, _average_in_order)
        for parameter in trained:
            parameter.register_hook(partial(_multiply, weakref.ref(self), self._replicas.num_processes))
        return wrapped


def _multiply(owner: "weakref.ref[Piped]", factor: int, gradient: Tensor | None) -> Tensor | None:
    """Multiply a parameter's gradient, as its hook, as long as the replicas exist."""
    return gradient if gradient is None or owner() is None else gradient * factor


def _average_in_order(group: dist.ProcessGroup, bucket: Any) -> torch.futures.Future[Tensor]:
    buffer = bucket.buffer()
    done: torch.futures.Future[Tensor] = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
    done.set_result(sum_in_order(buffer, group) / dist.get_world_size(group))
    return done


class _NoNormsOfBatch(TorchFunctionMode):
    """Refuse norms that need statistics of whole batches: a pipeline computes statistics of its micro-batches."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if name := name_batch_norm(func, args, kwargs):
            raise ParallelError(
                f"the network calls {name} for training, which uses the statistics of a whole batch, but each replica "
                "of this pipeline sees micro-batches of its own rows; use instance or group norm, or data x spatial"
            )
        return func(*args, **kwargs)


class FollowedReplicas(nn.Module):
    """Stand-in for `DistributedDataParallel` in a step on fake tensors: torch's own is C++ that reads real memory.

    As in torch's sources (``csrc/distributed/c10d/reducer.cpp``), flat gradients are kept beside the gradients
    themselves. Each gradient is copied there, summed and copied back, and so are the network's outputs copied, from
    which torch finds unused parameters. Here each gradient is a message of its own; torch sends some together.

    Parameters
    ----------
    model : callable
        Network of one replica.
    parameters : iterable of Tensor
        Trained parameters, on their devices, in the order of the network.
    processes : int
        Number of processes that sum gradients.
    """

    _model: Callable[..., Any]

    def __init__(self, model: Callable[..., Any], parameters: Iterable[Tensor], processes: int) -> None:
        super().__init__()
        object.__setattr__(self, "_model", model)  # its parameters are not this module's
        trained = list(parameters)
        for device in dict.fromkeys(parameter.device for parameter in trained):
            own = [parameter for parameter in trained if parameter.device == device]
            flat = torch.cat([parameter.detach().reshape(-1) for parameter in own])
            observer().on_sent(device, "broadcast", flat.nbytes, processes)  # the first replica's weights are sent
            for parameter, place in zip(own, flat.split([parameter.numel() for parameter in own]), strict=True):
                parameter.register_hook(partial(_follow_sum, place, processes))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the network, and copy its outputs."""
        outputs = self._model(*args, **kwargs)
        return tree_map_only(Tensor, lambda value: value.clone() if value.requires_grad else value, outputs)


def _follow_sum(place: Tensor, processes: int, gradient: Tensor) -> Tensor:
    """Multiply a gradient as `Piped` does, so that its mean is a sum; copy it to its place, and back."""
    multiplied, view = gradient * processes, place.view_as(gradient)
    view.copy_(multiplied)
    observer().on_sent(place.device, "all_reduce", place.nbytes, processes)
    return multiplied.copy_(view)
