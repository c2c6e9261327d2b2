"""Mark functions whose calls of torch functions a mode does not see: compiled functions."""

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["is_opaque", "opaque"]

Function = TypeVar("Function", bound=Callable[..., Any])


def opaque(function: Function) -> Function:
    """Mark a function or method as opaque to ``TorchFunctionMode``."""
    function.is_opaque = True  # type: ignore[attr-defined]
    return function


def is_opaque(function: Any) -> bool:
    """Return whether a function, as a mode receives it, is marked as opaque."""
    return getattr(function, "is_opaque", False) is True
