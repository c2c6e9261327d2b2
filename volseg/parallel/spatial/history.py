"""Refuse volumes that passed through custom autograd functions, which leave a mark on the volume's shell.

The shell claims to need a gradient, so that a ``torch.autograd.Function`` gives its result a history. Autograd does not
see the slabs inside, whose gradient would be lost.
"""

from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor

from volseg.device.torch_internals import without_subclass_overrides
from volseg.errors import UnsupportedOperatorError

if TYPE_CHECKING:
    from volseg.parallel.spatial.volume import ShardedVolume

HISTORY: Any = Tensor.grad_fn
"""The property itself, for the shell: ``volume.grad_fn`` would go through the table."""


def check_history(volume: "ShardedVolume") -> None:
    """Refuse a volume from a custom function, before its slabs are read without the table."""
    with without_subclass_overrides():
        if HISTORY.__get__(volume) is not None:
            refuse_custom(volume)


def refuse_custom(volume: "ShardedVolume") -> NoReturn:
    """Raise for a volume that a custom autograd function has marked."""
    node = HISTORY.__get__(volume)
    if node.name() == "BackwardHookFunctionBackward":
        raise UnsupportedOperatorError(
            f"{volume.context.module_path()} got a volume through a module with a full backward hook, which is a "
            f"custom autograd.Function and would not see the slabs; use a forward hook that calls "
            f"output.register_hook(...)"
        )
    raise UnsupportedOperatorError(
        f"{volume.context.module_path()} passed a sharded volume through a custom autograd.Function ({node}), whose "
        f"backward would not see the slabs; if it is pointwise, say so by volseg.parallel.pointwise_function(...), "
        f"else write it with torch functions; of torch.utils.checkpoint take use_reentrant=False"
    )
