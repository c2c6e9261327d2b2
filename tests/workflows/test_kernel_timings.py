"""The benchmark of single kernels in small, on the CPU."""

import json

import kernel_timings as benchmark
import pytest
import torch
from kernel_timings import Shape
from kernels import DEVICE, with_kernels

from volseg.device.convolution import forms

DIRECTIONS = ["forward", "input gradient", "weight gradient"]
SMALL = [[24, 8, 3, 1, 8], [4, 32, [1, 5, 3], 2, [4, 6, 8]], [40, 40, 1, 1, 4]]


def measure(tmp_path, part, *options, shapes=None, device="cpu"):
    result, given = tmp_path / "new" / "result.json", [part, "--device", device, *options]
    if shapes is not None:
        (tmp_path / "shapes.json").write_text(json.dumps(shapes), encoding="utf-8")
        given += ["--shapes", str(tmp_path / "shapes.json")]
    benchmark.main([*given, "--result", str(result)])
    return json.loads(result.read_text(encoding="utf-8"))


def test_each_direction_of_a_convolution_is_timed(tmp_path):
    told = measure(tmp_path, "convolutions", shapes=SMALL)
    assert (told["left_out"], told["environment"]["libraries"]["torch"]) == ([], torch.__version__)
    for row, shape in zip(told["rows"], SMALL, strict=True):
        assert (row["shape"], row["failed"], list(row["us"])) == (shape, {}, DIRECTIONS)
        assert all(list(times) == ["torch"] and times["torch"] > 0 for times in row["us"].values()), (
            "a CPU has no other"
        )


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
    assert (told["rows"], told["left_out"]) == ([], [str(shape) for shape in benchmark.draw_shapes(benchmark.RANDOM)])


def test_a_form_that_fails_is_named_and_torchs_is_timed(monkeypatch):
    def fail(*_: object) -> torch.Tensor:
        raise RuntimeError("no kernel\nfor it")

    monkeypatch.setattr(benchmark.choice, "choose", lambda *_: benchmark.choice.Chosen("pairs", fail, False))
    [row] = benchmark.measure_convolution(Shape(32, 32, 3, 1, 4), torch.device("cpu"))
    assert row["failed"] == {f"{one}, volseg: pairs": "no kernel" for one in DIRECTIONS}
    assert [list(times) for times in row["us"].values()] == [["torch"]] * 3


def test_the_table_of_torchs_convolutions_is_read_as_it_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "TABLE_SIDE", 4)
    monkeypatch.setattr(benchmark, "MOST_PRODUCTS", 8)
    told = measure(tmp_path, "table", shapes=[[[3, 3, 3], [1, 1, 1], [2, 4]], [[1, 3, 3], [1, 2, 2], [2, 4]]])
    assert [row["taps"] for row in told["rows"]] == [[3, 3, 3], [1, 3, 3]]
    monkeypatch.setattr(forms, "TABLE", tmp_path / "new" / "result.json")
    for times in forms.load_table.__wrapped__().values():
        for direction in DIRECTIONS:
            assert times[direction].pop((4, 4)) is None
            assert set(times[direction]) == {(2, 2), (2, 4), (4, 2)}


def test_shapes_have_names_of_their_own():
    shapes = benchmark.draw_shapes(50)
    assert shapes == benchmark.draw_shapes(50), "from a fixed seed"
    assert len({str(shape) for shape in shapes}) == len({*shapes})
    assert str(Shape(16, 32, (1, 3, 3), 2, (8, 16, 16))) == "16 to 32, 1 x 3 x 3, dilation 2, 8 x 16 x 16"


@pytest.mark.gpu
def test_convolutions_are_recorded_on_a_gpu():
    [row] = benchmark.measure_convolution(Shape(48, 48, 3, 1, 64), torch.device("cuda"))
    assert row["failed"] == {}
    for direction, times in row["us"].items():
        assert "torch" in times
        assert max(row["difference"][direction].values()) < 4 * 2**-8
