"""Find faults in Triton's interpreter that would appear on a GPU only.

The interpreter runs the programs of a kernel one after another. Within ``watching`` each launch runs several times from
the same memory, its programs in other orders, and every load, store and atomic is checked. `KernelFault` is raised if

- two orders leave different bits, or lanes of one store write different values to one place;
- programs write the same byte, or one reads what another writes, without an atomic that releases, one that acquires
  (scope: GPU), and a barrier between the access and the release;
- a program reads, without a barrier, what it wrote, or writes with other lanes what it read;
- an access lies outside of the given tensors, to the byte, or CUDA does not take the grid.

``torch.empty`` returns NaN or the largest number. ``tl.minimum`` and ``tl.maximum`` of NaN and a number are the number.
"""

import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from kernel_launches import KernelFault, LargeLaunch, Launch, LooseLaunch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["KernelFault", "Launch", "watching"]

LARGEST_GRID = 2**31 - 1, 2**16 - 1, 2**16 - 1
"""CUDA's, https://docs.nvidia.com/cuda/cuda-c-programming-guide, technical specifications per compute capability."""

LARGEST_WATCHED = 2**20
"""Bytes of a launch's tensors: a program's accesses are looked at one by one, which takes seconds for megabytes."""

MOST_PROGRAMS = 127
"""Of a launch that is watched: the largest halo, told by addresses alone, is sent by 128."""

LARGEST_POISONED = 2**26
"""Bytes of uninitialised memory that are filled."""


EMPTY = {torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty, Tensor.new_empty_strided}


class _Poison(TorchFunctionMode):
    """Fills what ``torch.empty`` returns."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in EMPTY and type(result) is Tensor and result.device.type == "cpu":
            storage = result.untyped_storage()
            if 0 < storage.nbytes() <= LARGEST_POISONED and not result.dtype.is_complex:
                flat = torch.empty(0, dtype=result.dtype).set_(storage)
                flat.fill_(float("nan") if result.is_floating_point() else _find_largest(result.dtype))
        return result


def _find_largest(dtype: torch.dtype) -> int | bool:
    return True if dtype == torch.bool else torch.iinfo(dtype).max


def _order_programs(grid: Sequence[int], number: int, seed: int) -> list[tuple[int, int, int]]:
    """Return the programs of a grid: in their order, at random, then the other way round."""
    programs = [(x, y, z) for x in range(grid[0]) for y in range(grid[1]) for z in range(grid[2])]
    if number == 1:
        random.Random(seed).shuffle(programs)
    elif number > 1:
        programs.reverse()
    return programs


@contextmanager
def watching(
    orders: int = 2,
    seed: int = 0,
    most: int = 24,
    only: Callable[[Sequence[int]], list[tuple[int, int, int]]] | None = None,
) -> Iterator[list[Launch]]:
    """Check every launch of a kernel in this block; yield the launches as they come.

    ``orders`` is how often a launch runs: in order, at random (by ``seed``), in reverse. ``most`` is how many launches
    of a kernel are checked; the others run once, as do those above ``LARGEST_WATCHED`` bytes or ``MOST_PROGRAMS``.
    ``only`` are the programs to run of a grid that is too large: bounds and grid are checked. Raises `KernelFault`.
    """
    from triton.runtime import interpreter  # Triton may not be installed

    builder, launches, seen, plain = interpreter.interpreter_builder, [], [], _find_plain()

    def measure(pointers: Any) -> int:
        return int(np.dtype(interpreter._get_np_dtype(pointers.get_element_ty())).itemsize)

    def load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        launches[-1].read(pointers.data, mask.data, measure(pointers))
        return plain["create_masked_load"](self, pointers, mask, *rest)

    def store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        launches[-1].write(pointers.data, mask.data, measure(pointers), value.data)
        return plain["create_masked_store"](self, pointers, value, mask, *rest)

    def modify(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, sem: Any, scope: Any) -> Any:
        launches[-1].change(pointers.data, mask.data, measure(pointers), sem.name, scope.name)
        return plain["create_atomic_rmw"](self, operation, pointers, value, mask, sem, scope)

    def swap(self: Any, pointers: Any, old: Any, value: Any, sem: Any, scope: Any) -> Any:
        launches[-1].change(pointers.data, np.True_, measure(pointers), sem.name, scope.name)
        return plain["create_atomic_cas"](self, pointers, old, value, sem, scope)

    def barrier(self: Any) -> None:
        launches[-1].wait()

    def run(self: Any, *arguments: Any, **options: Any) -> None:
        accepted = inspect.getfullargspec(self.fn).args
        options = {name: value for name, value in options.items() if name in accepted}
        given = inspect.getcallargs(self.fn, *arguments, **options)
        fixed = set(self.constexprs)
        converted = {n: v if n in fixed else interpreter._implicit_cvt(v) for n, v in given.items()}
        grid = self.grid(converted) if callable(self.grid) else self.grid
        grid = (*grid, 1, 1)[:3] if isinstance(grid, tuple | list) else (grid, 1, 1)
        if any(not 0 <= size <= most for size, most in zip(grid, LARGEST_GRID, strict=True)):
            raise KernelFault(f"{self.fn.__name__}: CUDA takes no grid of {grid}, at most {LARGEST_GRID}")
        tensors = [value for value in given.values() if isinstance(value, Tensor)]
        programs = grid[0] * grid[1] * grid[2]
        name = f"{self.fn.__module__}.{self.fn.__name__}"
        watched = sum(launch.name == name for launch in seen) < most and programs <= MOST_PROGRAMS
        watched = watched and sum(tensor.untyped_storage().nbytes() for tensor in tensors) <= LARGEST_WATCHED
        kind = LargeLaunch if only is not None else Launch if watched else LooseLaunch
        launch = kind(name, tensors, programs)
        patches = interpreter._patch_lang(self.fn)
        launches.append(launch)
        seen.append(launch)
        try:
            builder.set_grid_dim(*grid)
            left: list[Any] = []
            for number in range(1 if kind is not Launch else orders):
                if number:
                    launch.restore()
                    launch.begin_run()
                for x, y, z in only(grid) if only is not None else _order_programs(grid, number, seed):
                    builder.set_grid_idx(x, y, z)
                    launch.begin_program((x * grid[1] + y) * grid[2] + z)
                    self.fn(**converted)
                left = launch.compare(left) if kind is Launch else left
        finally:
            launches.pop()
            launch.regions = []  # what was noted of a box of planes takes a gigabyte
            patches.restore()

    own = {
        "create_masked_load": load, "create_masked_store": store, "create_atomic_rmw": modify,
        "create_atomic_cas": swap, "create_barrier": barrier,
        "create_minnumf": lambda self, one, other: self.binary_op(one, other, np.fmin),
        "create_maxnumf": lambda self, one, other: self.binary_op(one, other, np.fmax),
    }  # fmt: skip
    with ExitStack() as changed:
        for name, function in own.items():
            changed.enter_context(patch.object(interpreter.InterpreterBuilder, name, function))
        changed.enter_context(patch.object(interpreter.GridExecutor, "__call__", run))
        changed.enter_context(_Poison())
        yield seen


@cache
def _find_plain() -> dict[str, Any]:
    """Return the interpreter's own functions, found before any is replaced."""
    from triton.runtime.interpreter import InterpreterBuilder  # Triton may not be installed

    names = ("create_masked_load", "create_masked_store", "create_atomic_rmw", "create_atomic_cas")
    return {name: getattr(InterpreterBuilder, name) for name in names}
