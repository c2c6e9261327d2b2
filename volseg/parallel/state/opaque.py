"""Functions in which those of torch that they call are not seen: compiled ones."""

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["is_opaque", "opaque"]

Function = TypeVar("Function", bound=Callable[..., Any])


def opaque(function: Function) -> Function:
    """Mark a function, or a method, as one that ``TorchFunctionMode`` cannot look into."""
    function.is_opaque = True  # type: ignore[attr-defined]
    return function


def is_opaque(function: Any) -> bool:
    """Say whether a function, as a mode gets it, is marked so."""
    return getattr(function, "is_opaque", False) is True
