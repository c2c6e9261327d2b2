"""Behaviour of torch's private names whose change no other test would notice."""

from operator import attrgetter
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from volseg.device import compiler_internals as of_compiler
from volseg.device import fake_internals as of_fakes
from volseg.device import module_internals as of_modules
from volseg.device import torch_internals as internals


def test_views_and_their_bases() -> None:
    x = torch.zeros(4)
    assert internals.get_base(x) is None
    assert internals.get_base(x[:2][:1]) is x
    assert internals.get_base(x[:2].detach()) is None  # although it shares the memory
    assert [internals.is_view(tensor) for tensor in (x, x[:2])] == [False, True]


class Operators(internals.TorchDispatchMode):
    """Write down the operators that run."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_a_change_of_type_is_one_operator() -> None:
    with Operators() as operators:
        torch.zeros(2).to(torch.float16)
    assert operators.seen[-1] is internals.to_copies[0]


def test_hooks_with_settings_are_listed() -> None:
    part, x = nn.ReLU(), torch.zeros(2, requires_grad=True)
    part.register_forward_hook(print, with_kwargs=True, always_call=True)
    part.register_forward_pre_hook(print, with_kwargs=True)
    for name, get_hooks in (
        (of_modules.FORWARD_HOOKS_WITH_KWARGS, attrgetter(of_modules.FORWARD_HOOKS)),
        (of_modules.FORWARD_HOOKS_ALWAYS_CALLED, attrgetter(of_modules.FORWARD_HOOKS)),
        (of_modules.FORWARD_PRE_HOOKS_WITH_KWARGS, of_modules.get_forward_pre_hooks),
    ):
        assert list(vars(part)[name]) == list(get_hooks(part))
    x.register_post_accumulate_grad_hook(abs)
    assert list(getattr(x, of_modules.POST_ACCUMULATE_GRAD_HOOKS).values()) == [abs]


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
    grown = [after - before for before, after in zip(counts, internals.count_references(alone, 0), strict=True)]
    assert grown == [0, 0, 1]
    view = same[:1]
    assert internals.count_references(alone, 0)[1] == counts[1] + 1
    del view
    node = torch.zeros(2, requires_grad=True).exp()
    held = internals.count_references((node,), 0)[0]
    kept = node.grad_fn  # which has saved the result
    assert kept is not None
    assert held >= counts[0]


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


# What is relied on of torch's compiler, whose names are private.


CPU = torch.device("cpu")


@pytest.mark.slow
def test_a_graph_is_compiled_without_graphs_of_cuda():
    if reason := of_compiler.explain_no_compiler(CPU):
        pytest.skip(reason)
    compiled = torch.compile(lambda x: x.sin() + 1, backend=of_compiler.compile_graph, dynamic=False)
    x = torch.linspace(0, 1, 7)
    torch.testing.assert_close(compiled(x), x.sin() + 1)


def test_a_machine_without_a_compiler_is_told(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert "needs a C++ compiler for the CPU" in of_compiler.explain_no_compiler(CPU)
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/g++")
    assert of_compiler.explain_no_compiler(CPU) is None
