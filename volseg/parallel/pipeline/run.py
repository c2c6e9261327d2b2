"""Intercept a network's own ``forward``: its torch functions and module calls pass through a ``Run``.

A ``Run`` is a torch-function mode (it sees the functions that ``forward`` calls, above autograd) and the receiver of
the module hooks of ``install_hooks`` (it sees each module call). Subclasses record the calls, measure them, place them
on devices, or capture their kernels. ``forward`` itself is never replaced, reordered or traced into a graph, so skips,
reused modules and functional code need no special case.

The hooks are plain functions without state: copying or saving a network that has them copies no run.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Self, TypeAlias
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from volseg.device.module_internals import HOOK_FLAGS, HOOKS, get_forward_pre_hooks
from volseg.device.torch_internals import is_transformed, unwrap_transformed
from volseg.parallel.state.module import read_version

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]

_active = threading.local()

latecomers: "WeakKeyDictionary[nn.Module, ref[Any]]" = WeakKeyDictionary()
"""Run for a placed module that is called outside its network's forward: by the recomputation of
``torch.utils.checkpoint`` during backward, or by a direct call of a submodule."""

# These queries need no data, so the tensor may stay where it is.
_QUESTIONS = frozenset(
    (
        *("size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset", "dim_order"),
        *("is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_pinned", "is_shared", "is_inference"),
        *("is_tensor", "is_storage", "is_same_size", "is_set_to", "is_nonzero", "is_grad_enabled", "get_device"),
        *("data_ptr", "untyped_storage", "record_stream", "requires_grad_", "retain_grad", "register_hook"),
        *("register_post_accumulate_grad_hook", "backward", "grad", "detach_", "result_type", "can_cast", "item"),
        *("tolist", "numpy", "get_default_dtype", "__len__", "__hash__", "__repr__", "__format__", "__bool__"),
        *("__int__", "__float__", "__index__", "__contains__", "__dir__", "__reduce_ex__", "__deepcopy__"),
    )
)


@cache
def keeps_place(function: Callable[..., Any]) -> bool:
    """Return whether ``function`` only queries its tensors, or reads an attribute."""
    name = getattr(function, "__name__", "")
    return name in _QUESTIONS or name in ("__get__", "__set__", "__delete__")


def iterate_tensors(values: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists and dictionaries."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, tuple | list):
        for value in values:
            yield from iterate_tensors(value)
    elif isinstance(values, dict):
        for value in values.values():
            yield from iterate_tensors(value)


def map_tensors(function: Callable[[Tensor], Tensor], values: Any) -> Any:
    """Apply ``function`` to the tensors in plain tuples, lists and dictionaries; keep other values."""
    if isinstance(values, Tensor):
        return function(values)
    kind = type(values)
    if kind is tuple or kind is list:
        return kind([map_tensors(function, value) for value in values])
    if kind is dict:
        return {key: map_tensors(function, value) for key, value in values.items()}
    if isinstance(values, tuple) and hasattr(values, "_fields"):
        return kind(*(map_tensors(function, value) for value in values))
    return values


def unwrap(tensor: Tensor) -> Tensor:
    """Return the tensor inside a wrapper of ``torch.func`` or ``torch.vmap``."""
    while is_transformed(tensor):
        tensor = unwrap_transformed(tensor)
    return tensor


def list_changed_tensors(read: list[tuple[Tensor, int]]) -> list[Tensor]:
    """Return the tensors whose version has increased."""
    return [tensor for tensor, before in read if read_version(tensor) != before]


class Run(TorchFunctionMode):
    """One run of ``forward``; a context manager around the call."""

    root: nn.Module | None = None
    """Module whose end ends the run, if the hooks started the run."""

    def __enter__(self) -> Self:
        self._outer = getattr(_active, "run", None)
        _active.run = self
        super().__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)
        _active.run = self._outer

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """Handle the start of a call of ``module``; may return other arguments."""

    def leave(self, module: nn.Module) -> None:
        """Handle the end of a call of ``module``, by return or by exception."""


def _before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    run: Run | None = getattr(_active, "run", None)
    if run is not None:
        return run.enter(module, args, kwargs)
    placement = latecomers.get(module, lambda: None)()
    if placement is None:
        return None
    run = placement.start_late_run()
    run.__enter__()
    run.root = module
    return run.enter(module, args, kwargs)


def _after(module: nn.Module, *_: Any) -> None:
    run: Run | None = getattr(_active, "run", None)
    if run is None:
        return
    run.leave(module)
    if run.root is module:
        run.__exit__(None, None, None)


def install_hooks(net: nn.Module) -> None:
    """Install the hooks on every module of ``net``; a second call changes nothing."""
    for module in net.modules():
        if _before not in get_forward_pre_hooks(module).values():
            module.register_forward_pre_hook(_before, prepend=True, with_kwargs=True)  # type: ignore[arg-type]
            module.register_forward_hook(_after, always_call=True)


def remove_hooks(net: nn.Module) -> None:
    """Remove every hook of ``net``, including the user's: for a copy that is measured and discarded."""
    for module in net.modules():
        for name in (*HOOKS, *HOOK_FLAGS):
            getattr(module, name).clear()


def is_hooked(net: nn.Module) -> bool:
    """Return whether a module has user hooks, watched or not."""
    return any(
        hook not in (_before, _after)
        for module in net.modules()
        for name in HOOKS
        for hook in getattr(module, name).values()
    )


@contextlib.contextmanager
def set_hooks_aside(net: nn.Module) -> Iterator[None]:
    """Remove the user's hooks for a run without side effects, and restore them."""
    kept = [
        (registry, dict(registry)) for module in net.modules() for name in HOOKS if (registry := getattr(module, name))
    ]
    try:
        for registry, hooks in kept:
            for key in [key for key, hook in hooks.items() if hook not in (_before, _after)]:
                del registry[key]
        yield
    finally:
        for registry, hooks in kept:
            registry.clear()
            registry.update(hooks)
