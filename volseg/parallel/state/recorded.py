"""Watch the state that a recording depends on besides its inputs: the network, the optimizer, and torch's modes.

A recording repeats kernels and runs no Python. So any change that Python would react to (another dropout probability,
``eval()``, a frozen or replaced parameter, a hook, a rate assigned to the optimizer) must end the recording, and
effects of Python only (a counter, a number drawn on the CPU) must not be recorded. An attempt that is given up has no
side effects.
"""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from volseg.device.gpus import get_tensor_device, on_gpu, release_cache
from volseg.device.torch_internals import get_version, tree_leaves
from volseg.errors import ParallelError
from volseg.parallel.state.attempt import Attempt
from volseg.parallel.state.description import Weak, find_tensor, is_opaque
from volseg.parallel.state.watch import Watch, name_tensors


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
        Makes changes before an attempt; they are undone with it.
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
        read = self._look(None)
        assert self._attempt is not None
        if self._attempt.random.torch_moved() or self._attempt.random.foreign_moved():
            raise ParallelError(
                "the step draws random numbers on the CPU (torch's, Python's or NumPy's generator), and every replay "
                "would use the same ones; draw them on the device"
            )
        for name, tensor, version in self._on_cpu:
            if get_version(tensor) != version:
                raise ParallelError(
                    f"the step changes {name} on the CPU, which a replay does not; keep it on the device"
                )
        changes = self._watch_of_attempt.changes()
        for change in changes:
            if not change.is_of_tensors:
                old, new = change.pairs[0] if change.pairs else ("one", "another")
                raise ParallelError(
                    f"the step changes {change.name} from {_shorten(old)} to {_shorten(new)} in Python, which a replay "
                    "does not run; keep what forward() counts in a buffer on the device"
                )
            if any(find_tensor(old) in read for old, _ in change.pairs):
                raise ParallelError(
                    f"the step reads {change.name} and puts another tensor in its place, and a replay would read the "
                    "first one each time; change it in place"
                )
        if unknown := self._watch_of_attempt.unknown:
            raise ParallelError(
                f"{unknown[0]} could change unnoticed (it draws random numbers, is an iterator, or holds very much), "
                "and a replay does not look at it; keep it out of the network"
            )
        self._written.update(change.name for change in changes)
        self._watch = self._watch_of_attempt

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
        found: set[Weak] = set()
        if self._reads is not None:
            self._reads.__exit__(None, None, None)
            found = self._reads.read
        self._reads = reads
        if reads is not None:
            reads.__enter__()
        return found

    def _find_host_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in name_tensors(self._net):
            if not on_gpu(tensor) and not tensor.is_inference():
                yield name, tensor
        if self._optimizer is not None:
            for state in self._optimizer.state.values():
                for name, value in state.items():
                    if isinstance(value, Tensor) and not on_gpu(value):
                        yield f"the optimizer's {name}", value


def _shorten(token: Any) -> str:
    if find_tensor(token) is not None:
        return "one tensor"
    value = token[1] if isinstance(token, tuple) and len(token) == 2 and type(token[1]) is token[0] else token
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
