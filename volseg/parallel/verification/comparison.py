"""Observe the named values after training steps, and compute the largest errors between two observations.

An observation is a dictionary: ``output 0``, ``input 0`` (its gradient), ``input 0 after the call``,
``gradient of PARAMETER``, ``step of PARAMETER`` (its value after the optimizer's step), ``buffer NAME``,
``attribute NAME`` (counters, lists and the like that ``forward`` may change, and each module's mode).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from volseg.device.torch_internals import tree_flatten, tree_leaves, tree_map
from volseg.parallel.model_parallel import ModelParallel
from volseg.parallel.state.module import REGISTRIES

_T = TypeVar("_T")

Values = dict[str, Any]
Step = Callable[[Sequence[Any]], Any]
"""Forward and backward pass on the arguments; returns the outputs."""

TOLERANCE = 1e-9
"""Largest relative error in float64. Round-off through twenty layers stays below 1e-11; a wrong plane or a gradient
counted twice is above 1e-4."""

RATE = 0.05
"""Learning rate of the gradient descent."""

SCALES = {"input": "gradient"}
"""Kinds measured on one scale: the gradient of an input in front of a norm is pure round-off."""


def find_kind(name: str) -> str:
    """Return the first word of a value's name; ``after`` for ``input 0 after the call``."""
    return "after" if " after the call" in name else name.partition(" ")[0]


def default_objective(outputs: Any) -> Tensor:
    """Return a number that depends on every voxel of every output, without symmetry."""
    terms = [
        (output.square().mean() + output.sin().mean()).double()
        for output in tree_leaves(outputs)
        if isinstance(output, Tensor) and output.is_floating_point()
    ]
    # The sum begins with the first term: a zero from the host could not be recorded on a GPU.
    return sum((term.to(terms[0].device) for term in terms[1:]), terms[0]) if terms else torch.zeros(())


def eager_step(call: Callable[..., Any], objective: Callable[[Any], Tensor], gradients: bool = True) -> Step:
    """Return a step that calls the model unchanged; without ``gradients``, as in validation."""

    def step(arguments: Sequence[Any]) -> Any:
        with torch.set_grad_enabled(gradients):
            outputs = call(*arguments)
            loss = objective(outputs)
        if loss.requires_grad:
            loss.backward()
        return outputs

    return step


def observe(model: nn.Module, inputs: Sequence[Any], step: Step, steps: int = 1, leaves: bool = True) -> list[Values]:
    """Take steps of gradient descent on fresh copies of the inputs; return copies of the values after each step.

    Parameters
    ----------
    model, inputs
        The network, plain or parallel, and its arguments.
    step
        Forward and backward of one step.
    steps
        Number of steps.
    leaves
        Whether floating-point inputs require gradients.
    """
    net = find_net(model)
    parameters = list(net.parameters())
    optimizer = torch.optim.SGD(parameters, RATE) if parameters else None
    seen = []
    for _ in range(steps):
        arguments = [_copy_argument(value, leaves) for value in inputs]
        values = _note_call(step(arguments), arguments)
        values |= {f"gradient of {name}": _copy(p.grad) for name, p in net.named_parameters()}
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        values |= {f"buffer {name}": _copy(buffer) for name, buffer in net.named_buffers()}
        values |= {f"step of {name}": _copy(p) for name, p in net.named_parameters()}
        values |= {f"attribute {name}": value for name, value in list_attributes(net)}
        seen.append(values)
    return seen


def observe_call(model: nn.Module, inputs: Sequence[Any]) -> Values:
    """Return the outputs, inputs and buffers after a call without gradients."""
    arguments = [_copy_argument(value, False) for value in inputs]
    with torch.no_grad():
        values = _note_call(model(*arguments), arguments)
    return values | {f"buffer {name}": _copy(buffer) for name, buffer in model.named_buffers()}


def _note_call(outputs: Any, arguments: Sequence[Any]) -> Values:
    found, structure = tree_flatten(outputs)
    values: Values = {"output structure": str(structure)}
    values |= {f"output {index}": _copy(leaf) for index, leaf in enumerate(found)}
    tensors = {index: value for index, value in enumerate(arguments) if isinstance(value, Tensor)}
    values |= {f"input {index}": _copy(value.grad) for index, value in tensors.items()}
    return values | {f"input {index} after the call": _copy(value) for index, value in tensors.items()}


def find_net(model: nn.Module) -> nn.Module:
    """Return the plain network inside a parallel one, or the network itself."""
    return model.module if isinstance(model, ModelParallel) else model


