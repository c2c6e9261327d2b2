"""What a recording depends on besides its inputs: the network, the optimizer, and the modes of torch.

A recording repeats kernels and runs no Python. So what Python would do differently now (a dropout's probability that
was changed, ``eval()``, a frozen or replaced parameter, a hook, a rate assigned to the optimizer) must end the
recording, and what only Python changes (a counter, a number drawn on the CPU) must not be recorded. An attempt that is
given up leaves no trace.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from operator import is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from volseg.errors import ParallelError
from volseg.parallel.module_state import REGISTRIES, is_scripted, remember
from volseg.parallel.random_state import RandomState

__all__ = ["RecordedState", "Watch", "modes"]

FOLLOWED = (
    "_parameters",
    "_buffers",
    "_modules",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
"""Registries of a module whose members count; the others hold flags of these, or concern state dictionaries."""

PLAIN = frozenset({int, float, bool, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size})


def modes() -> tuple[Any, ...]:
    """Return the modes of torch under which a function would be recorded."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled(kind),
        torch.get_autocast_dtype(kind),
        torch.are_deterministic_algorithms_enabled(),
    )


class _Held(NamedTuple):
    """A dictionary, and the very objects it held."""

    where: str
    holder: dict[Any, Any]
    names: list[Any]
    values: list[Any]
    contents: list[tuple[str, Any, list[Any]]]

    @classmethod
    def of(cls, where: str, holder: dict[Any, Any]) -> "_Held":
        contents = [
            (str(name), value, _leaves(value))
            for name, value in holder.items()
            if type(value) in (list, dict, set) and name not in REGISTRIES
        ]
        return cls(where, holder, list(holder), list(holder.values()), contents)

    def differences(self) -> Iterator[tuple[str, Any, Any]]:
        """Name what is not the same, with what it was and what it is."""
        yield from self.exchanged()
        yield from self.changed()

    def exchanged(self) -> Iterator[tuple[str, Any, Any]]:
        """Name the members that are others."""
        then = dict(zip(self.names, self.values, strict=True))
        for name in {**then, **self.holder}:
            old, new = then.get(name, ABSENT), self.holder.get(name, ABSENT)
            yield from ((f"{self.where}{name}", *pair) for pair in _differences(old, new))

    def changed(self) -> Iterator[tuple[str, Any, Any]]:
        """Name the lists, dictionaries and sets that hold something else."""
        for name, container, leaves in self.contents:
            today = _leaves(container)
            if len(today) != len(leaves) or not all(map(is_, today, leaves)):
                yield from ((f"{self.where}{name}", *pair) for pair in _differences(leaves, today))


class _Absent:
    """Stands for an attribute that is not there."""

    def __repr__(self) -> str:
        return "nothing"


ABSENT = _Absent()


class Watch:
    """Tells what of a network, and of an optimizer, is not as it was when this was made.

    Objects are compared by identity and plain values by value; what tensors hold does not count, but where they lie
    does, since that is where a recording reads them.
    """

    def __init__(self, net: nn.Module, optimizer: Optimizer | None = None) -> None:
        self._held = list(_held(net, optimizer))
        self._holders = [held.holder for held in self._held]
        self._lengths = list(map(len, self._holders))
        # Of a module's attributes, those that torch itself makes are followed as registries.
        own = [[name for name in held.names if name not in REGISTRIES] for held in self._held]
        self._reads = [itemgetter(*names, names[0]) for names in own if names]
        self._read = [held.holder for held, names in zip(self._held, own, strict=True) if names]
        self._values = list(self._objects())
        self._containers = [held for held in self._held if held.contents]
        self._tensors = [(name, tensor, tensor.data_ptr(), tensor.requires_grad) for name, tensor in _tensors(net)]
        self._forwards = {type(module): type(module).forward for module in net.modules()}
        self._written: set[str] = set()
        self._optimizer = optimizer
        self._optimizers_own = _own(optimizer)

    def change(self) -> str | None:
        """Name the first thing that is different, or None."""
        if not all(map(is_, _own(self._optimizer), self._optimizers_own)):
            return "the optimizer's state"  # load_state_dict makes it anew
        same = self._same_objects()
        found = (held.changed() for held in self._containers) if same else (held.differences() for held in self._held)
        for name, _, _ in chain.from_iterable(found):
            if name not in self._written:
                return name
        if not same:  # other objects, which mean the same: known from now on
            self._lengths, self._values = list(map(len, self._holders)), list(self._objects())
        for name, tensor, address, requires_grad in self._tensors:
            if tensor.requires_grad != requires_grad or tensor.data_ptr() != address:
                return name
        for kind, forward in self._forwards.items():
            if kind.forward is not forward:
                return f"{kind.__name__}.forward"
        return None

    def _same_objects(self) -> bool:
        """Compare all identities at once: this runs before every replay."""
        if list(map(len, self._holders)) != self._lengths:
            return False
        try:
            return all(map(is_, self._objects(), self._values))
        except KeyError:  # one went and another came
            return False

    def _objects(self) -> Iterator[Any]:
        return chain.from_iterable(map(itemgetter.__call__, self._reads, self._read))

    def recorded(self, now: "Watch") -> None:
        """Take what the recorded function did to what is watched: ``now`` was made behind it.

        Raises
        ------
        ParallelError
            If it changed anything but tensors: a replay would not.
        """
        for held in self._held:
            for name, old, new in held.differences():
                if not all(isinstance(value, Tensor | None | _Absent) for value in (old, new)):
                    raise ParallelError(
                        f"the step changes {name} from {_short(old)} to {_short(new)} in Python, which a replay does "
                        "not run; keep what forward() counts in a buffer on the device"
                    )
                now._written.add(name)


