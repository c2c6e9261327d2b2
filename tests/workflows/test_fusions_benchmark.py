"""The benchmark of fusions in small, on the CPU."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "workflows" / "benchmarks"))

import fusions as benchmark


def test_each_fusion_is_left_out_once(tmp_path, capsys):
    result = tmp_path / "fusions.json"
    small = ["--device", "cpu", "--small", "--sides", "32", "32", "32", "--turns", "1"]
    benchmark.main([*small, "--networks", "UNet", "--fusions", "sums", "--result", str(result)])
    rows = json.loads(result.read_text(encoding="utf-8"))["networks"]["UNet"]
    assert list(rows) == ["all", "sums"]
    for row in rows.values():  # bfloat16 rounds at other places
        assert row["loss"] == pytest.approx(rows["all"]["loss"], rel=1e-2)
        assert row["ms"] > 0
    assert "without sums: " in capsys.readouterr().out
