"""The benchmark of the norms' reductions in small."""

import json
import sys
from pathlib import Path

import pytest
from kernels import DEVICE, with_kernels

sys.path.insert(0, str(Path(__file__).parents[2] / "workflows" / "benchmarks"))

import norm_reductions

from volseg.device import triton_tiles


@with_kernels
def test_each_kernel_is_timed_for_each_size_and_number_of_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(norm_reductions, "BYTES", 2**20)
    result, before = tmp_path / "new" / "reductions.json", triton_tiles.STAGES
    told = ["--device", DEVICE, "--shapes", "5x4", "8x3", "--kinds", "prelu", "--stages", "1", "3"]
    norm_reductions.main([*told, "--result", str(result)])
    rows = json.loads(result.read_text(encoding="utf-8"))["rows"]
    kernels = ["moments", "sums", "sums of two norms"]
    found = [(row["stages"], row["channels"], row["side"], row["kernel"]) for row in rows]
    assert found == [(s, c, side, kernel) for s in (1, 3) for c, side in ((5, 4), (8, 3)) for kernel in kernels]
    assert all(row["us"] > 0 for row in rows)
    assert before == triton_tiles.STAGES
