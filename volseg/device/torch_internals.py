"""Every private name of torch that this package uses, under a public name; no other module uses private names.

``module_internals``, ``fake_internals`` and ``compiler_internals`` have those of torch's modules, fake tensors and
compiler. All names exist in torch 2.8, the oldest supported version, unless a comment says otherwise. Behaviour that is
relied on and shows in few other tests has a test of its own. Names that are used on every call of an operator are the
objects themselves, or C functions: they cost nothing.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, wraps
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, _prims_common, nn
from torch import _compile as _of_compile
from torch._subclasses.fake_tensor import FakeTensor
from torch.torch_version import TorchVersion
from torch.utils import _python_dispatch, _pytree

# Trees and modes.

pytree = _pytree
SUPPORTED_NODES = _pytree.SUPPORTED_NODES
tree_flatten, tree_unflatten, tree_leaves = _pytree.tree_flatten, _pytree.tree_unflatten, _pytree.tree_leaves
tree_map, tree_map_only = _pytree.tree_map, _pytree.tree_map_only

TorchDispatchMode = _python_dispatch.TorchDispatchMode
without_dispatch_modes = _python_dispatch._disable_current_modes

# Tensors.

get_version: Callable[[Tensor], int] = attrgetter("_version")
"""Return how often a tensor, or one that shares its memory, was changed in place; inference tensors have none."""

get_accumulation_hooks: Callable[[Tensor], Mapping[int, Any] | None] = attrgetter("_post_accumulate_grad_hooks")
"""Return the hooks after the accumulation of a parameter's gradient."""

get_base: Callable[[Tensor], Tensor | None] = attrgetter("_base")
"""Return the tensor of which this one is a view, None for others and for views unknown to autograd."""

is_view: Callable[[Tensor], bool] = torch.Tensor._is_view
"""Return whether autograd knows the tensor as a view of another."""

get_storage_key: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
"""Return the address of a storage, which is equal for all tensors in it."""

make_wrapper_subclass = torch.Tensor._make_wrapper_subclass
"""Make a tensor of a subclass that has a size, strides, a dtype and a device, and no memory."""


PLAIN_TENSORS = (Tensor, FakeTensor)
"""Types of tensors without special behaviour, with values or, in a trace, without."""


def as_plain(tensor: Tensor) -> Tensor:
    """Return the tensor without its subclass, as a view for autograd; a fake tensor stays one.

    ``as_subclass`` refuses fake tensors in torch 2.8.
    """
    return torch.ops.aten.alias.default(tensor) if isinstance(tensor, FakeTensor) else tensor.as_subclass(Tensor)


suggest_memory_format: Callable[[Tensor], torch.memory_format] = _prims_common.suggest_memory_format
"""Return the layout that an operator gives its result for this argument."""

to_copies = torch.ops.aten._to_copy.default, torch.ops.aten.to.device
"""The operators of ``Tensor.to`` if it copies; ``torch.as_tensor`` calls the second one in inference mode."""

# Functions that replace torch's.


without_overrides = torch._C.DisableTorchFunction
"""Call no ``__torch_function__``, of a subclass or a mode."""

without_subclass_overrides = torch._C.DisableTorchFunctionSubclass
"""Call no subclass's ``__torch_function__``; modes are called."""

with_overrides = torch._C._EnableTorchFunction
"""Call ``__torch_function__`` again, inside the two above."""

without_dispatch = torch._C._DisableTorchDispatch
"""Call no ``__torch_dispatch__``, of a subclass or a mode: torch's own code follows."""

count_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""Return the number of active ``TorchDispatchMode``."""

# Functions.

nn_functions = torch._C._nn
"""Functions that ``torch.nn.functional`` has from C++, under their own names."""

name_reduction: Callable[..., str] = nn._reduction.legacy_get_string
"""Return the reduction that the deprecated ``size_average`` and ``reduce`` of losses request."""

find_schemas: Callable[[str], list[Any]] = torch._C._jit_get_schemas_for_operator
"""Return the schemas of an operator's overloads, by its name such as ``aten::add``."""

get_schema: Callable[[Any], Any] = attrgetter("_schema")
"""Return the schema of one overload, such as ``torch.ops.aten.add.Tensor``."""

multiply_each: Callable[..., tuple[Tensor, ...]] = torch._foreach_mul
lerp_each_: Callable[..., None] = torch._foreach_lerp_
"""Multiply or interpolate each tensor of a list, by few kernels for all of them."""

softmax = torch.ops.aten._softmax.default
log_softmax = torch.ops.aten._log_softmax.default
"""Operators behind ``softmax``. Only a GPU may read half precision and write float32: the third argument."""

read_value = torch.ops.aten._local_scalar_dense.default
"""The operator behind ``Tensor.item``."""

check_gradients = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
"""Operator of ``GradScaler`` on gradients, before it reads whether one was not finite."""


@cache
def list_autocast_operators(key: str) -> frozenset[str]:
    """Return the operators of aten that autocast knows on a kind of device: ``AutocastCUDA``, ``AutocastCPU``.

    Cached: they belong to torch, the search reads three thousand names, and each traced step needs the result.
    """
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    known = torch._C._dispatch_has_kernel_for_dispatch_key
    return frozenset(name.removeprefix("aten::") for name in names if known(name, key))


@contextmanager
def overriding_operators(key: str, kernels: Mapping[str, Callable[..., Any] | None]) -> Iterator[None]:
    """Replace operators of aten under a dispatch key by functions; None means that the key has no kernel."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        for name, function in kernels.items():
            library.impl(name, torch.library.fallthrough_kernel if function is None else function, key)
        yield


# Autograd and its transforms.

find_saved_tensors_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
"""Return the current hooks for saved tensors, or None; those of a trace only if the argument is True."""


def is_changed_in_place(error: RuntimeError) -> bool:
    """Return whether autograd refused a saved tensor that was changed in place; recognised by the message."""
    return "modified by an inplace operation" in str(error)


find_backward_pass: Callable[[], int] = torch._C._current_graph_task_id
"""Return the number of this thread's running backward pass, -1 without one."""

