"""The benchmark of single kernels in small, on the CPU."""

import json
import sys
from pathlib import Path

import pytest
import torch
from kernels import DEVICE, with_kernels

sys.path.insert(0, str(Path(__file__).parents[2] / "workflows" / "benchmarks"))

import kernel_timings as benchmark
from kernel_timings import SHAPES, Shape

DIRECTIONS = ["forward", "input gradient", "weight gradient"]
SMALL = [
    [24, 8, 3, 1, 8],
    [4, 32, [1, 5, 3], 2, [4, 6, 8], False],
    [32, 32, 3, 1, [3, 4, 6], True],
    [40, 40, 1, 1, 4],
]


def measure(tmp_path, part, *options, shapes=None, device="cpu"):
    result, given = tmp_path / "new" / "result.json", [part, "--device", device, *options]
    if shapes is not None:
        (tmp_path / "shapes.json").write_text(json.dumps(shapes), encoding="utf-8")
        given += ["--shapes", str(tmp_path / "shapes.json")]
    benchmark.main([*given, "--result", str(result)])
    return json.loads(result.read_text(encoding="utf-8"))


def test_every_form_of_a_convolution_is_timed_and_equals_torchs(tmp_path):
    told = measure(tmp_path, "convolutions", shapes=SMALL)
    assert (told["left_out"], told["environment"]["libraries"]["torch"]) == ([], torch.__version__)
    padded = ["padded in", "padded out", "padded both"]
    groups = ["pairs", "fours"]
    expected = [[*groups, *padded], [*groups, "padded in"], ["pairs"], padded]
    for row, shape, forms in zip(told["rows"], SMALL, expected, strict=True):
        assert row["shape"][:5] == shape[:5]
        assert row["failed"] == {}
        assert list(row["us"]) == DIRECTIONS
        for direction, times in row["us"].items():
            can_turn = direction != "weight gradient" and shape[2] != 1
            named = ["turned round"] if can_turn else []
            for form in forms:
                named += [form, f"{form}, turned round"] if can_turn and form in groups else [form]
            assert list(times) == ["torch", *named], (shape, direction)
            assert min(times.values()) > 0
            assert max(row["difference"][direction].values()) < 1e-5


@with_kernels
def test_each_reduction_of_a_norm_is_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "BYTES", 2**20)
    rows = measure(tmp_path, "norms", shapes=[[5, 4], [8, 3]], device=DEVICE)["rows"]
    kernels = ["moments", "sums", "sums of two norms"]
    found = [(row["channels"], row["side"], row["kernel"]) for row in rows]
    assert found == [(c, side, kernel) for c, side in ((5, 4), (8, 3)) for kernel in kernels]
    assert all(row["us"] > 0 for row in rows)


def test_no_shape_is_begun_behind_the_seconds(tmp_path):
    told = measure(tmp_path, "convolutions", "--seconds", "-1")
    assert (told["rows"], told["left_out"]) == ([], [str(shape) for shape in SHAPES])


def test_a_form_that_fails_is_named_and_the_others_are_timed(monkeypatch):
    def fail(*_: object) -> torch.Tensor:
        raise RuntimeError("no kernel\nfor it")

    monkeypatch.setattr(benchmark.choice, "compute_in_form", fail)
    [row] = benchmark.measure_convolution(Shape(32, 32, 3, 1, 4), torch.device("cpu"))
    turned = [f"{one}, {form}turned round" for one in DIRECTIONS[:2] for form in ("", "pairs, ", "fours, ")]
    grouped = [f"{one}, {form}" for one in DIRECTIONS for form in ("pairs", "fours")]
    assert row["failed"] == dict.fromkeys([*turned, *grouped], "no kernel")
    assert [list(times) for times in row["us"].values()] == [["torch"]] * 3


def test_shapes_have_names_of_their_own():
    assert len({str(shape) for shape in SHAPES}) == len(SHAPES)
    assert str(Shape(16, 32, (1, 3, 3), 2, (8, 16, 16))) == "16 to 32, 1 x 3 x 3, dilation 2, 8 x 16 x 16"


@pytest.mark.gpu
def test_forms_norms_and_attention_are_recorded_on_a_gpu(tmp_path, monkeypatch):
    [row] = benchmark.measure_convolution(Shape(48, 48, 3, 1, 32), torch.device("cuda"))
    assert row["failed"] == {}
    for direction, times in row["us"].items():
        assert {"torch", "pairs", "padded in", "padded out", "padded both"} <= set(times)
        assert max(row["difference"][direction].values()) < 4 * 2**-8
    monkeypatch.setattr(benchmark, "ATTENTION", {"small": (2, 64, 64, 16, 0, 3), "terms": (2, 64, 64, 16, 2, 3)})
    rows = measure(tmp_path, "attention", device="cuda")["rows"]
    assert [set(row["ms"]) for row in rows] == [
        {"ours, forward", "ours, backward", "torch, forward"},
        {"ours, forward", "ours, backward"},
    ]
