"""Compile Triton kernels before their first launch, without the target GPU, into Triton's own cache.

Triton compiles a kernel at its first run, one after the other, in the middle of the first training step. The binary
depends on the types of the arguments, on numbers that are 1 or multiples of 16, on aligned addresses, and on the
arguments passed by name: a *specialization*. A step that is traced on a fake GPU requests all of them
(``hearing_calls``), and processes compile them meanwhile::

    with Compiling((9, 0), processes=2) as compiling, hearing_calls(compiling.ask), tracing(gpu) as followed:
        step(followed)
    compiling.compiled

Each process takes a GPU of that capability for Triton's current device and calls ``JITFunction.warmup``: by
construction, it uses the cache entry that a launch on such a GPU uses. Triton chooses the cache's place
(``TRITON_CACHE_DIR``).
"""

import os
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any, Self

import torch
from torch import Tensor

from volseg.device.triton_kernels import INSTALLED, KernelCall, TritonKernel
from volseg.errors import ParallelError

ALIGNED = 16
"""Bytes and numbers for whose multiples Triton compiles a separate kernel."""

LARGEST = 2**31 - 1
"""Largest number of 32 bits."""


class Address:
    """Stand-in for a tensor, with only its type and address."""

    def __init__(self, dtype: torch.dtype, offset: int) -> None:
        self.dtype, self.offset = dtype, offset

    def __repr__(self) -> str:
        return f"Address({self.dtype}, {self.offset})"

    def data_ptr(self) -> int:
        """Return the address, up to a multiple of 16 bytes."""
        return self.offset

    @staticmethod
    def ptr_range() -> int:
        """Return 0, like Triton's own stand-in: only other vendors' backends call it."""
        return 0


@dataclass(frozen=True, slots=True)
class Specialization:
    """Properties of a call on which its binary depends; calls with equal properties run the same binary."""

    home: tuple[str, str]
    """Module and name of the kernel."""
    arguments: tuple[Any, ...]
    """One value for each kind of number or address."""
    options: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, call: KernelCall) -> "Specialization":
        """Return the specialization of a call."""
        function: Any = call.kernel.compiled
        parameters = {parameter.name: parameter for parameter in function.params}
        # Arguments that are not passed by position are passed by name, like options, which are not parameters.
        arguments = [_get_kind(value, each) for each, value in zip(function.params, call.arguments, strict=False)]
        options = {name: _get_kind(value, parameters.get(name)) for name, value in call.options.items()}
        return cls(call.kernel.home, tuple(arguments), tuple(sorted(options.items())))

    @property
    def key(self) -> str:
        """Key that distinguishes specializations."""
        return repr((self.home, self.arguments, self.options))


def _get_kind(value: Any, parameter: Any) -> Any:
    """Return a value for which Triton compiles the same binary."""
    if parameter is None or parameter.is_constexpr:
        return value
    if isinstance(value, Tensor):
        return Address(value.dtype, int(value.storage_offset()) * value.element_size() % ALIGNED)
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        is_told_apart = not parameter.do_not_specialize
        if value == 1 and is_told_apart:
            return value
        own = ALIGNED if value % ALIGNED == 0 and is_told_apart else 3
        return own if -LARGEST <= value <= LARGEST else own + 2**40
    return 0.5 if isinstance(value, float) else value


def can_compile() -> bool:
    """Return whether Triton is installed and compiles: its interpreter does not."""
    interprets = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
    return INSTALLED and hasattr(import_module("triton.runtime.jit"), "JITFunction") and not interprets


@dataclass(frozen=True, slots=True)
class Compiled:
    """Result of compiling a specialization."""

    name: str
    problem: str = ""
    """Reason why it could not be compiled."""


class Compiling:
    """Processes that compile kernels.

    Parameters
    ----------
    capability : (int, int)
        Compute capability of the GPUs that will run the kernels.
    processes : int
        Number of processes. They are forks of this process, which must not have initialised CUDA.
    runs_here : bool
        Whether this machine has such GPUs. Then launchers are compiled as well, if Triton (before 3.7) has the C
        compiler build them for each signature: this needs the driver's library.
    begin : callable, optional
        Called first in each process, for example to end it when this process is killed.

    Raises
    ------
    ParallelError
        If Triton is not installed.
    """

    def __init__(
        self,
        capability: tuple[int, int],
        processes: int,
        *,
        runs_here: bool = False,
        begin: Callable[[], object] | None = None,
    ) -> None:
        if not can_compile():
            raise ParallelError(
                "compiling kernels needs Triton, which is not installed (pip install triton) or only interprets them "
                "(unset TRITON_INTERPRET)"
            )
        told = (capability, runs_here, begin)
        self._pool = ProcessPoolExecutor(processes, get_context("fork"), _begin_compiler, told)
        self._asked: dict[str, Future[Compiled]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *fault: object) -> None:
        self._pool.shutdown(cancel_futures=fault[0] is not None)

    def ask(self, call: KernelCall) -> None:
        """Compile the kernel of a call, unless its specialization was requested before."""
        wanted = Specialization.of(call)
        if wanted.key not in self._asked:
            self._asked[wanted.key] = self._pool.submit(_compile, wanted)

    @property
    def compiled(self) -> list[Compiled]:
        """Results of all requests, once the last one is done."""
        try:
            return [future.result() for future in self._asked.values()]
        except BrokenProcessPool as fault:
            return [Compiled("", f"a process that compiled kernels was killed ({fault})")]


_starter: Any = None
"""Builder of launchers in a compiling process, if it builds any."""


def _begin_compiler(capability: tuple[int, int], runs_here: bool, begin: Callable[[], object] | None) -> None:
    """Prepare this process, a fork, for compiling."""
    global _starter
    if begin is not None:
        begin()
    torch.set_num_threads(1)
    _starter = take_capability(capability, runs_here=runs_here)


def take_capability(capability: tuple[int, int], *, runs_here: bool = False) -> Any:
    """Make Triton use a GPU of this compute capability as this process's current device, permanently.

    Parameters
    ----------
    capability, runs_here
        See `Compiling`.

    Returns
    -------
    callable or None
        Builds launchers, if they are compiled too.
    """
    from triton.backends.compiler import GPUTarget  # Triton may not be installed
    from triton.runtime import driver

    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    own: Any = SimpleNamespace(launcher_cls=None)
    if runs_here:
        from triton.backends.nvidia.driver import CudaDriver  # of this machine: needs the driver's library

        own = CudaDriver()
    own.get_current_target = lambda: target
    own.get_current_device = lambda: 0
    own.get_current_stream = lambda device: device
    driver.set_active(own)
    return own.launcher_cls


def _compile(wanted: Specialization) -> Compiled:
    module, name = wanted.home
    kernel: TritonKernel = getattr(import_module(module), name)
    try:
        function: Any = kernel.compiled
        binary = function.warmup(*wanted.arguments, grid=(1,), **dict(wanted.options))
        if _starter is not None:
            _starter(binary.src, binary.metadata)
    except Exception as fault:  # any compiler error: launching the kernel raises it again
        return Compiled(kernel.name, f"{type(fault).__name__}: {fault}")
    return Compiled(kernel.name)
