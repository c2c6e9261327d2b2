"""What torch's private names do that the package relies on; a torch in which one does not fails here, by its name."""

import warnings
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from volseg.device import fake_internals as of_fakes
from volseg.device import module_internals as of_modules
from volseg.device import torch_internals as internals


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
