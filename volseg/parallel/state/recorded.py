"""The contract of a recording, and the state of a network and an optimizer that it depends on.

A recording repeats kernels and runs no Python. Static, and part of its key or of the watched state:

- shapes, strides, types, devices and ``requires_grad`` of the inputs, plain arguments, and torch's modes
  (``device.graph``: ``describe_inputs``, ``read_modes``);
- addresses of parameters, buffers and the optimizer's tensors; inputs are copied to addresses of the recording;
- everything else that Python would react to: modules and their attributes, ``forward`` and hooks, globals that the
  network's functions name, the optimizer's settings (``Watch``).

What may change between replays: the *values* of inputs, parameters, buffers and optimizer state on the device, a rate
in a tensor on the device, the seeds, and tensors that the recorded function itself replaces at the same place.

Who re-records: of a step, ``Recorder`` frees all recordings at the first change that ``find_change`` names, and records
again after the eager calls, at most twenty times. Of a pipeline's batch, ``BatchRecorder`` counts another condition of
the network as another kind of batch.

Refused, so that calls stay eager: effects of Python only (a counter, another attribute, a number drawn or a tensor
changed on the host), a tensor that is read and replaced, values that could change unnoticed, tensors whose values
Python reads, inputs that change in place, and a step's inputs that need a gradient. An attempt that is given up has no
side effects.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from volseg.device.gpus import get_tensor_device, on_gpu, release_cache
from volseg.device.torch_internals import get_version, tree_leaves
from volseg.errors import ParallelError
from volseg.parallel.state.description import Weak, find_tensor, is_opaque
from volseg.parallel.state.module import remember
from volseg.parallel.state.random import RandomState
from volseg.parallel.state.watch import Change, Watch, name_tensors


class Attempt:
    """State before an attempt; ``put_back`` undoes the attempt, as does the end of a ``with`` block.

    An attempt (to record, to probe) runs ``forward`` once more than the user asked for, or stops in
    the middle of it. It must leave no side effects.

    Parameters
    ----------
    net
        Network whose buffers and attributes are restored, and the references to its gradients.
    devices
        Devices whose random numbers are restored besides the host's.
    written
        Parameters whose values are restored too, because ``forward`` is known to change them.
    optimizer
        Optimizer whose settings and state are restored: the values on the host, and the set of tensors in its state.

    Attributes
    ----------
    network : Remembered
        State of the network before the attempt.
    random : RandomState
        State of the generators before the attempt.
    """

    def __init__(
        self,
        net: nn.Module,
        devices: Iterable[torch.device] = (),
        *,
        written: Iterable[Tensor] = (),
        optimizer: Optimizer | None = None,
    ) -> None:
        self.network = remember(net, written)
        self.random = RandomState(devices)
        self._gradients = [(parameter, parameter.grad) for parameter in net.parameters()]
        self._put_optimizer_back = _remember_optimizer(optimizer)

    def __enter__(self) -> "Attempt":
        return self

    def __exit__(self, *failure: Any) -> None:
        self.put_back()

    def put_back(self, in_place: bool = True) -> None:
        """Undo the attempt.

        Parameters
        ----------
        in_place
            Whether a higher version of a parameter means a change; False if kernels were recorded and have not run.

        Raises
        ------
        ParallelError
            If a parameter was changed in place.
        """
        self.random.put_back()  # first, since the following code may refuse
        for parameter, gradient in self._gradients:
            if parameter.grad is not gradient:
                parameter.grad = gradient
        self._put_optimizer_back()
        self.network.put_back(in_place)


def _remember_optimizer(optimizer: Optimizer | None) -> Callable[[], None]:
    """Record an optimizer's settings and state; return the function that restores them."""
    if optimizer is None:
        return lambda: None
    own, groups = optimizer.param_groups, [(group, dict(group)) for group in optimizer.param_groups]
    states = {
        parameter: {name: (value, _copy_on_host(value)) for name, value in state.items()}
        for parameter, state in optimizer.state.items()
    }

    @torch.no_grad()
    def put_back() -> None:
        optimizer.param_groups = own
        own[:] = [group for group, _ in groups]
        for group, before in groups:
            group.clear()
            group.update(before)
        optimizer.state.clear()
        for parameter, state in states.items():
            for value, held in state.values():
                if held is not None:
                    value.copy_(held)
            optimizer.state[parameter] = {name: value for name, (value, _) in state.items()}

    return put_back


def _copy_on_host(value: Any) -> Tensor | None:
    """Return a copy of a tensor on the CPU: tensors on the device do not change while kernels are recorded."""
    return value.clone() if isinstance(value, Tensor) and not on_gpu(value) else None


