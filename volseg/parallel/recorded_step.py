"""Capture a training step as a CUDA graph per input shape, with its collectives, and replay it.

At 128^3 per GPU the Python of a step takes as long as its kernels. A recorded step runs no Python: one replay is
forward, loss, backward and, if the step contains it, the optimizer.

The first calls run eagerly, on the stream that records later: libraries choose kernels then, and optimizers create
their state. A step that cannot be recorded (a network that reads values) stays eager in all processes, and the reason
is logged once.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from volseg.device.gpus import current_gpu_stream, is_gpu, make_stream, move_together, on_stream
from volseg.device.graph import RecordedFunction
from volseg.errors import ParallelError
from volseg.parallel.data_parallel import DataParallel
from volseg.parallel.model_parallel import ModelParallel
from volseg.parallel.record_policy import Recorder
from volseg.parallel.spatial.strategy import SpatialStrategy
from volseg.parallel.state.recorded import RecordedState

_MOVED: WeakSet[Optimizer] = WeakSet()
"""Optimizers whose state was moved into one block of memory."""

_RECORDED: "WeakSet[_RecordedStep]" = WeakSet()
"""Recordings of all steps: their gradients must stay where they are."""


class RecordedStep(Recorder):
    """Record a step function per input shape, and replay it; the next replay overwrites the results of one.

    Drop or ``release`` it before ``destroy_process_group()``, which waits for existing recordings.

    Parameters
    ----------
    model
        A network on one GPU, or a spatial ``ModelParallel`` with one process per GPU. After each call its parameters
        have that call's gradients, recorded or not.
    step
        Maps inputs (nested tensors and volumes) to tensors. It must do the same on every call: no ``.item()``, no
        branch on values, ``zero_grad(set_to_none=True)`` inside.
    warm_up
        Number of eager calls per shape before a recording; they create the optimizer's state and cuDNN's choices.
    limit
        Number of shapes to record; calls with further shapes run eagerly.
    optimizer
        A fused optimizer, if ``step`` steps it. Its learning rates move to the device, where the recording reads them:
        change them in place (``group["lr"].fill_(rate)``). Before the first recording its state and gradients get new
        memory: capture your own CUDA graphs that contain their addresses afterwards.
    shares
        A step whose recordings may share memory with these: a result is valid until the next call of either step.
    messages
        ``name`` and ``advice`` of `Recorder`: what the step is, if not a training's.
    """

    def __init__(
        self,
        model: nn.Module,
        step: Callable[..., Any],
        warm_up: int = 3,
        limit: int = 2,
        optimizer: Optimizer | None = None,
        shares: "RecordedStep | None" = None,
        **messages: str,
    ) -> None:
        self.device = _get_gpu(model)
        self.model, self.step, self.optimizer = model, step, optimizer
        self._stream = make_stream(self.device)
        self._first: RecordedFunction | None = None
        self._shares = shares
        network = model.module if isinstance(model, ModelParallel) else model
        # If the attempt fails, the rates of all processes are restored: a tensor rounds to float32, a number does not.
        state = RecordedState(network, optimizer, partial(_prepare, network, optimizer, self.device))
        super().__init__(
            self._run_on_stream, self._capture, self._all_agree, warm_up=warm_up, limit=limit, state=state, **messages
        )

    def foresee_refusal(self) -> str | None:
        """Return why an attempt to record will fail, as seen in the calls so far; None if unknown."""
        model = self.model.model if isinstance(self.model, DataParallel) else self.model
        if not isinstance(model, ModelParallel) or not isinstance(model.strategy, SpatialStrategy):
            return None
        block = model.strategy.recomputation.find_drawing()
        name = "" if block is None else model.strategy.context.name_of(block)
        return f"the recomputed block {name} draws random numbers" if block is not None else None

    def release(self) -> None:
        """Free all recordings; later calls run eagerly first, as after construction."""
        self._first = None
        super().release()

    def _run_on_stream(self, *inputs: Any) -> Any:
        """Run the step on the recording's stream: autograd and NCCL keep the stream of their first use."""
        # Each stream waits for the other, here and at the next call, so memory that both use needs no record_stream.
        current = current_gpu_stream(self.device)
        self._stream.wait_stream(current)
        with on_stream(self._stream):
            outputs = self.step(*inputs)
        current.wait_stream(self._stream)
        return outputs

    def _capture(self, *inputs: Any) -> "_RecordedStep":
        _get_gpu(self.model)  # strategy='auto' may have fallen back to a pipeline
        if not self.is_replaying:  # freed, with their shared memory, to be recorded again
            self._first = None
        shares = self._first or (None if self._shares is None else self._shares._first)
        recorded = _RecordedStep(self.model, self.step, inputs, self._stream, shares=shares)
        self._first = self._first or recorded.function
        return recorded

    def _all_agree(self, agrees: bool) -> bool:
        """Agree over the processes that run the step together."""
        group = _get_group(self.model)
        return agrees if group is None else group.agree(agrees)