def _copy_argument(value: Any, leaves: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    copied = value.detach().clone()
    return copied.requires_grad_(leaves) if copied.is_floating_point() else copied


def whole(value: Any) -> Any:
    """Return a sharded volume as one tensor; return any other value unchanged."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _copy(value: Any) -> Any:
    """Return a copy on the host; a sharded volume is gathered."""
    value = whole(value)
    # A copy even on the host: the next step overwrites parameters, buffers and, if recorded, outputs.
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def list_attributes(net: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the plain values and tensors that modules hold outside of the registries of ``nn.Module``."""
    registered = set(net.modules())
    for path, module in net.named_modules():
        own = vars(module)
        # A wrapper that shares the registries of its inner network (FitGrid) hides the attributes of that network.
        hidden = [item for item in own.values() if isinstance(item, nn.Module) and item not in registered]
        for part in (module, *hidden):
            for name, value in vars(part).items():
                if name not in REGISTRIES or name == "training":
                    yield from _plain(f"{path}.{name}" if path else name, value)


def _plain(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Tensor):
        yield name, _copy(value)
    elif value is None or isinstance(value, bool | int | float | str):
        yield name, value
    elif isinstance(value, set | frozenset):
        yield name, sorted(map(repr, value))
    elif isinstance(value, dict | list | tuple):
        yield f"len({name})", len(value)
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _plain(f"{name}[{key!r}]", item)


@dataclass(frozen=True)
class Difference:
    """Differences between two observations."""

    errors: dict[str, float] = field(default_factory=dict)
    """Largest relative error by name; NaN if no number can be computed, with an entry in ``reasons``."""
    reasons: dict[str, str] = field(default_factory=dict)
    both_nan: tuple[str, ...] = ()
    """Values that are NaN in the same places on both sides; these count as equal."""
    tolerance: float = TOLERANCE

    @property
    def wrong(self) -> dict[str, float]:
        """Errors above the tolerance; NaN counts as above."""
        return {name: error for name, error in self.errors.items() if not error <= self.tolerance}


class _Differs(Exception):  # noqa: N818  (a result, not a fault)
    """Two values cannot be subtracted; the message gives the reason."""


def compare_values(
    theirs: Values, ours: Values, ignored: frozenset[str] = frozenset(), tolerance: float = TOLERANCE
) -> Difference:
    """Compare with the plain network's values (``theirs``); leave out gradients that neither side has.

    A tensor much smaller than its peers (a bias before a norm) is measured on their scale.
    """
    sizes = {name: _size(value) for name, value in theirs.items()}
    scales: dict[str, float] = {}
    for name, size in sizes.items():
        scales[_find_scale(name)] = max(scales.get(_find_scale(name), 0.0), size if math.isfinite(size) else 0.0)
    errors, reasons, both_nan = {}, {}, []
    for name in dict.fromkeys((*theirs, *ours)):
        absent = theirs.get(name) is None and ours.get(name) is None
        if name in ignored or (absent and find_kind(name) in ("input", "gradient")):
            continue
        try:
            if name not in ours or name not in theirs:
                raise _Differs(f"only {'ours' if name in ours else 'the plain network'} has it")
            errors[name] = _error(ours[name], theirs[name], sizes[name], scales[_find_scale(name)])
        except _Differs as difference:
            errors[name], reasons[name] = math.nan, str(difference)
            continue
        if math.isnan(sizes[name]):
            both_nan.append(name)
    return Difference(errors, reasons, tuple(both_nan), tolerance)


def _find_scale(name: str) -> str:
    return SCALES.get(find_kind(name), find_kind(name))


def _size(value: Any) -> float:
    """Return the largest absolute value: NaN if there is a NaN, 0 for a value that is not a tensor."""
    if not isinstance(value, Tensor) or not value.numel():
        return 0.0
    return float(torch.linalg.vector_norm(_numbers(value), math.inf))


def _numbers(value: Tensor) -> Tensor:
    """Return the values in float64."""
    return (torch.view_as_real(value.resolve_conj()) if value.is_complex() else value).double()


def _error(ours: Any, theirs: Any, size: float, scale: float) -> float:
    """Return the largest relative error."""
    if isinstance(ours, float) and isinstance(theirs, float):
        ours, theirs = torch.tensor(ours, dtype=torch.float64), torch.tensor(theirs, dtype=torch.float64)
        size = _size(theirs)
    if not isinstance(ours, Tensor) or not isinstance(theirs, Tensor):
        if type(ours) is type(theirs) and ours == theirs:
            return 0.0
        raise _Differs(f"{_tell(ours)}, where the plain network has {_tell(theirs)}")
    for what in ("shape", "dtype"):
        if getattr(ours, what) != getattr(theirs, what):
            raise _Differs(f"{what} {getattr(ours, what)}, where the plain network has {getattr(theirs, what)}")
    if torch.equal(ours, theirs):  # False with NaN
        return 0.0
    a, b = _numbers(ours), _numbers(theirs)
    distance = a - b
    largest = _size(distance)
    if not math.isfinite(largest):
        finite = a.isfinite() & b.isfinite()
        odd = ~finite & (a != b) & ~(a.isnan() & b.isnan())
        if bool(odd.any()):
            place = tuple(int(index) for index in odd.nonzero()[0])
            raise _Differs(f"{float(a[place])} at {place}, where the plain network has {float(b[place])}")
        largest, size = _size(distance[finite]), _size(b[finite])
    return largest / max(size, 1e-3 * scale, 1e-30)


def _tell(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) < 60 else f"{text[:57]}..."


def name_steps(steps: Sequence[Mapping[str, _T]], first: int = 1) -> dict[str, _T]:
    """Return the values of consecutive steps in one dictionary; names of later steps end with the step's number."""
    return {
        name if number == 1 else f"{name}, step {number}": told
        for number, step in enumerate(steps, first)
        for name, told in step.items()
    }


def join(outputs: Sequence[Any]) -> Any:
    """Concatenate the outputs of micro-batches along the batch."""
    columns = zip(*(tree_leaves(output) for output in outputs), strict=True)
    leaves = iter([
        torch.cat(list(column)) if isinstance(column[0], Tensor) and column[0].dim() else column[0]
        for column in columns
    ])  # fmt: skip
    return tree_map(lambda _: next(leaves), outputs[0])


def order_worst_first(errors: Mapping[str, float]) -> dict[str, float]:
    """Sort errors; NaN is larger than any."""
    return dict(sorted(errors.items(), key=lambda item: -item[1] if item[1] == item[1] else -math.inf))
