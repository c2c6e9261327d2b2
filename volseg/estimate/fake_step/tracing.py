"""Run a real training step without a GPU, and record the memory, kernels and messages of each GPU.

Tensors have a shape, a dtype, a layout and a device here, but no values (torch's ``FakeTensorMode``). The step runs
unchanged: the network's own Python, autograd, the optimizer. Every operator and every block of memory is recorded::

    with tracing(gpu) as followed:
        net = followed.copy(net).to(followed.devices[0])
        followed.mark("step")
        ...
    (trace,) = followed.traces()

A step that reads a value (``.item()``, a branch on a tensor, NumPy) cannot be traced; the error names its module.
"""

import gc
import random
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from volseg.device.fake_gpu import GpuLike, faking
from volseg.device.fake_internals import UNFOLLOWABLE, FakeTensor, quiet_fake_tensors, taking_lists
from volseg.device.gpus import get_tensor_device, is_gpu
from volseg.device.module_internals import Loss, swapping_by
from volseg.device.torch_internals import TorchDispatchMode, check_gradients, read_value
from volseg.errors import FollowError, VolsegError
from volseg.estimate.fake_step.constant_values import ConstantValues
from volseg.estimate.fake_step.gpu_autocast import casting_like_gpus
from volseg.estimate.fake_step.gpu_operators import GPU_OPERATORS, WITH_RESULT, composing_like_gpus
from volseg.estimate.fake_step.meta_kernels import MetaKernels
from volseg.estimate.fake_step.traced_step import IN_PLACE, TracedStep, find_gpu
from volseg.estimate.operator_work import list_tensors
from volseg.estimate.trace import KernelRun

__all__ = ["TracedStep", "explaining_refusals", "shorten", "tracing"]

aten = torch.ops.aten
PRODUCTS = frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.addbmm.default})

FIND_DEVICE = torch.ops.prim.device.default


@contextmanager
def tracing(
    gpu: GpuLike, num_gpus: int = 1, time_kernel: Callable[[KernelRun], float] | None = None, limit: int | None = None
) -> Iterator["TracedStep"]:
    """Run the body of the ``with`` on fake tensors, and trace the memory and the kernels of each GPU.

    Parameters
    ----------
    gpu
        The kind of GPU.
    num_gpus
        Number of GPUs: ``TracedStep.devices``.
    time_kernel
        Returns the seconds of a kernel, for code that times the network's parts; by default nothing is timed.
    limit
        Bytes of live tensors on a GPU above which the trace stops; by default unlimited. The limit is not checked in a
        backward pass over several devices, where the order of requests varies, nor once a step is recorded, since the
        step without a recording may need less.

    Raises
    ------
    OutOfMemoryError
        If a GPU would hold more than the limit; raised again at the end if the body catches it.
    """
    followed = TracedStep(num_gpus, time_kernel, limit)
    contexts = (
        *(_isolated_state(), explaining_refusals(), quiet_fake_tensors(), _without_collector(), faking(gpu, followed)),
        *(casting_like_gpus(), composing_like_gpus(), swapping_by(_take_over), taking_lists()),
        *(followed.mode, _Noting(followed), _making_on_devices()),
    )
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        followed.in_place.learn()
        try:
            yield followed
        except Exception as told:  # a network may replace the error with its own
            if followed.fault is None or told is followed.fault:
                raise
            raise followed.fault from told
    followed.end()
    if followed.fault is not None:
        raise followed.fault


class _Noting(TorchDispatchMode):
    """Report each operator and its results to a ``TracedStep``."""

    def __init__(self, followed: TracedStep) -> None:
        super().__init__()
        self.followed = followed
        self.kernels = MetaKernels(followed.mode)
        self.values = ConstantValues()

    def _dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ARG002
        if func is FIND_DEVICE:  # called more often than all other operators together
            return get_tensor_device(args[0])
        kwargs = kwargs or {}
        handler = GPU_OPERATORS.get(func)
        if handler is not None and find_gpu(list_tensors(args)) is not None:
            return self._run_like_gpu(handler, func, args, kwargs)
        if func is read_value:
            value = 0.0 if self.followed.is_checked(args[0]) else self.values.read(args[0])
            if value is not None:
                return value
        if func in IN_PLACE:
            func = self.followed.in_place.replace(func, args)
        out = self.kernels.run(func, args, kwargs)
        self.values.note(func, args, kwargs, out)
        if type(out) is FakeTensor or isinstance(out, Tensor):
            _correct_device(out, kwargs.get("device"))
            self.followed.note_storage(out)
            if func in PRODUCTS:
                self.followed.note_product(out.device)
        elif isinstance(out, list | tuple):
            for tensor in list_tensors(out):
                self.followed.note_storage(tensor)
        elif func is check_gradients:
            self.followed.note_checked(args[1])
        elif out is not None:
            return out  # a number or the like
        self.followed.note_operator(func, args, kwargs, out)
        return out

    def _run_like_gpu(self, handler: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        plain = self.kernels.run(func, args, kwargs) if func in WITH_RESULT else None
        with self:  # the handler's own operators are recorded too
            return handler(partial(self.followed.note_operator, func, args, kwargs), plain, *args, **kwargs)


# If a class body defines this method, torch wraps it to keep the compiler out. The wrapper costs as much as everything
# else that is done for most operators, and nothing is compiled in a trace.
_Noting.__torch_dispatch__ = _Noting._dispatch  # type: ignore[assignment,method-assign]


def _correct_device(out: Tensor, device: torch.device | None) -> None:
    """Move a fake tensor to the requested device: a mode computes tensors with known values on the host."""
    if device is not None and isinstance(out, FakeTensor) and is_gpu(device) and out.fake_device != device:
        out.fake_device, out.constant = device, None


@contextmanager
def _making_on_devices() -> Iterator[None]:
    """Let ``torch.tensor`` and ``torch.as_tensor`` keep the index of a fake GPU, which they drop on CPUs.

    Both functions are replaced by name. A ``TorchFunctionMode`` would be off within functions that it has intercepted,
    such as a loss with a form for slabs, and would slow down every function.
    """
    with ExitStack() as stack:
        for name in ("tensor", "as_tensor"):
            make = getattr(torch, name)
            stack.callback(setattr, torch, name, make)
            setattr(torch, name, partial(_make_on_device, make))
        yield


def _make_on_device(make: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    device = kwargs.get("device")
    if device is not None and is_gpu(torch.device(device)):
        return make(*args, **{**kwargs, "device": None}).to(device)
    return make(*args, **kwargs)


@contextmanager
def _isolated_state() -> Iterator[None]:
    """Trace a step in a default state: the first batch that asks for a choice may arrive within autocast.

    The states of the random generators of torch, NumPy and Python are restored afterwards, so a training is bitwise the
    same, whether or not its plan was made in the same process.
    """
    with ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())  # noqa: NPY002 (a network's own)
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autograd.set_detect_anomaly(False))
        for device in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(device, enabled=False, dtype=torch.bfloat16))
        stack.enter_context(_outermost_autocast())
        yield


