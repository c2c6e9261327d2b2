"""The strategies of one replica: a plain network on one device, and a pipeline.

A pipeline knows its parameters by identity, so stand-ins cannot replace them (see ``gradient_sums``). Hooks note which
parameters get a gradient; at the end of the backward pass `Piped` sums the gradients, in the order of the network's
parameters. A penalty on the weights in the loss cannot be distinguished from the gradients of the network, and counts
once for each replica.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from volseg.device.compiler_internals import watching_scripts
from volseg.device.torch_internals import (
    call_after_backward,
    find_backward_pass,
    get_accumulation_hooks,
    tree_flatten,
    tree_unflatten,
)
from volseg.errors import ParallelError
from volseg.parallel.buckets import fill_buckets
from volseg.parallel.gradient_sums import OUTSIDE, GradientHooks, GradientSums
from volseg.parallel.norms import name_batch_norm, norms_over_replicas, refuse_script
from volseg.parallel.pipeline.run import iterate_tensors
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
        raise ParallelError(
            "only strategy='spatial' cuts volumes; each replica of this network processes whole volumes"
        )

    def prepare_recording(self) -> list[torch.Generator]:
        """Prepare a CUDA graph of a step: nothing to do."""
        return []

    def replaying(self, generators: Sequence[torch.Generator]) -> AbstractContextManager[None]:
        """Replay in this block: nothing to do."""
        assert not generators
        return nullcontext()


class Piped(GradientHooks):
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
        super().__init__()
        self._model, self._strategy, self._replicas = model, strategy, replicas
        self.sums: GradientSums | None = None
        self._before: dict[int, dict[int, Tensor | None]] = {}
        """Of each backward pass that came through an output, the earlier gradients of its parameters, by identity."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the pipeline; its backward pass sums the gradients."""
        # As on one device: a network in evaluation mode may contain a norm that uses the statistics of the batch.
        if self._replicas.count > 1 and (self._strategy.net.training or torch.is_grad_enabled()):
            with watching_scripts(refuse_script), _NoNormsOfBatch():
                return self._run(*args, **kwargs)
        return self._run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if find_backward_pass() < 0:
            for before in self._before.values():  # of a backward pass that has raised
                for key, earlier in before.items():
                    if (parameter := self.watched.get(key)) is not None:
                        parameter.grad = earlier
            self._before.clear()
        result = self._model(*args, **kwargs)  # the first call moves the parameters to their stages
        if self.sums is not None and torch.is_grad_enabled():
            self.sums.look()
            self.watch(self._strategy.net.parameters())
            for output in iterate_tensors(result):
                if output.grad_fn is not None:
                    output.register_hook(lambda _: self._begin())
        return result

    def _begin(self) -> None:
        """Queue the sums of a backward pass that came through an output: every replica makes them."""
        number = find_backward_pass()
        if number not in self._before:
            self._before[number] = {}
            call_after_backward(partial(self._add, number))

    def receive(self, key: int, gradient: Tensor) -> None:  # noqa: ARG002 (it is added to `grad` after this)
        """Set the earlier gradient of a parameter aside, so that only this backward pass is summed."""
        before, parameter = self._before.get(find_backward_pass()), self.watched[key]
        if before is None:  # processes may differ in the number of such passes: one of them would wait forever
            raise ParallelError(OUTSIDE.format(shape=tuple(parameter.shape)))
        if get_accumulation_hooks(parameter):
            raise ParallelError(
                f"a parameter of shape {tuple(parameter.shape)} has a hook (register_post_accumulate_grad_hook), which "
                "would get the gradient of one replica, as a pipeline sums after the backward pass; remove the hook"
            )
        before[key], parameter.grad = parameter.grad, None

    @torch.no_grad()
    def _add(self, number: int) -> None:
        """Sum the gradients of a backward pass on the first device, and add them to the earlier ones.

        Each replica measures its own times, and may cut the network at other layers: sums that followed the devices of
        the stages would add gradients of different parameters.
        """
        before = self._before.pop(number, None)
        if before is None:  # the threads of two devices have started at the same time
            return
        named = {name: p for name, p in self._strategy.net.named_parameters() if self.watched.get(id(p)) is p}
        if taken := [name for name, p in named.items() if id(p) in before and p.grad is None]:
            self._before[number] = before  # the next forward pass puts them back
            raise ParallelError(
                f"the gradient of {taken[0]} was taken before the replicas summed it (torch.autograd.grad, or a "
                "hook that clears it); a replicated pipeline sums at the end of backward(): call it, then read .grad"
            )
        home = self._strategy.devices[0]
        assert self.sums is not None
        differences, first = self.sums.get_differences(tuple(named)), 0
        for bucket in fill_buckets(list(named.values())):
            at_home = [p.detach() if p.device == home else torch.empty_like(p, device=home) for p in bucket]
            given = [p.grad if id(p) in before else None for p in bucket]
            gradients = [None if gradient is None else gradient.to(home) for gradient in given]
            summed = self.sums.add(at_home, gradients, differences, first)
            for parameter, total in zip(bucket, summed, strict=True):
                if id(parameter) in before:
                    earlier, total = before[id(parameter)], None if total is None else total.to(parameter.device)
                    parameter.grad = earlier if total is None else total if earlier is None else earlier.add_(total)
            first += len(bucket)


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
