"""Recording of one CUDA graph, simulated where CUDA is not needed."""

import gc
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from volseg.device import graph as graphs
from volseg.device.graph import Graph, RecordedFunction, describe_inputs, read_modes, undisturbed
from volseg.errors import ParallelError


@pytest.fixture
def cuda(monkeypatch):
    """A driver that records its calls; ``fails`` names the calls that raise an error."""
    asked = []
    played = SimpleNamespace(asked=asked, fails=set())

    def play(name, result=None):
        def call(*args, **kwargs):
            asked.append((name, *args, *kwargs.values()))
            if name in played.fails:
                raise RuntimeError(f"{name} failed")
            return result

        return call

    class PlayedGraph:
        def __init__(self):
            for name in ("capture_begin", "capture_end", "replay", "reset", "register_generator_state"):
                setattr(self, name, play(name))

    for name, result in (("set_stream", None), ("set_device", None), ("synchronize", None), ("empty_cache", None)):
        monkeypatch.setattr(graphs.torch.cuda, name, play(name, result))
    monkeypatch.setattr(graphs.torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(graphs.torch.cuda, "current_stream", lambda device: f"the caller's on {device}")
    monkeypatch.setattr(graphs.torch.cuda, "CUDAGraph", PlayedGraph)
    monkeypatch.setattr(graphs.torch.cuda, "graph_pool_handle", lambda: "its pool")
    for name in ("end_allocations_to_pool", "_end_capture_of_generators"):
        monkeypatch.setattr(graphs, name, play(name))
    played.stream = SimpleNamespace(device="cuda:1")
    return played


def test_a_graph_is_recorded_on_its_stream_and_the_caller_goes_on_where_it_was(cuda):
    recorded = Graph(cuda.stream, "a pool", ["a generator"])
    recorded.begin()
    recorded.end()
    assert cuda.asked == [
        ("register_generator_state", "a generator"),
        ("set_stream", cuda.stream),
        ("capture_begin", "a pool", "thread_local"),
        ("capture_end",),
        ("set_stream", "the caller's on cuda:1"),
        ("set_device", 3),
    ]


def record_nothing(graph):
    try:
        graph.begin()
    finally:  # as a run under way ends its part
        graph.end()


@pytest.mark.parametrize("fails", ["capture_begin", "capture_end"])
def test_the_caller_goes_on_where_it_was_also_after_a_failure(cuda, fails):
    recorded = Graph(cuda.stream, generators=["a generator"])
    cuda.fails.add(fails)
    with pytest.raises(RuntimeError, match=f"{fails} failed"):
        record_nothing(recorded)
    assert cuda.asked[-2:] == [("set_stream", "the caller's on cuda:1"), ("set_device", 3)]
    assert cuda.asked.count(("set_device", 3)) == 1
    assert (("end_allocations_to_pool", "cuda:1", "its pool") in cuda.asked) is (fails == "capture_end")
    assert (("_end_capture_of_generators", "cuda:1", ("a generator",)) in cuda.asked) is (fails == "capture_end")


def test_a_function_shares_memory_with_another_and_is_ended_where_it_fails(cuda):
    first = RecordedFunction(lambda x: x + 1, {"x": torch.zeros(2)}, stream=cuda.stream)
    assert ("capture_begin", "its pool", "thread_local") in cuda.asked
    cuda.asked.clear()
    with pytest.raises(ZeroDivisionError):
        RecordedFunction(lambda x: 1 / 0, {"x": torch.zeros(2)}, stream=cuda.stream, shares=first)
    names = [name for name, *_ in cuda.asked]
    assert names == [
        *("synchronize", "empty_cache", "set_stream", "capture_begin", "capture_end", "set_stream", "set_device")
    ]
    assert ("capture_begin", "its pool", "thread_local") in cuda.asked


def test_a_function_that_changes_its_input_is_refused_and_freed(cuda):
    with pytest.raises(ParallelError, match="changes its input in place"):
        RecordedFunction(lambda x: x.add_(1), {"x": torch.zeros(2)}, stream=cuda.stream)
    assert cuda.asked[-1] == ("reset",)


def test_nothing_is_collected_while_a_recording_is_made():
    assert gc.isenabled()
    with undisturbed():
        assert not gc.isenabled()
        with undisturbed():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), undisturbed():
        raise ZeroDivisionError
    assert gc.isenabled()


