"""The roofline benchmark in small: on the CPU, and forecast."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "workflows" / "benchmarks"))

import roofline

SMALL = ["--set", "network={name: UNet, channels: [4, 8], strides: [2]}", "--set", "patch.size=[16,16,16]"]


def test_a_step_is_held_against_its_bound_and_against_another(tmp_path, capsys):
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    roofline.main([*SMALL, "--gpu", "h200", "--result", str(first)])
    told = json.loads(first.read_text(encoding="utf-8"))
    rows = {roofline.name(row): row for row in roofline.read_result(first).layers}
    assert told["bound_seconds"] == pytest.approx(sum(row.bound for row in rows.values()))
    assert told["times_bound"] == pytest.approx(told["step_seconds"] / told["bound_seconds"])
    assert set(told["far"]) == {key for key, row in rows.items() if row.times_bound and row.times_bound > 1.5}
    printed = capsys.readouterr().out
    assert f"{len(told['far'])} of {len(rows)} rows take more than 1.5 times their bound:" in printed

    roofline.main([*SMALL, "--steps", "1", "--against", str(first), "--result", str(second)])
    printed = capsys.readouterr().out
    assert f"before {roofline.tell_seconds(told['step_seconds'])}, now " in printed
    assert printed.count(" -> ") == 20, "the largest changes"
    on_cpu = json.loads(second.read_text(encoding="utf-8"))
    assert (on_cpu["bound_seconds"], on_cpu["far"]) == (None, []), "of a CPU no bound is known"
    assert on_cpu["profile"]["source"] == "measured"
