"""Load weights into a network whose tensors may have several names.

A network that registers a module twice (MONAI's DynUNet), or ties two parameters, has one tensor under several names in
its ``state_dict`` and under one name in ``named_parameters()``. Averaged weights are stored under the latter names. So
the names do not tell which entries of a ``state_dict`` an average replaces. The network's own tensors do.

`transfer_weights` initialises one network with the weights of another: matching tensors are copied, heads keep their
initial weights, stems are adapted. Heads and stems are not guessed from names, but recognised by shapes that depend on
the number of outputs and of channels. So any network that is built from these two numbers can be initialised this way.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from volseg.errors import CheckpointError

PREFIXES = ("module.", "model.", "network.", "_orig_mod.")
"""Prefixes of all names in wrapped networks: DataParallel, Lightning and many scripts, torch.compile."""


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A parameter or buffer of a network, with all of its names."""

    tensor: Tensor
    names: list[str] = field(default_factory=list)
    """Names in the network's ``state_dict``; empty if a hook puts another tensor there."""
    parameter_names: list[str] = field(default_factory=list)
    """Names in ``named_parameters``, usually the same; empty for a buffer."""


def list_tensors(network: nn.Module) -> list[NamedTensor]:
    """Return each tensor of a network once: its parameters, and the buffers in its ``state_dict``.

    Examples
    --------
    >>> layer = nn.Linear(2, 2, bias=False)
    >>> [tensor.names for tensor in list_tensors(nn.Sequential(layer, layer))]
    [['0.weight', '1.weight']]
    """
    parameters = dict(network.named_parameters(remove_duplicate=False))
    found: dict[int, NamedTensor] = {}
    for name, value in network.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):  # a hook of the network may store a copy of a parameter under its name
            tensor = parameters.get(name, value)
            found.setdefault(id(tensor), NamedTensor(tensor)).names.append(name)
    for name, parameter in parameters.items():
        found.setdefault(id(parameter), NamedTensor(parameter)).parameter_names.append(name)
    return [*found.values()]


def resolve_weights(
    network: nn.Module, values: Mapping[str, Any], average: Mapping[str, Tensor] | None = None
) -> dict[str, Any]:
    """Return weights with the same value under all names of each tensor of the network.

    Parameters
    ----------
    network : nn.Module
        The network that the weights are for. It does not change.
    values : mapping
        A ``state_dict`` of this network or another one. Names that the network does not have stay unchanged.
    average : mapping, optional
        Averages of parameters, each under one of its names. They replace the values. Buffers have no average.

    Raises
    ------
    CheckpointError
        If two names of one tensor have different values, if some parameters have an average and others do not, or if
        a value is not a dense tensor of the network's kind of number.
    """
    resolved: dict[str, Any] = copy.copy(values)  # type: ignore[arg-type]  # keeps the attribute _metadata
    for one in list_tensors(network):
        value = get_tensor(values, one.names, one.tensor)
        if average is not None and one.parameter_names:
            averaged = get_tensor(average, one.parameter_names, one.tensor)
            if (value is None) != (averaged is None):
                what = "no average" if averaged is None else "only an average"
                raise CheckpointError(
                    f"the weights have {what} of the parameter {one.parameter_names[0]}; in the trained network, it "
                    "had another name or was a buffer. Build the network as it was trained"
                )
            value = averaged
        if isinstance(value, Tensor) and value.is_floating_point():
            value = value.to(one.tensor.dtype)  # torch cannot compute with floats of eight bits
        if value is not None:
            resolved.update(dict.fromkeys(one.names, value))
    return resolved


def load_weights(network: nn.Module, values: Mapping[str, Any], average: Mapping[str, Tensor] | None = None) -> None:
    """Load weights of the same network, resolved by `resolve_weights`.

    Raises
    ------
    CheckpointError
        If the weights are of another network, or `resolve_weights` refuses them.
    """
    resolved = resolve_weights(network, values, average)
    try:
        network.load_state_dict(resolved)
    except (KeyError, RuntimeError) as fault:
        raise CheckpointError(f"the weights are not of this network: {fault}") from fault
    copy_parameters(network, resolved)


def copy_parameters(network: nn.Module, values: Mapping[str, Any]) -> None:
    """Copy the values of parameters again, since a buffer that is a view of a parameter may have overwritten some."""
    with torch.no_grad():
        for one in list_tensors(network):
            if one.parameter_names and one.names:
                one.tensor.copy_(values[one.names[0]])


