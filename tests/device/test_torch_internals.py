"""What torch's private names do that the package relies on; a torch in which one does not fails here, by its name."""

import ast
import warnings
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from volseg.device import fake_internals as of_fakes
from volseg.device import module_internals as of_modules
from volseg.device import torch_internals as internals


def test_each_name_is_tried_here() -> None:
    tree = ast.parse(Path(__file__).read_text(encoding="utf-8"))
    tried = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for name, module in (("internals", internals), ("of_modules", of_modules), ("of_fakes", of_fakes)):
        assert {f"{name}.{each}" for each in module.__all__} <= tried


def test_versions_count_changes_in_place_of_all_that_share_memory() -> None:
    x = torch.zeros(3)
    view, detached = x[:2], x.detach()
    assert not internals.get_accumulation_hooks(x)
    before = internals.get_version(x)
    view.add_(1)
    assert [internals.get_version(tensor) for tensor in (x, view, detached)] == [before + 1] * 3
    x.data.add_(1)
    assert internals.get_version(x) == before + 1  # ``data`` is torch's way around it
    with torch.inference_mode():
        inference = torch.zeros(3)
    with pytest.raises(RuntimeError, match="do not track version counter"):
        internals.get_version(inference)


def test_views_and_their_bases() -> None:
    x = torch.zeros(4)
    assert internals.get_base(x) is None
    assert not internals.is_view(x)
    assert internals.get_base(x[:2][:1]) is x
    assert internals.is_view(x[:2])
    assert internals.get_base(x[:2].detach()) is None  # although it shares the memory
    assert internals.get_base(x.clone()) is None


