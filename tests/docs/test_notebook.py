"""The notebook for a first training runs from the first cell to the last, and is stored without outputs."""

import pytest
from documented import ROOT

nbformat = pytest.importorskip("nbformat", reason="needs nbclient and ipykernel, as in the extra dev")
NOTEBOOK = ROOT / "docs" / "first_training.ipynb"


def test_no_output_is_kept():
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    assert [cell.source for cell in cells if cell.get("outputs") or cell.get("execution_count")] == []


def test_every_cell_runs(tmp_path, monkeypatch):
    from nbclient import NotebookClient  # starts a kernel: not for the other test

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    notebook.cells = [
        cell for cell in notebook.cells if "installs from the internet" not in cell.metadata.get("tags", ())
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    said = "\n".join(
        output.get("text", "") for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs
    )
    assert "all 10 cases of Synthetic can be used" in said
    pictures = [output for cell in notebook.cells for output in cell.get("outputs", ()) if "data" in output]
    assert any("image/png" in output.data for output in pictures)
    assert len([*(tmp_path / "predictions").glob("*.nii.gz")]) == 2
    report = (tmp_path / "runs" / "my_task" / "report.md").read_text(encoding="utf-8")
    assert "; epochs 3;" in report