def strip_prefixes(values: Mapping[str, Any], known: Iterable[str]) -> Mapping[str, Any]:
    """Return weights without the prefixes that all names share, if more names are then ``known``.

    Examples
    --------
    >>> strip_prefixes({"module.model.head.bias": 0}, ["head.bias"])
    {'head.bias': 0}
    >>> strip_prefixes({"model.head.bias": 0}, ["model.head.bias"])
    {'model.head.bias': 0}
    """
    known, best, bare = {*known}, values, values
    while bare and (prefix := next((one for one in PREFIXES if all(str(name).startswith(one) for name in bare)), None)):
        bare = {name.removeprefix(prefix): value for name, value in bare.items()}
        if len(known & bare.keys()) > len(known & best.keys()):
            best = bare
    return best


def get_tensor(values: Mapping[str, Any], names: Iterable[str], tensor: Tensor) -> Any:
    """Return the value of a network's tensor under any of its names in ``values``; None if there is none.

    Raises
    ------
    CheckpointError
        If the names have different values, or a value is not a dense tensor of the network's kind of number.
    """
    given = [name for name in names if name in values]
    for name in given:
        if isinstance(value := values[name], Tensor):
            _require_kind(name, value, tensor)
    for name in given[1:]:
        if not _are_equal(values[given[0]], values[name]):
            raise CheckpointError(
                f"{given[0]} and {name} are two names of one tensor of the network, but the weights have different "
                "values for them. Save the weights again from the trained network: volseg export, or "
                "torch.save(network.state_dict(), FILE)"
            )
    return values[given[0]] if given else None


def _require_kind(name: str, value: Tensor, tensor: Tensor) -> None:
    """Raise if torch cannot copy a value into the network's tensor, or would discard part of the value."""
    form = "quantised" if value.is_quantized else "without values" if value.is_meta else str(value.layout)
    is_dense = form == str(torch.strided) and not value.is_nested
    if is_dense and value.shape != tensor.shape and value.nbytes > value.untyped_storage().nbytes():
        is_dense, form = False, f"expanded to {value.nbytes} bytes"  # a copy would need as many bytes
    has_fraction, needs_fraction = (one.is_floating_point() or one.is_complex() for one in (value, tensor))
    if is_dense and has_fraction >= needs_fraction and value.is_complex() <= tensor.is_complex():
        return
    kinds = [str(one.dtype).removeprefix("torch.") for one in (value, tensor)]
    raise CheckpointError(
        f"{name} is {kinds[0]}{'' if is_dense else f' ({form})'}, but the network needs {kinds[1]}. Save dense "
        "floating-point weights: convert sparse tensors with to_dense(), and save a quantised network before its "
        "quantisation"
    )


def _are_equal(one: Any, other: Any) -> bool:
    """Return whether two values have the same bits. NaN equals itself here; other code refuses it."""
    if one is other or not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return one is other
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return torch.equal(*(value.contiguous().view(-1).view(torch.uint8) for value in (one, other)))


Dims = Mapping[str, frozenset[int]]
"""Names of tensors, with the dims whose size depends on a number."""


@dataclass(frozen=True, kw_only=True)
class WeightTransfer:
    """Outcome for each tensor of a network that was initialised with other weights."""

    taken: tuple[str, ...]
    """Tensors copied unchanged."""
    adapted: tuple[str, ...]
    """First convolutions, adapted to another number of channels."""
    new: tuple[str, ...]
    """Tensors that keep their initial values: heads, and without ``strict`` all tensors that did not fit."""
    left: tuple[str, ...]
    """Weights without a tensor in the network."""


def trace_dependent_dims(build: Callable[[int], nn.Module], number: int) -> Dims:
    """Return the tensors with shapes that depend on a number, by building the network with another number.

    Parameters
    ----------
    build : callable
        Maps the number, of channels or of outputs, to the network.
    number : int
        Number of the actual network.

    Raises
    ------
    CheckpointError
        If the network cannot be built with another number.
    """
    shapes = _shapes_of(build(number))
    for other in (number + 1, 2 * number, 1, 2, 4):
        if other == number:
            continue
        try:
            others = _shapes_of(build(other))
        except Exception:  # noqa: S112 - a network may accept only some numbers, and raise any error
            continue
        return {
            name: frozenset(dim for dim in range(len(shape)) if shape[dim] != others[name][dim])
            for name, shape in shapes.items()
            if name in others and len(others[name]) == len(shape) and others[name] != shape
        }
    raise CheckpointError(
        f"the weights that depend on the number of channels or labels ({number}) cannot be found, since the network "
        "cannot be built with another number; set training.start_strict to false"
    )


