"""What is relied on of torch's compiler, whose names are private."""

import pytest
import torch
from torch import nn
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
    with internals.never_running_plain(3), pytest.raises(internals.find_faults(), match="no such kernel") as caught:
        compiled(torch.ones(1))
    assert isinstance(caught.value.inner_exception, ValueError)


def test_the_number_of_variants_is_limited():
    compiled = torch.compile(lambda x: x + 1, backend=trace_only, dynamic=False)

    def run():
        for size in range(1, 6):
            compiled(torch.ones(size))

    with internals.never_running_plain(3), pytest.raises(internals.find_faults(), match="recompile_limit"):
        run()


def test_breaks_are_counted():
    def look(x):
        return x + 1 if x.sum().item() > 0 else x

    before = internals.count_breaks()
    torch.compile(look, backend=trace_only)(torch.ones(2))
    (reason,) = internals.count_breaks() - before
    assert "item()" in reason
