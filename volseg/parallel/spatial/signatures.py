"""Bind a call's arguments to torch's own names, in whatever form they were passed.

torch takes an argument by position, by keyword, by NumPy's name for it (``axis``, ``keepdims``, ``x1``), and the last
integers of some methods one by one (``x.permute(0, 2, 1)``). A handler that reads ``args[1]`` or ``kwargs["dim"]``
silently misses all other forms. So each call is first bound to the function's signature: torch's operator schemas for
compiled functions, Python's own signatures for others.

The binding depends on the function, on the passed arguments and on their types; it is computed once for each of these
and cached.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from numbers import Number
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from volseg.device.torch_internals import find_schemas

NUMPY: dict[str, tuple[str, ...]] = {"axis": ("dim",), "keepdims": ("keepdim",), "x2": ("other",)}
"""torch's table of NumPy's names (``numpy_compatibility_arg_names`` in python_arg_parser.cpp)."""
NUMPY |= dict.fromkeys(("x", "a", "x1"), ("self", "input"))

CANONICAL = {"self": "input", "tensor": "input", "split_size_or_sections": "split_size", "split_sizes": "split_size"}
CANONICAL |= {"train": "training", "indices": "index", "element": "elements", "test_element": "test_elements"}
CANONICAL |= dict.fromkeys(("mat", "mat1", "batch1"), "first") | dict.fromkeys(
    ("mat2", "batch2", "vec", "vec2"), "other"
)
"""One name for arguments that torch's functions and methods name differently."""

OPERATOR_OF = {
    name: name
    for name in ("abs", "add", "div", "eq", "ge", "gt", "le", "lt", "matmul", "mul", "ne", "neg", "pos", "pow", "sub")
} | {
    "and": "bitwise_and",
    "floordiv": "floor_divide",
    "invert": "bitwise_not",
    "lshift": "bitwise_left_shift",
    "mod": "remainder",
    "or": "bitwise_or",
    "rshift": "bitwise_right_shift",
    "truediv": "div",
    "xor": "bitwise_xor",
}
"""Python's operators, and torch's names for them."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One argument of a torch function.

    ``type`` is that of torch's schema; ``Any`` takes all values.
    """

    name: str
    type: str
    default: Any
    keyword_only: bool

    @property
    def canonical(self) -> str:
        """Name by which handlers know the argument."""
        return CANONICAL.get(self.name, self.name)