class RecordedState:
    """The state around a step that is recorded: noted before the attempt, put back if it is given up, watched after.

    Parameters
    ----------
    net, optimizer
        What the step trains, and with what.
    prepare
        What to change before an attempt, to be undone with it.
    """

    def __init__(
        self, net: nn.Module, optimizer: Optimizer | None = None, prepare: Callable[[], None] = lambda: None
    ) -> None:
        self._net, self._optimizer, self._prepare = net, optimizer, prepare
        self._watch: Watch | None = None
        self._undo: list[Callable[[], None]] = []

    def begin(self) -> None:
        """Note everything before an attempt to record."""
        self._random = RandomState(())
        gradients = [(parameter, parameter.grad) for parameter in self._net.parameters()]
        known, put_back_optimizer = remember(self._net), _remembered(self._optimizer)

        def put_back_gradients() -> None:
            for parameter, gradient in gradients:
                parameter.grad = gradient

        # Kernels that were recorded have not run: parameters whose versions moved hold what they held.
        put_back = partial(known.put_back, in_place=False)
        self._undo = [put_back, put_back_optimizer, put_back_gradients, self._random.put_back]
        self._prepare()
        self._before = Watch(self._net, self._optimizer)
        self._on_cpu = [(name, tensor, tensor._version) for name, tensor in self._cpu_tensors()]

    def keep(self) -> None:
        """Accept the attempt, and watch from now on.

        Raises
        ------
        ParallelError
            If the step did in Python, or on the CPU, what a replay would not do.
        """
        if self._random.torch_moved() or self._random.foreign_moved():
            raise ParallelError(
                "the step draws random numbers on the CPU (torch's, Python's or NumPy's generator), and every replay "
                "would use the same ones; draw them on the device"
            )
        for name, tensor, version in self._on_cpu:
            if tensor._version != version:
                raise ParallelError(
                    f"the step changes {name} on the CPU, which a replay does not; keep it on the device"
                )
        now = Watch(self._net, self._optimizer)
        self._before.recorded(now)
        self._watch = now

    def put_back(self) -> None:
        """Undo the attempt."""
        for undo in self._undo:
            undo()
        self._undo, self._watch = [], None

    def done(self) -> None:
        """Forget what an attempt would be undone with."""
        self._undo = []

    def change(self) -> str | None:
        """Name what is not as it was when the step was recorded, or None."""
        return None if self._watch is None else self._watch.change()

    def _cpu_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in _tensors(self._net):
            if tensor.device.type == "cpu" and not tensor.is_inference():
                yield name, tensor
        if self._optimizer is not None:
            for state in self._optimizer.state.values():
                for name, value in state.items():
                    if isinstance(value, Tensor) and value.device.type == "cpu":
                        yield f"the optimizer's {name}", value


def _held(net: nn.Module, optimizer: Optimizer | None) -> Iterator[_Held]:
    for path, module in net.named_modules():
        if is_scripted(module):
            continue
        where = f"{path}." if path else ""
        yield _Held.of(where, vars(module))
        for registry in FOLLOWED:
            yield _Held.of(where, getattr(module, registry))
    if optimizer is not None:
        for group in optimizer.param_groups:
            yield _Held.of("the optimizer's ", group)
        for state in optimizer.state.values():
            yield _Held.of("the optimizer's ", state)


def _own(optimizer: Optimizer | None) -> tuple[Any, ...]:
    return (len(optimizer.param_groups), optimizer.param_groups, optimizer.state) if optimizer is not None else ()


def _tensors(net: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from net.named_parameters()
    yield from net.named_buffers()


def _remembered(optimizer: Optimizer | None) -> Callable[[], None]:
    """Note an optimizer's settings and state; return the function that puts them back."""
    if optimizer is None:
        return lambda: None
    own, groups = optimizer.param_groups, [(group, dict(group)) for group in optimizer.param_groups]
    states = {
        parameter: {name: (value, _value(value)) for name, value in state.items()}
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


def _value(value: Any) -> Tensor | None:
    """Return what a tensor on the CPU holds: those on the device are not changed while kernels are recorded."""
    return value.clone() if isinstance(value, Tensor) and value.device.type == "cpu" else None


CONTAINERS = frozenset({list, dict, set, tuple})


def _leaves(value: Any) -> list[Any]:
    """Return what a container holds, nested as it likes."""
    found: list[Any] = []
    members = chain.from_iterable(value.items()) if type(value) is dict else value
    for member in members:
        if type(member) in CONTAINERS:
            found += _leaves(member)
        else:
            found.append(member)
    return found


def _differences(old: Any, new: Any) -> Iterator[tuple[Any, Any]]:
    """Return what differs of two values, or of what two containers of one length hold."""
    if type(old) is type(new) and type(old) in CONTAINERS:
        ours, theirs = _leaves(old), _leaves(new)
        if len(ours) == len(theirs):
            yield from (pair for pair in zip(ours, theirs, strict=True) if not _equal(*pair))
            return
    if not _equal(old, new):
        yield old, new


def _equal(old: Any, new: Any) -> bool:
    return old is new or (type(old) is type(new) and type(old) in PLAIN and old == new)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
