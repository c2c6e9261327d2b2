"""Weights into a network: by the network's tensors, since one tensor may have several names.

A network that registers a module twice (MONAI's DynUNet), or ties two parameters, has one tensor under several names in
its ``state_dict`` and under one name in ``named_parameters()``. An average of weights is kept by the latter names. So
names do not tell which entries of a ``state_dict`` an average replaces; the network's own tensors do.
"""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from volseg.errors import CheckpointError

__all__ = ["NamedTensor", "copy_parameters", "list_tensors", "load_weights", "resolve_weights", "strip_prefixes"]

PREFIXES = ("module.", "model.", "network.", "_orig_mod.")
"""What wrappers of networks put before every name: DataParallel, Lightning and many scripts, torch.compile."""


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A parameter or buffer of a network, and all of its names."""

    tensor: Tensor
    names: list[str] = field(default_factory=list)
    """In the network's ``state_dict``; none if a hook has replaced it there."""
    averaged_as: list[str] = field(default_factory=list)
    """In ``named_parameters``, which mostly are the same; none of a buffer."""


def list_tensors(network: nn.Module) -> list[NamedTensor]:
    """Return each tensor of a network once: its parameters, and the buffers in its ``state_dict``.

    Examples
    --------
    >>> layer = nn.Linear(2, 2, bias=False)
    >>> [tensor.names for tensor in list_tensors(nn.Sequential(layer, layer))]
    [['0.weight', '1.weight']]
    """
    parameters = dict(network.named_parameters(remove_duplicate=False))
    state = network.state_dict(keep_vars=True)
    found: dict[int, NamedTensor] = {}
    for name, value in state.items():
        if isinstance(value, Tensor):  # a hook of the network may put a copy of a parameter under its name
            tensor = parameters.get(name, value)
            found.setdefault(id(tensor), NamedTensor(tensor)).names.append(name)
    for name, parameter in parameters.items():
        found.setdefault(id(parameter), NamedTensor(parameter)).averaged_as.append(name)
    return [*found.values()]


def resolve_weights(
    network: nn.Module, values: Mapping[str, Any], average: Mapping[str, Tensor] | None = None
) -> dict[str, Any]:
    """Return weights in which all names of each of the network's tensors have one value.

    Parameters
    ----------
    network : nn.Module
        That is to get the weights. It does not change.
    values : mapping
        A ``state_dict``, of this network or another one. Names that the network does not have stay as they are.
    average : mapping, optional
        Averages of parameters, each under one of its names. They replace the values; buffers have none.

    Raises
    ------
    CheckpointError
        If two names of one tensor have different values, one of several averaged parameters has no average, or a value
        is no plain number of the kind that the network has: quantised, sparse, complex, or whole numbers for others.
    """
    resolved: dict[str, Any] = copy.copy(values)  # type: ignore[arg-type]  # with its attribute
    for one in list_tensors(network):
        for name in one.names:
            if isinstance(value := values.get(name), Tensor):
                _require_numbers(name, value, one.tensor)
        value = _read_one(values, one.names)
        if average is not None and one.averaged_as:
            averaged = _read_one(average, one.averaged_as)
            if (value is None) != (averaged is None):
                what = "no average" if averaged is None else "an average only"
                raise CheckpointError(
                    f"the weights hold {what} of the parameter {one.averaged_as[0]}, which the network that was "
                    "trained had under another name, or as a buffer. Build the network as it was trained"
                )
            value = averaged
        if isinstance(value, Tensor) and value.is_floating_point() and one.tensor.is_floating_point():
            value = value.to(one.tensor.dtype)  # numbers of eight bits know no arithmetic
        if value is not None:
            resolved.update(dict.fromkeys(one.names, value))
    return resolved


def load_weights(network: nn.Module, values: Mapping[str, Any], average: Mapping[str, Tensor] | None = None) -> None:
    """Load weights of the same network; the parameters are those of `resolve_weights`.

    Raises
    ------
    CheckpointError
        If they are of another network, or the names of one tensor have different values.
    """
    resolved = resolve_weights(network, values, average)
    try:
        network.load_state_dict(resolved)
        if average is not None:
            copy_parameters(network, resolved)
    except (KeyError, RuntimeError) as fault:
        raise CheckpointError(f"the weights are not of this network: {fault}") from fault


def copy_parameters(network: nn.Module, values: Mapping[str, Any]) -> None:
    """Copy values into a network's parameters once more: a buffer that is a view of a parameter has overwritten it."""
    with torch.no_grad():
        for one in list_tensors(network):
            if one.averaged_as and one.names:
                one.tensor.copy_(values[one.names[0]])


def strip_prefixes(values: Mapping[str, Any], known: Iterable[str]) -> Mapping[str, Any]:
    """Return weights without the prefixes that all their names have, where more of the bare names are ``known``.

    Examples
    --------
    >>> strip_prefixes({"module.model.head.bias": 0}, ["head.bias"])
    {'head.bias': 0}
    >>> strip_prefixes({"model.head.bias": 0}, ["model.head.bias"])
    {'model.head.bias': 0}
    """
    known, best, bare = {*known}, values, values
    while prefix := next((one for one in PREFIXES if all(str(name).startswith(one) for name in bare)), None):
        bare = {name.removeprefix(prefix): value for name, value in bare.items()}
        if len(known & bare.keys()) > len(known & best.keys()):
            best = bare
    return best


def _require_numbers(name: str, value: Tensor, tensor: Tensor) -> None:
    """Raise for a value that torch cannot copy into the network's tensor, or copies without its scale or a part."""
    is_plain = value.layout == torch.strided and not (value.is_quantized or value.is_meta or value.is_nested)
    is_less = (value.is_complex() and not tensor.is_complex()) or (
        (tensor.is_floating_point() or tensor.is_complex()) and not (value.is_floating_point() or value.is_complex())
    )
    if not is_plain or is_less:
        kind = str(value.dtype).removeprefix("torch.")
        if not is_plain:
            kind += f" ({'without values' if value.is_meta else 'quantised' if value.is_quantized else value.layout})"
        raise CheckpointError(
            f"{name} holds {kind}, and the network needs {str(tensor.dtype).removeprefix('torch.')}. Save dense "
            "floating-point weights, of a quantised network those from before, of a sparse tensor to_dense()"
        )


def _read_one(values: Mapping[str, Any], names: Iterable[str]) -> Any:
    """Return the value that all given names of one tensor have; None if there is none."""
    first: str | None = None
    for name in names:
        if name not in values:
            continue
        if first is None:
            first = name
        elif not _are_equal(values[first], values[name]):
            raise CheckpointError(
                f"{first} and {name} are two names of one tensor of the network, but the weights hold different values "
                "for them. Save them again from the network that was trained: volseg export, or "
                "torch.save(network.state_dict(), FILE)"
            )
    return None if first is None else values[first]


def _are_equal(one: Any, other: Any) -> bool:
    """Say whether two values are the same, bit by bit: numbers that are none are refused elsewhere, in other words."""
    if one is other or not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return one is other
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    plain = (value.resolve_conj().resolve_neg().contiguous() for value in (one, other))
    return torch.equal(*(value.reshape(-1).view(torch.uint8) for value in plain))
