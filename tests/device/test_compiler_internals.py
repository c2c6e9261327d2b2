"""What is relied on of torch's compiler, whose names are private."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from traced_graphs import trace_only

from volseg.device import compiler_internals as internals

CPU = torch.device("cpu")


@pytest.mark.slow
def test_a_graph_is_compiled_without_graphs_of_cuda():
    if reason := internals.explain_no_compiler(CPU):
        pytest.skip(reason)
    compiled = torch.compile(lambda x: x.sin() + 1, backend=internals.compile_graph, dynamic=False)
    x = torch.linspace(0, 1, 7)
    torch.testing.assert_close(compiled(x), x.sin() + 1)


def test_a_machine_without_a_compiler_is_told(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert "there is no compiler of it here" in internals.explain_no_compiler(CPU)
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/g++")
    assert internals.explain_no_compiler(CPU) is None


def test_no_fault_is_suppressed():
    def fails(graph, inputs):
        raise ValueError("no such kernel")

    compiled = torch.compile(nn.ReLU(), backend=fails)
    with internals.never_running_plain(3), pytest.raises(internals.compile_errors(), match="no such kernel") as caught:
        compiled(torch.ones(1))
    assert isinstance(caught.value.inner_exception, ValueError)


def test_the_number_of_variants_is_limited():
    compiled = torch.compile(lambda x: x + 1, backend=trace_only, dynamic=False)

    def run():
        for size in range(1, 6):
            compiled(torch.ones(size))

    with internals.never_running_plain(3), pytest.raises(internals.compile_errors(), match="recompile_limit"):
        run()


@pytest.mark.filterwarnings("ignore:.torch.jit")  # which is called deprecated from one torch on
def test_scripted_methods_have_a_type_and_are_watched() -> None:
    scripted, function = torch.jit.script(nn.ReLU()), torch.jit.script(twice)
    assert isinstance(scripted.forward, internals.ScriptMethod)
    heard: list[Any] = []
    with internals.watching_scripts(heard.append):
        assert function(torch.ones(2)).tolist() == [2, 2]
        scripted(torch.ones(2))
    function(scripted(torch.ones(2)))
    assert [script.name for script in heard] == ["twice", "forward"]
    [graph] = internals.list_script_graphs(heard[1])
    assert graph.findAllNodes("aten::relu")


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_graphs_of_scripts_hold_what_they_fork() -> None:
    graphs = internals.list_script_graphs(torch.jit.script(fork_twice))
    assert [len(list(graph.findAllNodes("aten::mul"))) for graph in graphs] == [0, 0, 1]


def twice(x: Tensor) -> Tensor:
    return x * 2


def fork_once(x: Tensor) -> Tensor:
    return torch.jit.wait(torch.jit.fork(twice, x))


def fork_twice(x: Tensor) -> Tensor:
    return torch.jit.wait(torch.jit.fork(fork_once, x))