@contextmanager
def _outermost_autocast() -> Iterator[None]:
    """Make the step's autocast the outermost: only the outermost drops its cached copies of weights at its end."""
    depth = torch.autocast_increment_nesting() - 1
    for _ in range(depth + 1):
        torch.autocast_decrement_nesting()
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        for _ in range(depth):
            torch.autocast_increment_nesting()


@contextmanager
def _without_collector() -> Iterator[None]:
    """Free memory when its last reference goes, not when Python's garbage collector happens to run.

    A strategy that collects cycles itself (before it records) finds those of the step. Older objects, a million of
    torch's modules, hold no memory of the step, so they are frozen.
    """
    was_enabled, is_first = gc.isenabled(), gc.get_freeze_count() == 0
    gc.disable()
    if is_first:
        gc.freeze()
    try:
        yield
    finally:
        if is_first:
            gc.unfreeze()
        if was_enabled:
            gc.enable()


def _take_over(old: Tensor, new: Tensor) -> None:
    """Give a parameter another's memory and device; ``torch.utils.swap_tensors`` refuses weakly referenced tensors."""
    old.data = new.data
    if isinstance(old, FakeTensor):  # a network is built with plain tensors
        assert isinstance(new, FakeTensor)
        old.fake_device = new.fake_device


@contextmanager
def explaining_refusals() -> Iterator[None]:
    """Raise ``FollowError`` if a step reads values that fake tensors lack, or if a module raises an error.

    Errors of volseg, and errors outside of any module's ``forward``, pass unchanged.
    """
    try:
        yield
    except VolsegError:
        raise
    except Exception as fault:
        where, modules = _locate(fault), _list_modules(fault)
        if isinstance(fault, UNFOLLOWABLE):
            why = f"asks for {_name_operator(fault)}, and tensors have no values here"
        elif "FakeTensor" in str(fault) or ".numpy() is not supported" in str(fault):
            why = f"needs values of tensors, which are not there ({shorten(fault)})"
        elif modules:
            raise FollowError(
                f"the network refuses this step: {where} raised {type(fault).__name__}: {shorten(fault)}; use "
                "volumes that the network accepts, or fix the network"
            ) from fault
        else:
            raise
        advice = READING_LOSS if any(isinstance(module, Loss) for module, _, _ in modules) else READING
        raise FollowError(f"the step cannot be followed without a GPU: {where} {why}; {advice}") from fault


READING, READING_LOSS = (
    "compute with tensors instead of numbers (torch.where for a branch), keep a size or a setting as a number from the "
    "beginning, or measure on a GPU",
    "plan with another loss in its place (DiceCELoss), which tells what everything but this one takes; it can be "
    "trained with all the same",
)
"""Advice on code that reads values, in a network and in a loss."""


def _name_operator(fault: BaseException) -> str:
    """Return the refused operation, as a user would write it."""
    operator = str(getattr(fault, "func", fault))
    if "_local_scalar_dense" in operator or "equal" in operator:
        return f"a tensor's value (.item(), float(), bool(), an if on a tensor: {operator})"
    return f"a result whose size depends on values ({operator})"


def _locate(fault: BaseException) -> str:
    """Return the type and the path of the innermost module that ran, and its line."""
    found = _list_modules(fault)
    if not found:
        return "the step"
    (root, *_), (module, file, line) = found[0], found[-1]
    path = next((name for name, part in root.named_modules() if part is module), "")
    return f"{type(module).__name__}{f' {path!r}' if path else ''} ({Path(file).name}, line {line})"


def _list_modules(fault: BaseException) -> list[tuple[nn.Module, str, int]]:
    """Return the modules in which an error was raised, outermost first, each with its file and line."""
    found = []
    for frame, line in traceback.walk_tb(fault.__traceback__):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and not frame.f_code.co_filename.endswith("nn/modules/module.py"):
            found.append((module, frame.f_code.co_filename, line))
    return found


def shorten(fault: BaseException) -> str:
    """Return the first line of an error's message."""
    return str(fault).strip().partition("\n")[0]