def transfer_weights(
    network: nn.Module,
    weights: Mapping[str, Any],
    average: Mapping[str, Tensor] | None = None,
    *,
    stems: Dims,
    heads: Dims,
    renew_heads: bool = False,
    strict: bool = True,
) -> WeightTransfer:
    """Initialise ``network`` with ``weights``, in place.

    A first convolution for another number of channels gets the mean of its weights over the old channels, times the
    ratio of the old to the new number: the output for an image with equal channels stays the same.

    Parameters
    ----------
    network : nn.Module
        Newly initialised network.
    weights, average : mapping
        A ``state_dict``, and the averages of its parameters, if any; see `resolve_weights`.
    stems, heads : mapping
        Tensors that depend on the number of channels, and of outputs; see `trace_dependent_dims`.
    renew_heads : bool
        Keep the initial heads even if the weights fit, since the labels have another meaning.
    strict : bool
        Refuse weights if other tensors are missing, unused, or of another shape.

    Raises
    ------
    CheckpointError
        For weights that do not fit, with their names and shapes, or that are not finite.
    """
    taken, adapted, new, faults = list[str](), list[str](), list[str](), list[str]()
    state, weights = network.state_dict(), resolve_weights(network, weights, average)
    values: dict[str, Any] = {}
    for name, tensor in state.items():
        value = weights.get(name)
        if not isinstance(tensor, Tensor):  # another value in a network's state
            if name in weights:
                taken.append(name)
                values[name] = value
            continue
        if not isinstance(value, Tensor):
            new.append(name)
            if name not in heads:
                faults.append(f"{name} {_sides(tensor)} is missing")
            continue
        differ = _compare(tensor, value)
        follows = heads.get(name, frozenset()) | stems.get(name, frozenset())
        is_other_head = differ is not None and frozenset() < differ <= follows
        if name in heads and (renew_heads or is_other_head):
            new.append(name)
        elif differ == frozenset():
            taken.append(name)
            values[name] = value
        elif stems.get(name) == differ == frozenset({1}) and tensor.ndim > 2:
            adapted.append(name)
            values[name] = value.mean(1, keepdim=True).expand_as(tensor) * (value.shape[1] / tensor.shape[1])
        else:
            new.append(name)
            if differ is None or not differ <= stems.get(name, frozenset()):
                faults.append(f"{name} is {_sides(value)}, but {_sides(tensor)} in the network")
    left = sorted(weights.keys() - state.keys())
    faults += [f"{name} is not in the network" for name in left]
    _require_enough(faults if strict else [], values)
    state.update(values)
    network.load_state_dict(state)
    copy_parameters(network, state)
    return WeightTransfer(taken=tuple(taken), adapted=tuple(adapted), new=tuple(new), left=tuple(left))


def _require_enough(faults: Sequence[str], values: Mapping[str, Any]) -> None:
    if faults:
        more = f", and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise CheckpointError(
            f"the weights are not of this network: {'; '.join(faults[:5])}{more}. Name the network that they were "
            "trained with, or set training.start_strict to false to use only those that fit"
        )
    if not values:
        raise CheckpointError("none of the weights fit this network; name the network that they were trained with")
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    if odd := [name for name, value in tensors.items() if value.is_floating_point() and not value.isfinite().all()]:
        raise CheckpointError(f"the weights have values that are not finite, first in {odd[0]}; use another checkpoint")


def _shapes_of(network: nn.Module) -> dict[str, tuple[int, ...]]:
    state = network.state_dict()
    return {name: tuple(value.shape) for name, value in state.items() if isinstance(value, Tensor)}


def _compare(one: Tensor, other: Tensor) -> frozenset[int] | None:
    """Return the dims in which two tensors differ; None if their numbers of dims differ."""
    if one.ndim != other.ndim:
        return None
    return frozenset(dim for dim in range(one.ndim) if one.shape[dim] != other.shape[dim])


def _sides(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a number"