@dataclass(frozen=True, slots=True)
class Binding:
    """Map of one form of a call: the name of each value; the last positional values may form one sequence.

    ``defaults`` are torch's defaults of the arguments of this form.
    """

    names: tuple[str, ...]
    gathered_from: int | None
    defaults: dict[str, Any]

    def __call__(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments that were passed, by name."""
        if self.gathered_from is not None:
            args = (*args[: self.gathered_from], args[self.gathered_from :])
        if kwargs:
            return dict(zip(self.names, (*args, *kwargs.values()), strict=True))
        return dict(zip(self.names, args, strict=True))


def bind(func: Callable, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that were passed to ``func``, by torch's names for them.

    Raises
    ------
    TypeError
        If the function takes no such arguments.
    """
    return binding_of(func, args, kwargs)(args, kwargs)


def binding_of(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Binding:
    """Return the binding of a call's form; raises as ``bind`` does."""
    form = (func, *map(type, args), *kwargs, *map(type, kwargs.values())) if kwargs else (func, *map(type, args))
    binding = BINDINGS.get(form)
    if binding is None:
        if len(BINDINGS) >= MOST_BINDINGS:
            BINDINGS.clear()
        binding = BINDINGS[form] = _binding(func, args, kwargs)
    return binding


BINDINGS: dict[tuple, Binding] = {}
MOST_BINDINGS = 10_000


def _binding(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Binding:
    if isinstance(func, FunctionType):
        python_signature(func).bind(*args, **kwargs)  # raises Python's own TypeError
    # First in the given form; then with a number in place of a tensor, which some functions accept.
    for loose in (False, True):
        for parameters in _forms(func):
            found = _fit(parameters, args, kwargs, loose)
            if found is not None:
                return found
    given = ", ".join([*(type(a).__name__ for a in args), *(f"{k}={type(v).__name__}" for k, v in kwargs.items())])
    raise TypeError(f"{getattr(func, '__name__', func)}() takes no such arguments: ({given})")


@cache
def python_signature(func: FunctionType) -> inspect.Signature:
    """Return the signature of a function written in Python; poolings choose between two with the same arguments."""
    signature = inspect.signature(func)
    if tuple(signature.parameters) != ("args", "kwargs"):
        return signature
    return inspect.signature(getattr(F, f"{func.__name__}_with_indices"))


def operator_name(func: Callable) -> str:
    """Return the name of the operator that a compiled function or method calls."""
    name = str(getattr(func, "__name__", ""))
    if not (name.startswith("__") and name.endswith("__")):
        return name
    bare = name.strip("_")
    for prefix, suffix in (("i", "_"), ("r", ""), ("", "")):
        if bare.startswith(prefix) and bare.removeprefix(prefix) in OPERATOR_OF:
            return OPERATOR_OF[bare.removeprefix(prefix)] + suffix
    return name


@cache
def _forms(func: Callable) -> tuple[tuple[Parameter, ...], ...]:
    """Return the parameters of every form of a function that takes tensors; one written in Python has one form."""
    if isinstance(func, FunctionType):
        own = python_signature(func).parameters.values()
        defaults = [NOTHING if p.default is p.empty else p.default for p in own]
        pairs = zip(own, defaults, strict=True)
        return (tuple(Parameter(p.name, "Any", default, p.kind is p.KEYWORD_ONLY) for p, default in pairs),)
    found = []
    for schema in _raw_schemas(func):
        parameters = tuple(
            Parameter(a.name, str(a.type), a.default_value if a.has_default_value() else NOTHING, a.kwarg_only)
            for a in schema.arguments
        )
        if any("Tensor" in p.type for p in parameters):
            found.append(parameters)
    # Forms that write to out= come last: their arguments are those of another form, and out.
    return tuple(sorted(found, key=lambda parameters: any(p.name == "out" for p in parameters)))


@cache
def _raw_schemas(func: Callable) -> tuple[Any, ...]:
    return tuple(find_schemas(f"aten::{operator_name(func)}"))


@cache
def returns_view(func: Callable) -> bool:
    """Return whether a compiled function may return its argument's memory under another shape."""
    return any(
        result.alias_info is not None and not result.alias_info.is_write
        for schema in _raw_schemas(func)
        for result in schema.returns
        if not isinstance(func, FunctionType)
    )


@cache
def writes(func: Callable) -> bool:
    """Return whether a compiled function changes its first argument in every form of call."""
    if func is Tensor.__setitem__:  # it has no schema
        return True
    schemas = [s for s in _raw_schemas(func) if any("Tensor" in str(a.type) for a in s.arguments)]
    # A keyword argument that is written is out=, under any name (``max`` takes ``max=`` and ``max_values=``).
    own = [a for s in schemas for a in s.arguments if not a.kwarg_only]
    # TorchScript sorts lists of tensors in place, under the name of ``torch.sort``.
    return any(a.alias_info is not None and a.alias_info.is_write and "List" not in str(a.type) for a in own)


NOTHING: Any = object()
"""The default of an argument that must be passed."""


def _fit(parameters: Sequence[Parameter], args: tuple, kwargs: dict[str, Any], loose: bool) -> Binding | None:
    positional = [parameter for parameter in parameters if not parameter.keyword_only]
    # x.permute(0, 2, 1): torch takes integers one by one for the last positional argument of a method.
    sequence = len(positional) >= 2 and positional[1].type == "List[int]"
    one_by_one = len(args) > 1 and all(isinstance(value, int) for value in args[1:])
    gathered = None
    if sequence and one_by_one and (len(positional) == 2 or len(args) > len(positional)):
        gathered, args = 1, (args[0], list(args[1:]))
    if len(args) > len(positional):
        return None
    names = [parameter.name for parameter in positional[: len(args)]]
    known = {parameter.name: parameter for parameter in parameters}
    for name in kwargs:
        if name == "out" and kwargs[name] is None:
            names.append("out")
            continue
        own = next((n for n in (name, *NUMPY.get(name, ())) if n in known), None)
        if name == "input" and own is None and "self" in known:
            own = "self"
        if own is None or own in names:
            return None
        names.append(own)
    # out=None equals no out.
    values = {n: v for n, v in zip(names, (*args, *kwargs.values()), strict=True) if (n, v) != ("out", None)}
    if any(p.default is NOTHING and p.name not in values for p in parameters):
        return None
    if not all(_accepts(known[name].type, value, loose) for name, value in values.items()):
        return None
    canonical = tuple(known[name].canonical if name in known else name for name in names)
    if len(set(canonical)) != len(canonical):  # dot(self, tensor)
        canonical = tuple(names)
    defaults = {p.canonical: p.default for p in parameters if p.default is not NOTHING}
    return Binding(canonical, gathered, defaults | {"out": None})


def _accepts(kind: str, value: Any, loose: bool) -> bool:
    if value is None:
        return kind.startswith("Optional[") or kind in ("List[int]", "Any")
    if kind.startswith("Optional["):
        return _accepts(kind.removeprefix("Optional[").removesuffix("]"), value, loose)
    if kind == "Tensor":
        return isinstance(value, Tensor) or (loose and isinstance(value, Number))
    if kind == "List[Tensor]" or kind == "List[Optional[Tensor]]":
        return isinstance(value, Sequence) and all(v is None or isinstance(v, Tensor) for v in value)
    if kind == "List[int]":
        return _is_integer(value, loose) or (isinstance(value, Sequence) and not isinstance(value, str))
    if kind == "int":
        constants = torch.dtype, torch.layout, torch.memory_format
        return _is_integer(value, loose) or isinstance(value, constants)
    if kind in ("number", "float", "Scalar"):
        return isinstance(value, Number) or (loose and isinstance(value, Tensor) and value.ndim == 0)
    if kind == "List[str]":
        return isinstance(value, Sequence) and all(isinstance(v, str) for v in value)
    plain: dict[str, Any] = {"bool": bool, "str": str, "Device": (torch.device, str, int), "Generator": torch.Generator}
    return isinstance(value, plain[kind]) if kind in plain else True


def _is_integer(value: Any, loose: bool) -> bool:
    if isinstance(value, Tensor):
        return loose and value.ndim == 0 and not value.dtype.is_floating_point
    return isinstance(value, int | torch.SymInt) and not isinstance(value, bool)
