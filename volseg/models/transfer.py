"""Weights of one network as the beginning of another: what fits is taken, a head is made anew, a stem is adapted.

Which tensors are heads and stems is not guessed from names: they are those whose shapes follow the number of outputs
and of channels, so any network that is built from these two numbers can be begun so.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from volseg.errors import CheckpointError
from volseg.models.weights import copy_parameters, resolve_weights

__all__ = ["WeightTransfer", "find_followers", "transfer_weights"]

Dims = Mapping[str, frozenset[int]]
"""Names of tensors, and the dims along which their size follows a number."""


@dataclass(frozen=True, kw_only=True)
class WeightTransfer:
    """What became of each tensor of a network that was begun with other weights."""

    taken: tuple[str, ...]
    """As they were."""
    adapted: tuple[str, ...]
    """First convolutions, brought to another number of channels."""
    new: tuple[str, ...]
    """Heads, and with ``strict`` off whatever did not fit: as the network was initialised."""
    left: tuple[str, ...]
    """Of the weights, what the network has no place for."""


def find_followers(build: Callable[[int], nn.Module], number: int) -> Dims:
    """Return which tensors of a network follow a number, by building it with another one.

    Parameters
    ----------
    build : callable
        From the number, of channels or of outputs, to the network.
    number : int
        With which the network in question is built.

    Raises
    ------
    CheckpointError
        If the network can be built with no other number.
    """
    shapes = _shapes_of(build(number))
    for other in (number + 1, 2 * number, 1, 2, 4):
        if other == number:
            continue
        try:
            others = _shapes_of(build(other))
        except Exception:  # noqa: S112 - a network may take certain numbers only, and say so by any error
            continue
        return {
            name: frozenset(dim for dim in range(len(shape)) if shape[dim] != others[name][dim])
            for name, shape in shapes.items()
            if name in others and len(others[name]) == len(shape) and others[name] != shape
        }
    raise CheckpointError(
        f"which weights follow the number {number} of channels or labels cannot be found, as the network is built with "
        "no other; set training.start_strict to false"
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
    """Begin ``network`` with ``weights``, in place.

    A first convolution for other channels gets the mean of its weights over the old ones, times their number over that
    of the new ones: an image whose channels are alike gives what it gave before.

    Parameters
    ----------
    network : nn.Module
        As it was initialised.
    weights, average : mapping
        A ``state_dict``, and the averages of its parameters, if there are any; see `resolve_weights`.
    stems, heads : mapping
        Which tensors follow the number of channels, and of outputs; see `find_followers`.
    renew_heads : bool
        Make heads anew although they fit, because the labels mean something else.
    strict : bool
        Refuse weights of which others are missing, left over, or of another shape.

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
        if not isinstance(tensor, Tensor):  # what else a network keeps in its state
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
                faults.append(f"{name} is {_sides(value)}, the network's is {_sides(tensor)}")
    left = sorted(weights.keys() - state.keys())
    faults += [f"{name} has no place in the network" for name in left]
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
            "trained with, or set training.start_strict to false to begin with those that fit"
        )
    if not values:
        raise CheckpointError("none of the weights fits this network; name the network that they were trained with")
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    if odd := [name for name, value in tensors.items() if value.is_floating_point() and not value.isfinite().all()]:
        raise CheckpointError(
            f"the weights hold values that are not finite, first in {odd[0]}; take another checkpoint"
        )


def _shapes_of(network: nn.Module) -> dict[str, tuple[int, ...]]:
    state = network.state_dict()
    return {name: tuple(value.shape) for name, value in state.items() if isinstance(value, Tensor)}


def _compare(one: Tensor, other: Tensor) -> frozenset[int] | None:
    """Return the dims in which two tensors differ; None where they have not as many."""
    if one.ndim != other.ndim:
        return None
    return frozenset(dim for dim in range(one.ndim) if one.shape[dim] != other.shape[dim])


def _sides(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a number"