find_backward_node: Callable[[], Any] = torch._C._current_autograd_node
"""Return the node of this thread's running backward pass, None without one."""

find_next_node_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""Return the number of autograd's next node on this thread."""


def call_after_backward(function: Callable[[], None]) -> None:
    """Call a function at the end of this thread's running backward pass, on the streams of the pass's caller."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def get_node_number(node: Any) -> int:
    """Return the number of an autograd node: on one thread, later nodes have larger numbers."""
    number: int = node._sequence_nr()
    return number


def hand_backward_over(kind: type[Tensor]) -> None:
    """Make ``torch.autograd.backward`` call a subclass's ``__torch_function__``, as later versions of torch do.

    Torch before 2.11 passes its arguments to the engine, which sees no slabs: gradients were silently lost. Here the
    engine's own entry makes the call, so any imported name of ``backward`` works, at any time of import.
    """
    if "handle_torch_function" in torch.autograd.backward.__code__.co_names:
        return
    autograd: Any = torch.autograd
    run = autograd._engine_run_backward

    @wraps(run)
    def ask(
        roots: Sequence[Any],
        gradients: Sequence[Any],
        keep: bool,
        create: bool,
        inputs: Sequence[Any],
        *rest: Any,
        **options: Any,
    ) -> Any:
        # ``torch.autograd.grad`` makes the call in every torch.
        if not options.get("accumulate_grad") or not any(isinstance(tensor, kind) for tensor in (*roots, *inputs)):
            return run(roots, gradients, keep, create, inputs, *rest, **options)
        given = {"grad_tensors": gradients, "retain_graph": keep, "create_graph": create, "inputs": inputs or None}
        return kind.__torch_function__(torch.autograd.backward, (kind,), (roots,), given)

    autograd._engine_run_backward = ask


LOSES_HOOKS_OF_SAVED = TorchVersion(torch.__version__) < "2.9"


def as_savable(parameter: Tensor) -> Tensor:
    """Return a parameter as an ``autograd.Function`` may save it under hooks of saved tensors.

    Torch 2.8 calls no hook of a saved leaf, above all in a checkpointed block; there the function returns a view.
    """
    is_lost = LOSES_HOOKS_OF_SAVED and parameter.is_leaf and parameter.requires_grad
    return parameter.view_as(parameter) if is_lost else parameter


is_transformed: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
"""Return whether a transform of ``torch.func`` (vmap, grad) has wrapped the tensor."""

unwrap_transformed: Callable[[Tensor], Tensor] = torch._C._functorch.get_unwrapped
"""Return the tensor inside the innermost transform."""

find_transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
"""Return the innermost transform that is active, or None."""


def is_forward_mode() -> bool:
    """Return whether forward-mode differentiation is active: a ``dual_level``, which ``torch.func.jvp`` enters too."""
    return torch.autograd.forward_ad._current_level >= 0


# Compilation.


def is_compiled(module: nn.Module) -> bool:
    """Return whether ``torch.compile`` has wrapped the module, or its own ``compile`` was called."""
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def left_out_of_compilation(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run a function, and all functions that it calls, without compilation under ``torch.compile``.

    ``torch.compiler.disable`` does so too, but imports the compiler at once, which takes as long as torch itself.
    """
    left_out: Callable[..., Any] = _of_compile._disable_dynamo(function)

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return left_out(*args, **kwargs) if torch.compiler.is_compiling() else function(*args, **kwargs)

    return run


# Devices and processes.


def count_references(tensors: tuple[Tensor, ...], number: int) -> tuple[int, int, int]:
    """Return the numbers of references to a tensor, its memory and its Python object, to compare with others from here.

    The tensor is passed in a tuple, so that no further name refers to it.
    """
    memory = tensors[number].untyped_storage()
    held = torch._C._storage_Use_Count(memory._cdata)  # type: ignore[attr-defined]
    return tensors[number]._use_count(), held, sys.getrefcount(tensors[number])  # type: ignore[attr-defined]


def is_in_bad_fork() -> bool:
    """Return whether this process is a fork of one that had initialised CUDA, which then fails here.

    torch knows this only in forks, and without its own ``is_initialized``: counting GPUs by CUDA is enough.
    """
    return bool(torch.cuda._is_in_bad_fork())


def keep_gpu_busy(cycles: int) -> None:
    """Keep the current stream idle for this many cycles of the GPU's clock."""
    torch.cuda._sleep(cycles)


def end_allocations_to_pool(device: torch.device, pool: Any) -> None:
    """Report a failed capture to the allocator; before torch 2.12 it continues with a capture that CUDA has ended."""
    with suppress(RuntimeError):  # it has ended: torch 2.12 (pytorch/pytorch#180395), or an error of Python's
        torch._C._cuda_endAllocateToPool(device.index, pool)


def get_default_group() -> dist.ProcessGroup:
    """Return the group of all processes."""
    return dist.distributed_c10d._get_default_group()


gather_into: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Gather every process's tensor into one; torch 2.13 has renamed the function, and deprecates the older name."""


def get_group_name(group: dist.ProcessGroup) -> str:
    """Return the name under which torch keeps a group."""
    return dist.distributed_c10d._get_process_group_name(group)


def accept_gradients_of_other_streams() -> None:
    """Accept gradients from another stream than the parameter's without a warning, which is new in torch 2.10."""
    setting = getattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", None)
    if setting is not None:
        setting(False)