class _RecordedStep:
    """One recording, with its gradients and random numbers."""

    is_free = True

    def __init__(
        self,
        model: nn.Module,
        step: Callable[..., Any],
        inputs: tuple[Any, ...],
        stream: Any,
        shares: RecordedFunction | None,
    ) -> None:
        self._parameters = list(model.parameters())
        for parameter in self._parameters:
            parameter.grad = None
        self._group = _get_group(model)
        self._own = [] if self._group is None else self._group.prepare_recording()
        self.function = RecordedFunction(
            lambda inputs: step(*inputs), {"inputs": inputs}, generators=self._own, stream=stream, shares=shares
        )
        self._gradients = [parameter.grad for parameter in self._parameters]
        _RECORDED.add(self)

    def __call__(self, *inputs: Any) -> Any:
        with nullcontext() if self._group is None else self._group.replaying(self._own):
            outputs = self.function({"inputs": inputs})
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        return outputs

    def release(self) -> None:
        """Free the recording, and the gradients in its memory."""
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            if gradient is not None and parameter.grad is gradient:
                parameter.grad = None
        self._gradients = []
        self.function.release()


def _prepare(network: nn.Module, optimizer: Optimizer | None, device: torch.device) -> None:
    """Move an optimizer's rates to the device, and defragment the memory that the first steps have left.

    Memory moves only once: a recording, of this step or another, contains the addresses of the optimizer's state.
    """
    if optimizer is None:
        return
    for group in optimizer.param_groups:
        group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32).to(device)  # a recording reads it there
        if "capturable" in group:
            group["capturable"] = True
    if optimizer in _MOVED:
        return
    _MOVED.add(optimizer)
    recorded = {id(gradient) for each in _RECORDED for gradient in each._gradients}
    gradients = [parameter.grad for parameter in network.parameters() if id(parameter.grad) not in recorded]
    left = chain(gradients, *(state.values() for state in optimizer.state.values()))
    move_together([value for value in left if isinstance(value, Tensor)])


def _get_group(model: nn.Module) -> Any:
    """Return the strategy of a model whose recordings need agreement and seeds."""
    if isinstance(model, DataParallel):
        return model.strategy
    is_spatial = isinstance(model, ModelParallel) and isinstance(model.strategy, SpatialStrategy)
    return model.strategy if is_spatial else None


def _get_gpu(model: nn.Module) -> torch.device:
    """Return the single device of a model, on which its step can be recorded."""
    if isinstance(model, ModelParallel):
        devices = set(model.strategy.step_devices)
    else:
        devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1 or not is_gpu(next(iter(devices))):
        raise ParallelError(
            f"a step is recorded on one GPU per process, but this model is on {sorted(map(str, devices))}; start "
            "one process per GPU"
        )
    return next(iter(devices))
