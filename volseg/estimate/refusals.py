"""Why a step cannot be followed, in words: which operator looked at a value, in which module, and what to do."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from torch import nn

from volseg.device.fake_internals import UNFOLLOWABLE
from volseg.device.module_internals import Loss
from volseg.errors import FollowError, VolsegError

__all__ = ["explaining_refusals"]


@contextmanager
def explaining_refusals() -> Iterator[None]:
    """Raise ``FollowError`` for what torch refuses where tensors have no values, and for what a module refuses.

    Errors of ours, and those outside of any module's ``forward``, pass as they are.
    """
    try:
        yield
    except VolsegError:
        raise
    except UNFOLLOWABLE as fault:
        raise FollowError(
            f"the step cannot be followed without a GPU: {_locate(fault)} asks for {_name_operator(fault)}, and "
            f"tensors have no values here; {_advise(fault)}"
        ) from fault
    except Exception as fault:
        if "FakeTensor" in str(fault) or ".numpy() is not supported" in str(fault):
            raise FollowError(
                f"the step cannot be followed without a GPU: {_locate(fault)} needs values of tensors, which are not "
                f"there ({_shorten(fault)}); {_advise(fault)}"
            ) from fault
        if not _list_modules(fault.__traceback__):
            raise
        raise FollowError(
            f"the network refuses this step: {_locate(fault)} raised {type(fault).__name__}: {_shorten(fault)}; give "
            "it volumes that it takes, or fix it"
        ) from fault


def _advise(fault: BaseException) -> str:
    """Return what to do about code that looks at values."""
    if any(isinstance(module, Loss) for module, _, _ in _list_modules(fault.__traceback__)):
        return (
            "plan with another loss in its place (DiceCELoss), which tells what everything but this one takes; it can "
            "be trained with all the same"
        )
    return (
        "compute with tensors instead of numbers (torch.where for a branch), keep a size or a setting as a number from "
        "the beginning, or measure on a GPU"
    )


def _name_operator(fault: BaseException) -> str:
    """Return what was asked for, as a user would write it."""
    operator = str(getattr(fault, "func", fault))
    if "_local_scalar_dense" in operator or "equal" in operator:
        return f"a tensor's value (.item(), float(), bool(), an if on a tensor: {operator})"
    return f"a result whose size depends on values ({operator})"


def _locate(fault: BaseException) -> str:
    """Return the innermost module that ran, by its path and type, and the line where it did."""
    found = _list_modules(fault.__traceback__)
    if not found:
        return "the step"
    (root, *_), (module, file, line) = found[0], found[-1]
    path = next((name for name, part in root.named_modules() if part is module), "")
    return f"{type(module).__name__}{f' {path!r}' if path else ''} ({Path(file).name}, line {line})"


def _list_modules(trace: TracebackType | None) -> list[tuple[nn.Module, str, int]]:
    """Return the modules whose functions ran, outermost first, each with the line where it was."""
    found = []
    while trace is not None:
        frame = trace.tb_frame
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and not frame.f_code.co_filename.endswith("nn/modules/module.py"):
            found.append((module, frame.f_code.co_filename, trace.tb_lineno))
        trace = trace.tb_next
    return found


def _shorten(fault: BaseException) -> str:
    return str(fault).strip().split("\n", 1)[0]