def test_autocast_goes_on_in_a_recording_without_casts_of_before():
    x, weight = torch.ones(2, 2), nn.Parameter(torch.ones(2, 2))
    with torch.autocast("cpu", torch.bfloat16):
        before = x @ weight
        with torch.no_grad():
            weight.mul_(2)
        assert torch.equal(x @ weight, before)  # autocast's cache: what a recording would read for ever
        with undisturbed():
            found = x @ weight
            assert not torch.is_autocast_cache_enabled()
        assert torch.is_autocast_cache_enabled()
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, 2 * before)


def test_strides_count_where_they_are_asked_for():
    x = torch.zeros(2, 3)
    assert describe_inputs((x,)) == describe_inputs((x.T.contiguous().T,))
    assert describe_inputs((x,), with_strides=True) != describe_inputs((x.T.contiguous().T,), with_strides=True)


@contextmanager
def setting(of, value):
    """Set one of torch's settings in the block."""
    before = getattr(torch, f"get_{of}")()
    getattr(torch, f"set_{of}")(value)
    yield
    getattr(torch, f"set_{of}")(before)


MODES = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "float16": lambda: torch.autocast("cpu", torch.float16),
    "high": lambda: setting("float32_matmul_precision", "high"),
    "medium": lambda: setting("float32_matmul_precision", "medium"),
    "float64": lambda: setting("default_dtype", torch.float64),
}


def test_modes_tell_how_torch_is_set():
    torch.set_float32_matmul_precision(torch.get_float32_matmul_precision())  # said otherwise until it is set once
    before, found = read_modes(), set()
    for mode in MODES.values():
        with mode():
            found.add(read_modes())
        assert read_modes() == before
    assert len(found | {before}) == 1 + len(MODES)


@pytest.mark.gpu
def test_a_recording_under_autocast_reads_the_weights_of_now():
    """A cast of before the recording stayed in autocast's cache, and every replay read it."""
    layer, x = nn.Linear(8, 8, device="cuda"), torch.randn(4, 8, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        layer(x)
        recorded = RecordedFunction(lambda x: layer(x), {"x": x})
    with torch.no_grad():
        layer.weight.mul_(2)
    with torch.autocast("cuda", torch.bfloat16):
        expected = layer(x)
    torch.testing.assert_close(recorded({"x": x}), expected, rtol=0, atol=0)
    recorded.release()


@pytest.mark.gpu
def test_memory_returns_after_a_capture_that_cuda_has_broken():
    """Before torch 2.12 the allocator kept capturing, and kept the memory of a second stream."""
    recorded, other = Graph(torch.cuda.Stream()), torch.cuda.Stream()
    values = torch.ones(2, device="cuda")
    recorded.begin()
    with pytest.raises(RuntimeError):
        values.nonzero()
    with pytest.raises(RuntimeError):
        recorded.end()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["active_bytes.all.current"]
    used = torch.empty(1 << 20, device="cuda")
    used.record_stream(other)
    del used
    torch.cuda.synchronize()
    values.clone()  # the allocator looks at its events
    assert torch.cuda.memory_stats()["active_bytes.all.current"] == before


@pytest.mark.gpu
def test_random_numbers_are_drawn_after_a_capture_that_cuda_has_broken():
    """Generators stayed in the capturing state: "Offset increment outside graph capture encountered unexpectedly"."""
    own, values = torch.Generator("cuda"), torch.ones(2, device="cuda")
    drawn = []
    for graph in (None, Graph(torch.cuda.Stream(), generators=[own]), Graph(torch.cuda.Stream())):
        torch.manual_seed(0)
        own.manual_seed(1)
        if graph is not None:
            graph.begin()
            values.normal_()
            with pytest.raises(RuntimeError):
                values.nonzero()
            with pytest.raises(RuntimeError):
                graph.end()
        drawn.append([torch.rand(4, device="cuda"), torch.rand(4, device="cuda", generator=own)])
    torch.testing.assert_close(drawn[1:], drawn[:1] * 2, rtol=0, atol=0)
