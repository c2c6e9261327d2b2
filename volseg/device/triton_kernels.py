"""Define and run Triton kernels, including definitions on machines without Triton.

A kernel that takes a grid is defined with ``@kernel``, a function that kernels call with ``@triton.jit``. Every run
goes through ``TritonKernel``: it is only traced on fake GPUs (``gpus``).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from volseg.device import fake_gpu, gpus
from volseg.errors import ParallelError

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch come without it

    class _Absent:
        """Parts of Triton that definitions and sizes of kernels need; none of them run."""

        constexpr = int

        @staticmethod
        def jit(function: Callable[..., Any]) -> Callable[..., Any]:
            return function

        @staticmethod
        def cdiv(numerator: int, denominator: int) -> int:
            return -(-numerator // denominator)

        @staticmethod
        def next_power_of_2(number: int) -> int:
            return 1 << (number - 1).bit_length()

    triton = tl = _Absent
    INSTALLED = False
else:
    INSTALLED = True

__all__ = ["INSTALLED", "KernelCall", "TritonKernel", "hearing_calls", "kernel", "tl", "triton"]


@dataclass(frozen=True, slots=True)
class KernelCall:
    """A kernel that was requested on a fake GPU, with all its arguments."""

    kernel: "TritonKernel"
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]
    """Arguments by name: constants of the compilation, ``num_warps``."""


_hearers: list[Callable[[KernelCall], None]] = []


@contextmanager
def hearing_calls(hear: Callable[[KernelCall], None]) -> Iterator[None]:
    """Call back for each kernel launch on a fake GPU, which does not run."""
    _hearers.append(hear)
    try:
        yield
    finally:
        _hearers.remove(hear)


class TritonKernel:
    """A kernel that takes a grid: ``name[grid](*arguments, **options)``, on the device of the first argument.

    Parameters
    ----------
    function
        Function that Triton compiles.
    options
        Options of ``triton.jit``.

    Raises
    ------
    ParallelError
        If run on a real GPU without Triton.
    """

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        self.name = f"{function.__module__.removeprefix('volseg.').removeprefix('device.')}.{function.__name__}"
        self.home = function.__module__, function.__name__
        self.__doc__ = function.__doc__
        self.compiled = triton.jit(**options)(function) if INSTALLED else None

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        """Return a function that runs the kernel on a grid of programs."""
        if not gpus.has_values():
            return lambda *arguments, **options: self._note(grid, arguments, options)
        if self.compiled is None:
            raise ParallelError(
                f"the kernel {self.name} needs Triton, which is not installed; install it (pip install triton), or use "
                "torch's kernels (in a config training.kernels: torch)"
            )
        run: Callable[..., Any] = self.compiled[grid]
        return lambda *arguments, **options: _run_on_device(run, arguments, options)

    def _note(self, grid: Sequence[int], arguments: Sequence[Any], options: dict[str, Any]) -> None:
        for hear in _hearers:
            hear(KernelCall(self, tuple(arguments), options))
        tensors = tuple(value for value in (*arguments, *options.values()) if isinstance(value, Tensor))
        gpus.observer().on_kernel(fake_gpu.NotedKernel(self.name, tuple(grid), tensors, options))


def _run_on_device(run: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Run a kernel on the device of its first argument, a tensor; Triton's interpreter runs it on the CPU."""
    first = arguments[0]
    if not first.is_cuda or first.get_device() == torch.cuda.current_device():
        return run(*arguments, **options)
    with torch.cuda.device(first.device):
        return run(*arguments, **options)


def kernel(**options: Any) -> Callable[[Callable[..., Any]], TritonKernel]:
    """Define a kernel, with the options of ``triton.jit``: ``@kernel()``."""
    return lambda function: TritonKernel(function, **options)