class _Reads(TorchFunctionMode):
    """Record the watched tensors that functions read: a tensor that is also replaced is state.

    A recording would always read the first such tensor.
    """

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watched = {id(tensor): weak for weak in watch.tensors if (tensor := weak.tensor) is not None}
        self.read: set[Weak] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_opaque(func):  # its reads are not seen, so it may have read all
            self.read.update(self._watched.values())
        found = (self._watched.get(id(leaf)) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        self.read.update(weak for weak in found if weak is not None)
        return func(*args, **kwargs)


class RecordedState:
    """State around a recorded step: recorded before the attempt, restored if the attempt fails, watched afterwards.

    Parameters
    ----------
    net, optimizer
        The trained network and its optimizer.
    prepare
        Makes changes before an attempt, which are undone with the attempt.
    """

    def __init__(
        self, net: nn.Module, optimizer: Optimizer | None = None, prepare: Callable[[], None] = lambda: None
    ) -> None:
        self._net, self._optimizer, self._prepare = net, optimizer, prepare
        self._watch: Watch | None = None
        self._written: set[str] = set()
        self._attempt: Attempt | None = None
        self._reads: _Reads | None = None

    def begin(self) -> None:
        """Record everything before an attempt to record."""
        self._attempt = Attempt(self._net, optimizer=self._optimizer)
        self._prepare()
        self._watch_of_attempt = Watch(self._net, self._optimizer)
        self._look(_Reads(self._watch_of_attempt))
        self._on_cpu = [(name, tensor, get_version(tensor)) for name, tensor in self._find_host_tensors()]

    def keep(self) -> None:
        """Accept the attempt, and watch the state from now on.

        Raises
        ------
        ParallelError
            If the step did work in Python, or on the CPU, that a replay would not repeat.
        """
        read, changes = self._look(None), self._watch_of_attempt.changes()
        if effect := next(self._list_effects(read, changes), None):
            raise ParallelError(f"the step {effect}")
        self._written.update(change.name for change in changes)
        self._watch = self._watch_of_attempt

    def _list_effects(self, read: set[Weak], changes: Iterable[Change]) -> Iterator[str]:
        """Yield what the step did besides kernels, and how to avoid it, as a phrase."""
        assert self._attempt is not None
        if self._attempt.random.torch_moved() or self._attempt.random.foreign_moved():
            yield "draws random numbers on the CPU, and each replay would use the same ones; draw them on the device"
        for name, tensor, version in self._on_cpu:
            if get_version(tensor) != version:
                yield f"changes {name} on the CPU, which a replay does not repeat; keep it on the device"
        for change in changes:
            if not change.is_of_tensors:
                yield f"changes {change.name} in Python, which a replay does not repeat; keep it in a buffer"
            if any(find_tensor(old) in read for old, _ in change.pairs):
                yield f"reads {change.name} and then replaces it with another tensor; change it in place"
        for name in self._watch_of_attempt.unknown:
            yield f"has {name}, whose changes cannot be detected; keep it out of the network"

    def put_back(self) -> None:
        """Undo the attempt."""
        self._look(None)
        assert self._attempt is not None
        # Recorded kernels have not run: parameters with higher versions still have their values.
        self._attempt.put_back(in_place=False)
        self._attempt = None

    def done(self) -> None:
        """Drop the state for undoing an attempt, and free its memory."""
        self._attempt = None
        release_cache({get_tensor_device(parameter) for parameter in self._net.parameters()})

    def find_change(self) -> str | None:
        """Return a description of the first change since the recording, or None; a change ends the recordings."""
        if self._watch is None:
            return None
        for change in self._watch.changes():
            # Tensors that the recorded function replaces on each call may have been replaced once more.
            if change.name not in self._written or not change.is_of_tensors:
                self._watch, self._written = None, set()
                return change.name
        return None

    def _look(self, reads: _Reads | None) -> set[Weak]:
        """Start or stop recording reads; return the recorded tensors."""
        before, self._reads = self._reads, reads
        if before is not None:
            before.__exit__(None, None, None)
        if reads is not None:
            reads.__enter__()
        return set() if before is None else before.read

    def _find_host_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in name_tensors(self._net):
            if not on_gpu(tensor) and not tensor.is_inference():
                yield name, tensor
        if self._optimizer is not None:
            for state in self._optimizer.state.values():
                for name, value in state.items():
                    if isinstance(value, Tensor) and not on_gpu(value):
                        yield f"the optimizer's {name}", value
