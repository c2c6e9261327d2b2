"""What is relied on of torch's compiler, whose names are private."""

import pytest
import torch

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
