"""A small version of the benchmark of single kernels, on the CPU."""

import json

import kernel_timings as benchmark
import pytest
import torch
from kernel_timings import pad

from volseg.device.convolution import forms

DIRECTIONS = ["forward", "input gradient", "weight gradient"]
SMALL = [pad(24, 8, (3, 3, 3), 1, (8, 8, 8)), pad(4, 32, (1, 5, 3), 2, (4, 6, 8)), pad(40, 40, (1, 1, 1), 1, (4, 4, 4))]


def measure(tmp_path, part, *options):
    result = tmp_path / "new" / "result.json"
    benchmark.main([part, "--device", "cpu", *options, "--result", str(result)])
    return json.loads(result.read_text(encoding="utf-8"))


def test_each_direction_of_a_convolution_is_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "draw_shapes", lambda _: SMALL)
    told = measure(tmp_path, "random")
    assert (told["left_out"], told["environment"]["libraries"]["torch"]) == ([], torch.__version__)
    for row, shape in zip(told["rows"], SMALL, strict=True):
        assert (row["name"], row["failed"], list(row["us"])) == (str(shape), {}, DIRECTIONS)
        assert row["chosen"] == dict.fromkeys(DIRECTIONS)
        assert all(list(times) == ["torch"] and times["torch"] > 0 for times in row["us"].values()), (
            "a CPU has no other"
        )


def test_a_form_that_fails_is_named_and_torchs_is_timed(monkeypatch):
    def fail(*_: object) -> torch.Tensor:
        raise RuntimeError("no kernel\nfor it")

    ours = benchmark.choice.Kernel("pairs", lambda _: True, fail)
    monkeypatch.setattr(benchmark.choice, "TABLES", dict.fromkeys(DIRECTIONS, (ours,)))
    [row] = benchmark.measure_convolution(pad(32, 32, (3, 3, 3), 1, (4, 4, 4)), torch.device("cpu"))
    assert row["failed"] == {f"{one}, pairs": "no kernel" for one in DIRECTIONS}
    assert row["chosen"] == dict.fromkeys(DIRECTIONS, "pairs")
    assert [list(times) for times in row["us"].values()] == [["torch"]] * 3


def test_every_convolution_of_a_network_is_listed(tmp_path):
    found = benchmark.list_shapes(("DynUNet", "ConvNeXtUNet", "HighResNet"), 32, small=True)
    names = {str(shape): calls for shape, calls in found.items()}
    assert names["1 to 4, 3 x 3 x 3, 32 x 32 x 32"] == {"DynUNet": 1, "HighResNet": 1}
    assert any("transposed" in name for name in names)
    assert any("groups" in name for name in names)
    assert any("dilation" in name for name in names)
    for shape in found:
        [row] = benchmark.measure_convolution(shape._replace(sides=(8, 8, 8)), torch.device("cpu"))
        assert row["failed"] == {}


def test_the_table_of_torchs_convolutions_is_read_as_it_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "TABLE_SIDE", 4)
    monkeypatch.setattr(benchmark, "MOST_PRODUCTS", 8)
    monkeypatch.setattr(benchmark, "KERNELS", [([3, 3, 3], [1, 1, 1], [2, 4]), ([1, 3, 3], [1, 2, 2], [2, 4])])
    told = measure(tmp_path, "table")
    assert [row["taps"] for row in told["rows"]] == [[3, 3, 3], [1, 3, 3]]
    monkeypatch.setattr(forms, "TABLE", tmp_path / "new" / "result.json")
    for times in forms.load_table.__wrapped__().values():
        for direction in DIRECTIONS:
            assert times[direction].pop((4, 4)) is None
            assert set(times[direction]) == {(2, 2), (2, 4), (4, 2)}


@pytest.mark.gpu
def test_convolutions_are_recorded_on_a_gpu():
    [row] = benchmark.measure_convolution(pad(48, 48, (3, 3, 3), 1, (64, 64, 64)), torch.device("cuda"))
    assert row["failed"] == {}
    for direction, times in row["us"].items():
        assert "torch" in times
        assert max(row["difference"][direction].values()) < 4 * 2**-8
