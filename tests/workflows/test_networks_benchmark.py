"""The benchmark of twelve networks: its rows run, failures become rows, and no row is measured twice."""

import json
import sys

import networks
import networks_rows
import pytest
import torch
from networks_listed import NETWORKS, TUNED
from networks_rows import compare, plot
from traced_graphs import trace_only

from volseg.device import compiler_internals

SMALL = {"network": "UNet", "sides": (16, 8, 8), "small": True, "device": "cpu", "gpu": 0, "number": 0}


def run(monkeypatch, result, *arguments):
    own = ["--device", "cpu", "--small", "--sides", "16", "8", "8", "--turns", "2", "--result", str(result)]
    monkeypatch.setattr(sys, "argv", ["networks.py", *own, *arguments])
    networks.main()
    return json.loads(result.read_text(encoding="utf-8"))


def test_ours_and_the_plain_network_train_alike(monkeypatch):
    monkeypatch.setattr(networks_rows, "WARM_UP", 2)
    monkeypatch.setattr(compiler_internals, "compile_graph", trace_only)
    losses = []
    for name in ("plain", "ours", "recorded, compiled"):
        step = networks_rows.MeasuredStep({**SMALL, **networks_rows.ROWS[name]}, torch.device("cpu"))
        losses.append(step.warm_up()["loss"])
        assert step.time() > 0
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-2)  # bfloat16 has three digits


def test_exactness_is_told_beside_round_off():
    found = networks_rows.check_exactness({**SMALL, "sides": (16, 16, 16)}, torch.device("cpu"))
    assert found["ours_to_plain"]["outputs"] < 1e-4  # float32
    assert found["ours_to_plain"]["gradients"] < 10 * max(1e-6, found["plain_to_float64"]["gradients"])


@pytest.mark.slow  # two processes that import everything
def test_rows_run_in_processes_of_their_own_and_failures_are_rows(monkeypatch, tmp_path):
    result = tmp_path / "networks.json"
    monkeypatch.setitem(networks.ROWS, "plain, channels last", {"kind": "plain", "compile": "no such mode"})
    rows = ["--networks", "UNet", "--rows", "plain", "plain, channels last"]
    found = run(monkeypatch, result, *rows)["networks"]["UNet"]["16 x 8 x 8"]
    assert len(found["plain"]["ms_of_turns"]) == 2
    assert "no such mode" in found["plain, channels last"]["error"]
    # What is there stays: nothing is measured again.
    monkeypatch.setattr(networks, "measure_batch", None)
    again = run(monkeypatch, result, *rows)
    assert again["networks"]["UNet"]["16 x 8 x 8"] == found
    assert len(again["commands"]) == 2
    assert (tmp_path / "networks.svg").exists()


def test_ratios_are_to_the_best_of_each_kind(tmp_path):
    speeds = {
        "plain": 10.0, "plain, channels last": 20.0, "compiled": 40.0, "ours": 30.0, "ours, recorded": 60.0,
        "ours on each GPU alone": 110.0, "ours on 2 GPUs": 104.5,
    }  # fmt: skip
    rows = {name: {"mvoxel_per_s": speed} for name, speed in speeds.items()} | {
        "compiled, channels last": {"error": "x"}
    }
    [found] = compared = compare({"UNet": {"128 x 128 x 128": rows}})
    assert (found["plain by"], found["ours / plain"], found["ours / compiled"]) == ("plain, channels last", 3.0, 1.5)
    assert found["of twice one GPU"] == pytest.approx(0.95)
    assert found["failed"] == ["compiled, channels last"]
    plot(compared, tmp_path / "plot.svg")
    assert "1.50 x compiled" in (tmp_path / "plot.svg").read_text(encoding="utf-8")
    assert (len(TUNED), len(NETWORKS)) == (12, 18)  # twelve that were tuned, six that nobody did