def test_wrapper_subclasses_have_a_shape_and_no_memory() -> None:
    class Shell(Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
            raise AssertionError(func)

    shell = internals.make_wrapper_subclass(
        Shell, (2, 3), strides=(3, 1), dtype=torch.float16, device="cpu", requires_grad=False
    )
    assert type(shell) is Shell
    assert (tuple(shell.shape), shell.dtype, shell.stride()) == ((2, 3), torch.float16, (3, 1))
    with pytest.raises(RuntimeError):
        shell.untyped_storage().data_ptr()


class Operators(internals.TorchDispatchMode):
    """Write down the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_dispatch_modes_see_operators_and_are_counted() -> None:
    assert internals.count_dispatch_modes() == 0
    with Operators() as operators:
        assert internals.count_dispatch_modes() == 1
        torch.zeros(2).to(torch.float16)
    assert internals.count_dispatch_modes() == 0
    assert operators.seen[-1] is internals.to_copy


class Named(Tensor):
    """Write down the functions that are called."""

    seen: list[Any] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        cls.seen.append(func)
        with internals.without_subclass_overrides():
            return func(*args, **(kwargs or {}))


class Functions(torch.overrides.TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_plain_tensors_have_no_class_of_their_own_and_are_views() -> None:
    leaf = torch.ones(2, requires_grad=True)
    plain = internals.as_plain((leaf * 1).as_subclass(Named))
    assert type(plain) is Tensor
    plain.sum().backward()
    assert torch.equal(leaf.grad, torch.ones(2))
    owner = torch.zeros(2).as_subclass(Named)
    internals.as_plain(owner).add_(1)
    assert torch.equal(owner.as_subclass(Tensor), torch.ones(2))
    with of_fakes.FakeTensorMode():
        empty = torch.empty(2)
        of_empty = internals.as_plain(empty)
        assert type(empty) in internals.PLAIN_TENSORS
    assert type(of_empty) is of_fakes.FakeTensor
    assert internals.get_storage_key(of_empty.untyped_storage()) == internals.get_storage_key(empty.untyped_storage())


class Asked(Tensor):
    calls: ClassVar[list[tuple[Any, tuple, Any]]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if func is torch.autograd.backward:
            cls.calls.append((func, args, kwargs))
            return None
        return super().__torch_function__(func, types, args, kwargs)


def backward_of_torch_2_8(tensors: Any, grad_tensors: Any = None, inputs: Any = ()) -> None:
    options = {"allow_unreachable": True, "accumulate_grad": True}
    torch.autograd._engine_run_backward(tuple(tensors), tuple(grad_tensors), False, False, tuple(inputs), **options)


@pytest.mark.parametrize("older", [False, True], ids=["this", "2.8"])
def test_a_backward_pass_is_handed_to_the_class_of_its_tensors(older: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.autograd, "_engine_run_backward", torch.autograd._engine_run_backward)  # put back behind
    if older:
        monkeypatch.setattr(torch.autograd, "backward", backward_of_torch_2_8)
    backward = torch.autograd.backward  # imported before
    internals.hand_backward_over(Asked)
    Asked.calls.clear()
    asked, leaf = torch.ones(2).as_subclass(Asked), torch.ones(2, requires_grad=True)
    backward([asked, leaf * 2], [None, torch.ones(2)])
    backward([leaf * 2], [torch.ones(2)], inputs=[asked])
    assert [func for func, _, _ in Asked.calls] == [torch.autograd.backward] * 2
    assert [args[0][0] is asked for _, args, _ in Asked.calls] == [True, False]
    assert [tuple(kwargs["inputs"] or ()) for _, _, kwargs in Asked.calls] == [(), (asked,)]
    assert leaf.grad is None
    backward([leaf * 2], [torch.ones(2)])
    assert torch.equal(leaf.grad, torch.full((2,), 2.0))


class Saving(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 2 * (x == x)


@pytest.mark.parametrize("savable", [False, True], ids=["leaf", "savable"])
def test_hooks_of_saved_parameters_are_called(savable: bool) -> None:
    parameter, called = nn.Parameter(torch.ones(2)), []
    parameter.register_hook(called.append)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        result = Saving.apply(internals.as_savable(parameter) if savable else parameter)
    result.sum().backward()
    assert torch.equal(parameter.grad, torch.full((2,), 2.0))
    assert len(called) == (savable or not internals.LOSES_HOOKS_OF_SAVED)


def test_dispatch_is_left_out() -> None:
    with Operators() as seen, internals.without_dispatch():
        torch.ones(2).add(1)
    assert seen.seen == []


def test_overrides_are_left_out_and_called_again() -> None:
    x = torch.zeros(2).as_subclass(Named)

    def called() -> list[bool]:
        Named.seen.clear()
        mode.seen.clear()
        torch.neg(x)
        return [torch.neg in seen for seen in (mode.seen, Named.seen)]

    with Functions() as mode:
        assert called() == [True, True]
        with internals.without_subclass_overrides():
            assert called() == [True, False]
            with internals.with_overrides():
                assert called() == [True, True]
        with internals.without_overrides():
            assert called() == [False, False]
            with internals.with_overrides():
                assert called() == [True, True]
        assert called() == [True, True]


def test_functions_and_schemas() -> None:
    assert internals.nn_functions.gelu is F.gelu
    schemas = internals.find_schemas("aten::add")
    assert {"Tensor", "Scalar"} <= {schema.overload_name for schema in schemas}
    assert internals.find_schemas("aten::no_such_operator") == []
    schema = internals.get_schema(torch.ops.aten.add_.Tensor)
    assert [argument.name for argument in schema.arguments] == ["self", "other", "alpha"]
    assert schema.returns[0].alias_info.is_write
    assert internals.get_schema(torch.ops.aten.add.Tensor).returns[0].alias_info is None


def test_lists_of_tensors_are_computed_together() -> None:
    first, second = ([torch.full((2,), float(number + i)) for i in range(3)] for number in (1, 10))
    assert [int(t[0]) for t in internals.add_each(first, second)] == [11, 13, 15]
    assert [int(t[0]) for t in internals.multiply_each(first, 2)] == [2, 4, 6]
    versions = [internals.get_version(t) for t in first]
    internals.add_each_(first, second)
    internals.lerp_each_(first, second, 0.5)
    assert [float(t[0]) for t in first] == [10.5, 12.0, 13.5]
    internals.zero_each_(first)
    assert not any(t.any() for t in first)
    internals.multiply_each_(second, 3)
    assert [internals.get_version(t) for t in first] == [version + 3 for version in versions]
    assert [float(norm) for norm in internals.norm_each([t[:1] for t in second])] == [30, 33, 36]


@pytest.mark.parametrize(
    ("kind", "states", "step"),
    [
        (
            torch.optim.AdamW,
            ("exp_avg", "exp_avg_sq", "step"),
            lambda weight, gradient, first, second, count: internals.step_adamw(
                [weight], [gradient], [first], [second], [], [count.add_(1)],
                lr=0.1, beta1=0.9, beta2=0.999, weight_decay=0.01, eps=1e-8, amsgrad=False, maximize=False,
            ),
        ),
        (
            torch.optim.SGD,
            ("momentum_buffer",),
            lambda weight, gradient, momentum: internals.step_sgd(
                [weight], [gradient], [momentum],
                lr=0.1, momentum=0.9, weight_decay=0.01, dampening=0.0, nesterov=True, maximize=False,
                is_first_step=False,
            ),
        ),
    ],
)  # fmt: skip
def test_fused_optimizers_step_as_their_classes_do(kind: Any, states: tuple[str, ...], step: Any) -> None:
    weight = nn.Parameter(torch.randn(5))
    momentum = {"momentum": 0.9, "nesterov": True} if kind is torch.optim.SGD else {}
    optimizer = kind([weight], lr=0.1, weight_decay=0.01, fused=True, **momentum)
    weight.grad = torch.randn(5)
    optimizer.step()
    copies = [tensor.detach().clone() for tensor in (weight, *(optimizer.state[weight][name] for name in states))]
    step(copies[0], weight.grad, *copies[1:])
    optimizer.step()
    for copy, tensor in zip(copies, (weight, *(optimizer.state[weight][name] for name in states)), strict=True):
        assert torch.equal(copy, tensor.detach())


def test_batch_norm_and_its_backward_pass() -> None:
    x, weight, bias = (torch.randn(shape, requires_grad=True) for shape in ((2, 3, 4), (3,), (3,)))
    expected = F.batch_norm(x, None, None, weight, bias, True, 0.1, 1e-5)
    with torch.no_grad():
        found, mean, rstd, reserved, by = internals.norm_batch(x, weight, bias, None, None, True, 0.1, 1e-5, True)
        gradients = internals.norm_batch_backward(
            by, x, torch.ones_like(x), weight, None, None, mean, rstd, True, 1e-5, [True] * 3, reserved
        )
    assert torch.equal(found, expected)
    for gradient, tensor in zip(gradients, torch.autograd.grad(expected.sum(), (x, weight, bias)), strict=True):
        torch.testing.assert_close(gradient, tensor)


def test_softmax_by_its_operators() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    found = internals.softmax(x, 1, False)
    assert torch.equal(found, x.softmax(1))
    assert torch.equal(internals.log_softmax(x, 1, False), x.log_softmax(1))
    given = torch.randn(3, 4)
    expected = torch.autograd.grad(found, x, given)[0]
    assert torch.equal(internals.softmax_backward(given, found.detach(), 1, torch.float32), expected)


def test_values_are_read_and_gradients_are_checked_by_operators_of_their_own() -> None:
    with Operators() as operators:
        assert torch.ones(()).item() == 1
    assert internals.read_value in operators.seen
    gradients, found = [torch.tensor([2.0]), torch.tensor([float("inf")])], torch.zeros(())
    internals.check_gradients(gradients[:1], found, torch.tensor(0.5))
    assert (float(gradients[0]), float(found)) == (1, 0)
    internals.check_gradients(gradients[1:], found, torch.tensor(0.5))
    assert found == 1


def test_hooks_of_saved_tensors_are_found() -> None:
    def same(tensor: Tensor) -> Tensor:
        return tensor

    for ignores_tracing in (False, True):
        assert internals.find_saved_tensors_hooks(ignores_tracing) is None
        with torch.autograd.graph.saved_tensors_hooks(same, abs):
            assert internals.find_saved_tensors_hooks(ignores_tracing) == (same, abs)
            with torch.autograd.graph.saved_tensors_hooks(abs, same):
                assert internals.find_saved_tensors_hooks(ignores_tracing) == (abs, same)


def test_backward_passes_have_numbers() -> None:
    numbers = []

    class Note(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            numbers.append(internals.find_backward_pass())
            return gradient

    for _ in range(2):
        x = torch.zeros(2, requires_grad=True)
        Note.apply(Note.apply(x)).sum().backward()
    assert internals.find_backward_pass() == -1
    assert numbers[0] == numbers[1] != -1
    assert numbers[2] == numbers[3] != -1
    assert numbers[0] != numbers[2]


def test_a_refusal_of_what_was_changed_in_place_is_told_from_others() -> None:
    x = torch.zeros(2, requires_grad=True)
    read = x.exp()
    result = read.square().sum()
    with torch.no_grad():
        read.add_(1)
    with pytest.raises(RuntimeError) as changed:
        result.backward()
    assert internals.is_changed_in_place(changed.value)
    twice = x.exp().sum()
    twice.backward()
    with pytest.raises(RuntimeError) as freed:
        twice.backward()
    assert not internals.is_changed_in_place(freed.value)


def test_the_node_of_a_backward_pass_is_known_within_it() -> None:
    names = []
    x = torch.zeros(2, requires_grad=True) * 2
    x.register_hook(lambda gradient: names.append(internals.find_backward_node().name()))
    x.exp().sum().backward()
    assert names == ["MulBackward0"]
    assert internals.find_backward_node() is None


def test_nodes_are_numbered_in_the_order_in_which_they_are_made() -> None:
    x = torch.ones(2, requires_grad=True)
    before = internals.find_next_node_number()
    first = x * 2
    between = internals.find_next_node_number()
    second = first.exp()
    numbers = [internals.get_node_number(made.grad_fn) for made in (first, second)]
    assert numbers == [before, between]
    assert before < between < internals.find_next_node_number()


def test_references_tell_who_else_holds_a_tensor_and_its_memory() -> None:
    alone = (torch.zeros(2),)
    counts = internals.count_references(alone, 0)
    same = alone[0]
    assert [after - before for before, after in zip(counts, internals.count_references(alone, 0), strict=True)] == [
        *(0, 0, 1)
    ]
    view = same[:1]
    assert internals.count_references(alone, 0)[1] == counts[1] + 1
    del view
    node = torch.zeros(2, requires_grad=True).exp()
    held = internals.count_references((node,), 0)[0]
    kept = node.grad_fn  # which has saved the result
    assert kept is not None
    assert held >= counts[0]


def test_transforms_wrap_tensors() -> None:
    x = torch.zeros(3, 2)
    assert not internals.is_transformed(x)
    assert internals.find_transform() is None

    def inside(row: Tensor) -> Tensor:
        assert internals.find_transform() is not None
        assert internals.is_transformed(row)
        assert internals.unwrap_transformed(row).shape == x.shape
        return row

    torch.vmap(inside)(x)
    assert internals.find_transform() is None


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("kept", torch.zeros(2))
        self.register_buffer("left", torch.zeros(2), persistent=False)
        self.child = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_modules_register_what_they_own_by_name() -> None:
    part = Part()
    assert of_modules.get_parameters(part) == {"weight": part.weight}
    assert set(of_modules.get_buffers(part)) == {"kept", "left"}
    assert of_modules.get_modules(part) == {"child": part.child}
    for name, getter in (
        (of_modules.PARAMETERS, of_modules.get_parameters),
        (of_modules.BUFFERS, of_modules.get_buffers),
        (of_modules.MODULES, of_modules.get_modules),
    ):
        assert vars(part)[name] is getter(part)
    assert vars(part)[of_modules.NOT_PERSISTENT] == {"left"}
    of_modules.get_buffers(part)["kept"] = replaced = torch.ones(2)
    assert part.kept is replaced


def test_hooks_of_modules_and_tensors() -> None:
    part, x = Part(), torch.zeros(2, requires_grad=True)
    getters = {
        of_modules.FORWARD_HOOKS: (of_modules.get_forward_hooks, part.register_forward_hook),
        of_modules.FORWARD_PRE_HOOKS: (of_modules.get_forward_pre_hooks, part.register_forward_pre_hook),
        of_modules.BACKWARD_HOOKS: (of_modules.get_backward_hooks, part.register_full_backward_hook),
        of_modules.BACKWARD_PRE_HOOKS: (of_modules.get_backward_pre_hooks, part.register_full_backward_pre_hook),
    }
    for name, (getter, register) in getters.items():
        assert vars(part)[name] is getter(part)
        assert not getter(part)
        handle = register(print)
        assert list(getter(part).values()) == [print]
        handle.remove()
        assert not getter(part)
    part.register_forward_hook(print, with_kwargs=True, always_call=True)
    part.register_forward_pre_hook(print, with_kwargs=True)
    flags = (
        (of_modules.FORWARD_HOOKS_WITH_KWARGS, of_modules.get_forward_hooks),
        (of_modules.FORWARD_HOOKS_ALWAYS_CALLED, of_modules.get_forward_hooks),
        (of_modules.FORWARD_PRE_HOOKS_WITH_KWARGS, of_modules.get_forward_pre_hooks),
    )
    for name, getter in flags:
        assert list(vars(part)[name]) == list(getter(part))
    assert of_modules.get_backward_hooks(x) is None
    assert getattr(x, of_modules.POST_ACCUMULATE_GRAD_HOOKS) is None
    x.register_hook(abs)
    x.register_post_accumulate_grad_hook(abs)
    assert list(of_modules.get_backward_hooks(x).values()) == [abs]
    assert list(getattr(x, of_modules.POST_ACCUMULATE_GRAD_HOOKS).values()) == [abs]


def test_hooks_of_all_modules_are_registered_in_the_same_place() -> None:
    registers = (
        nn.modules.module.register_module_forward_hook,
        nn.modules.module.register_module_forward_pre_hook,
        nn.modules.module.register_module_full_backward_hook,
        nn.modules.module.register_module_full_backward_pre_hook,
    )
    for hooks, register in zip(of_modules.HOOKS_OF_ALL_MODULES, registers, strict=True):
        before = list(hooks.values())
        handle = register(print)
        assert list(hooks.values()) == [*before, print]
        handle.remove()
        assert list(hooks.values()) == before


def test_compiled_modules_are_told() -> None:
    part = Part()
    assert not internals.is_compiled(part)
    wrapped = torch.compile(part, backend="eager")
    assert internals.is_compiled(wrapped)
    part.compile(backend="eager")
    assert internals.is_compiled(part)


def test_modules_apply_functions_to_what_they_own() -> None:
    part = Part()
    weight = part.weight
    assert of_modules.apply_to_tensors(part, lambda tensor: tensor.double()) is part
    assert part.weight is weight  # of a new dtype, in place: optimizers hold it
    assert {tensor.dtype for tensor in (part.weight, part.kept, part.left)} == {torch.float64}


def test_modules_load_what_they_own() -> None:
    part, missing = Part(), []
    state = OrderedDict({"at.weight": torch.ones(2), "at.child.other": torch.ones(1)})
    of_modules.load_from_state_dict(part, state, "at.", {}, True, missing, [], [])
    assert part.weight.tolist() == [1, 1]
    assert missing == ["at.kept"]


def test_classes_of_layers() -> None:
    assert all(issubclass(kind, of_modules.ConvNd) for kind in (nn.Conv2d, nn.Conv3d, nn.ConvTranspose3d))
    batch_norms = (nn.BatchNorm1d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.InstanceNorm3d)
    assert all(issubclass(kind, of_modules.NormBase) for kind in batch_norms)
    assert not issubclass(nn.GroupNorm, of_modules.NormBase)
    assert all(issubclass(kind, of_modules.DropoutNd) for kind in (nn.Dropout, nn.Dropout3d, nn.AlphaDropout))
    assert all(issubclass(kind, of_modules.Loss) for kind in (nn.MSELoss, nn.CrossEntropyLoss))


def test_trees_of_arguments() -> None:
    pair = namedtuple("pair", ["x", "y"])
    tree = {"a": [1, (2, None)], "b": pair(3, OrderedDict(c=4))}
    leaves, structure = internals.tree_flatten(tree)
    assert leaves == internals.tree_leaves(tree) == [1, 2, None, 3, 4]
    assert internals.tree_unflatten(leaves, structure) == tree
    assert internals.tree_map(lambda leaf: leaf, tree) == internals.tree_map_only(int, abs, tree) == tree
    again = internals.tree_flatten({"a": [5, (6, 7)], "b": pair(8, OrderedDict(c=9))})[1]
    assert (structure, hash(str(structure))) == (again, hash(str(again)))
    assert {dict, list, tuple, OrderedDict} <= set(internals.SUPPORTED_NODES)
    assert set not in internals.SUPPORTED_NODES
    assert internals.tree_leaves({1}) == [{1}]
    assert internals.pytree.tree_map is internals.tree_map


def test_the_default_group_is_that_of_all_processes() -> None:
    with pytest.raises(ValueError, match="process group has not been initialized"):
        internals.get_default_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = internals.get_default_group()
        assert group is dist.group.WORLD
        assert internals.get_group_name(group) == group.group_name
        gathered = torch.zeros(2)
        internals.gather_into(gathered, torch.ones(2))  # a warning of its name would fail here
        assert gathered.tolist() == [1.0, 1.0]
    finally:
        dist.destroy_process_group()


def test_memory_is_told_by_its_key() -> None:
    tensor, other = torch.zeros(4), torch.zeros(4)
    key = internals.get_storage_key(tensor.untyped_storage())
    assert internals.get_storage_key(tensor[2:].untyped_storage()) == key
    assert internals.get_storage_key(other.untyped_storage()) != key
    alias = torch.empty(0).set_(tensor.untyped_storage(), 1, (2,), (1,))
    assert internals.get_storage_key(alias.untyped_storage()) == key


def test_gradients_of_other_streams_may_be_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    name, told = "set_warn_on_accumulate_grad_stream_mismatch", []
    if torch.__version__ >= torch.torch_version.TorchVersion("2.10"):
        assert hasattr(torch.autograd.graph, name)
    monkeypatch.setattr(torch.autograd.graph, name, told.append, raising=False)
    internals.accept_gradients_of_other_streams()
    assert told == [False]
    monkeypatch.delattr(torch.autograd.graph, name)
    internals.accept_gradients_of_other_streams()  # an older torch warns of nothing


def test_a_process_that_is_no_copy_is_in_no_bad_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    assert internals.is_in_bad_fork() is False
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    assert internals.is_in_bad_fork() is True


@pytest.mark.gpu
def test_a_gpu_is_kept_busy() -> None:
    internals.keep_gpu_busy(1)
    torch.cuda.synchronize()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    internals.keep_gpu_busy(10_000_000)
    internals.end_allocations_to_pool(torch.device("cuda:0"), torch.cuda.graph_pool_handle())  # of no capture
    stop.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(stop) > 1  # 10 ms at 1 GHz; no GPU runs at 10


def test_tensors_without_values_have_a_device_with_its_number() -> None:
    with of_fakes.FakeTensorMode():
        x = torch.empty(2, 3, device="cpu:1")
        assert isinstance(x, of_fakes.FakeTensor)
        assert (x.device, x.cpu().device) == (torch.device("cpu", 1), torch.device("cpu"))
        assert x.fake_device == x.device
        with pytest.raises(RuntimeError, match=r"two (different )?devices"):
            x + torch.empty(2, 3, device="cpu:0")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.uint8])
def test_tensors_without_values_are_made_like_another(dtype: torch.dtype) -> None:
    mode = of_fakes.FakeTensorMode(allow_fallback_kernels=False)
    device = torch.device("cpu", 1)
    memory = torch.empty_strided((2, 3), (1, 2), dtype=dtype, device="meta")
    like = of_fakes.FakeTensor(mode, torch.empty(0, device="meta"), device)
    by_torch, made = of_fakes.FakeTensor(mode, memory, device), of_fakes.make_like_fake(like, memory)
    assert vars(made) == vars(by_torch)  # all that torch writes down of one
    keys = [torch._C._dispatch_keys(one).raw_repr() for one in (made, by_torch)]
    assert keys[0] == keys[1]
    for one in (made, by_torch):
        assert (one.shape, one.stride(), one.dtype, one.device) == ((2, 3), (1, 2), dtype, device)
        assert (one.requires_grad, one.is_leaf, one.fake_mode) == (False, True, mode)
        assert internals.get_storage_key(one.untyped_storage()) == internals.get_storage_key(memory.untyped_storage())
        with mode:
            assert (one + 1).device == device
            assert one.detach().requires_grad_(dtype.is_floating_point).requires_grad is dtype.is_floating_point


def test_modules_change_parameters_by_the_function_that_is_given() -> None:
    layer, swapped = nn.Linear(2, 3), []
    with of_modules.swapping_by(lambda old, new: swapped.append((old.dtype, new.dtype))):
        layer.double()
    assert swapped == [(torch.float32, torch.float64)] * 2
    assert layer.weight.dtype == torch.float32
    assert layer.double().weight.dtype == torch.float64  # by torch's again


def test_modes_are_put_aside() -> None:
    with of_fakes.FakeTensorMode(), Operators() as operators:
        with internals.without_dispatch_modes():
            assert torch.ones(2).tolist() == [1, 1]
        assert operators.seen == []
        assert isinstance(torch.ones(2), of_fakes.FakeTensor)
        assert operators.seen != []


def test_layouts_are_told_by_strides() -> None:
    x = torch.zeros(2, 3, 4, 4, 4)
    last = x.contiguous(memory_format=torch.channels_last_3d)
    assert internals.suggest_memory_format(x) is torch.contiguous_format
    assert internals.suggest_memory_format(last) is torch.channels_last_3d
    assert internals.suggest_memory_format(last[:, :1]) is torch.channels_last_3d
    assert internals.suggest_memory_format(x[:, :1].contiguous()) is torch.contiguous_format


def test_operators_are_overridden_for_a_while() -> None:
    assert "max_pool3d" in internals.list_autocast_operators("AutocastCPU")
    assert "max_pool3d" not in internals.list_autocast_operators("AutocastCUDA")
    assert {"conv3d", "softmax.int"} <= internals.list_autocast_operators("AutocastCUDA")
    x = torch.ones(1, 1, 4, 4, 4, dtype=torch.bfloat16)

    def find_dtypes() -> list[torch.dtype]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return [F.max_pool3d(x, 2).dtype, x.exp().dtype]

    assert find_dtypes() == [torch.float32, torch.bfloat16]
    kernels = {"max_pool3d": None, "exp": lambda value: torch.zeros_like(value, dtype=torch.float64)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it overrides
        with internals.overriding_operators("AutocastCPU", kernels):
            assert find_dtypes() == [torch.bfloat16, torch.float64]
    assert find_dtypes() == [torch.float32, torch.bfloat16]


def test_tensors_without_values_say_what_they_cannot_do() -> None:
    with of_fakes.FakeTensorMode(allow_fallback_kernels=False):
        x = torch.ones(3)
        for ask in (x.sum().item, x.nonzero):
            with pytest.raises(of_fakes.UNFOLLOWABLE) as caught:
                ask()
            assert "aten." in str(caught.value.func)


def test_a_refusal_without_values_is_raised_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with of_fakes.FakeTensorMode():
        first, second = torch.empty(2, 3), torch.empty(4, 5)
        with pytest.raises(RuntimeError):
            first @ second
        assert "failed while attempting to run meta" in caplog.text
        caplog.clear()
        with of_fakes.quiet_fake_tensors(), pytest.raises(RuntimeError):
            first @ second
    assert not caplog.text


def test_lists_of_tensors_without_values_are_taken_at_once() -> None:
    with of_fakes.FakeTensorMode():
        layer = nn.Linear(2, 3)
        layer(torch.ones(1, 2)).sum().backward()
        optimizer = torch.optim.SGD(layer.parameters())
        with Operators() as operators:
            optimizer.step()
            assert not [func for func in operators.seen if "_foreach_" in str(func)]
            with of_fakes.taking_lists():
                optimizer.step()
        assert [func for func in operators.seen if "_foreach_add_" in str(func)]


def test_the_compiler_leaves_out_what_it_is_told_to() -> None:
    compiling: list[bool] = []

    def within() -> None:
        compiling.append(torch.compiler.is_compiling())

    @internals.left_out_of_compilation
    def function(x: Tensor) -> Tensor:
        within()
        return x + 1

    class Counted:
        graphs = 0

        def __call__(self, graph: Any, inputs: Any) -> Any:
            self.graphs += 1
            return graph.forward

    backend = Counted()
    torch.testing.assert_close(function(torch.zeros(2)), torch.ones(2))
    compiled = torch.compile(lambda x: function(x), backend=backend)
    torch.testing.assert_close(compiled(torch.zeros(2)), torch.ones(2))
    assert compiling == [False, False]
    assert backend.graphs == 0  # the addition inside was not followed


@pytest.mark.filterwarnings("ignore:.torch.jit.script.:DeprecationWarning")  # torch's own, for jvp
def test_derivatives_that_are_computed_forward_are_noticed() -> None:
    noticed = []

    def function(x: Tensor) -> Tensor:
        noticed.append(internals.is_forward_mode())
        return 2 * x

    x = torch.ones(2)
    torch.func.jvp(function, (x,), (x,))
    torch.func.jacfwd(function)(x)
    with torch.autograd.forward_ad.dual_level():
        function(x)
    torch.func.vjp(function, x)
    function(x.requires_grad_())
    assert noticed == [True, True, True, False, False]
