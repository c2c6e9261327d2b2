"""Rates of this machine are stored, and measured again if the file is invalid."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from volseg.errors import ConfigError
from volseg.estimate.gpu_kinds import find_kind, name_group
from volseg.estimate.operator_work import describe_kernel, list_tensors
from volseg.estimate.trace import KernelRun
from volseg.profiling import calibration
from volseg.profiling.calibration import calibrate, describe_kind, rates_file_path, read_calibration

MACHINE = {
    "gpu": "NVIDIA H200",
    "torch": "2.11.0",
    "cudnn": 91900,
    "capability": [9, 0],
    "processors": 132,
    "total_memory": 150109880320,
    "date": "2026-11-22",
}
PARTS = ("convolution", "norm", "pointwise")
HOST = {f"{part} {way}": 1e-5 for part in PARTS for way in ("forward", "backward")}
STORED = {
    "version": 2,
    "machine": MACHINE,
    "host": {**HOST, "operator": 5e-6, "triton": 3e-5, "replay": 1e-4, "graph": 1e-6},
    "factors": {"passes, float32": 1.5},
}
VOLUMES = ((1, 8, 64, 64, 64),) * 3
ADDITION = KernelRun("aten.add", torch.float32, 0, 25165824, VOLUMES)


def keep(folder: Path, stored: Any) -> Path:
    file = rates_file_path(MACHINE["gpu"], MACHINE["torch"], folder)
    file.write_text(stored if isinstance(stored, str) else json.dumps(stored), encoding="utf-8")
    return file


def test_what_was_kept_is_read_and_what_never_was_is_measured_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = keep(tmp_path, STORED)
    assert file.name == "NVIDIA-H200-torch-2.11.0.json"
    assert read_calibration(file, MACHINE) == STORED
    assert read_calibration(tmp_path / "none.json", MACHINE) is None
    assert not caplog.records
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert rates_file_path("NVIDIA H200", "2.11.0").parent == tmp_path / "volseg" / "rates"
    with pytest.raises(ConfigError, match="only a GPU can be measured, got cpu"):
        calibrate(torch.device("cpu"), tmp_path)


@pytest.mark.parametrize(
    ("stored", "word"),
    [
        ('{"version": 2, "machine"', "cannot be read"),
        ("[]", "cannot be read"),
        ({**STORED, "version": 0}, "version 0 instead of 2"),
        ({**STORED, "machine": {**MACHINE, "torch": "2.8.0"}}, "torch 2.8.0 instead of 2.11.0"),
        ({**STORED, "machine": {**MACHINE, "gpu": "Tesla T4"}}, "gpu Tesla T4 instead of NVIDIA H200"),
        ({**STORED, "machine": {}}, "cudnn None instead of 91900"),
    ],
)
def test_what_will_not_do_is_measured_anew_with_a_word(
    stored: Any, word: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    assert read_calibration(keep(tmp_path, stored), MACHINE) is None
    assert word in caplog.text
    assert "the GPU is measured again" in caplog.text


def test_a_calibrated_kind_takes_so_many_times_as_long_as_its_table_says() -> None:
    kind, table = describe_kind(STORED), find_kind("h200")
    assert kind.memory == 150109880320
    assert kind.source == "measured here on 2026-11-22 with torch 2.11.0"
    assert kind.seconds(ADDITION) == pytest.approx(1.5 * table.seconds(ADDITION))
    half = replace(ADDITION, dtype=torch.bfloat16)
    assert kind.seconds(half) == table.seconds(half), "no factor was measured"
    assert kind.host_rates()["triton"] == 3e-5


def test_a_gpu_that_nobody_knows_is_compared_with_an_h200() -> None:
    kind = describe_kind({**STORED, "machine": {**MACHINE, "gpu": "NVIDIA X1", "capability": [12, 0]}})
    assert (kind.name, kind.capability, kind.is_measured, kind.measured) == ("NVIDIA X1", (12, 0), True, False)
    assert kind.seconds(ADDITION) == pytest.approx(1.5 * replace(find_kind("h200"), measured=False).seconds(ADDITION))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_timed_is_counted_as_in_a_trace(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "CONVOLUTIONS", ((4, 4, 3),))
    monkeypatch.setattr(calibration, "VOLUMES", ((4, 4),))
    monkeypatch.setattr(calibration, "PRODUCTS", ((5, 6, 7),))
    groups = set()
    for operator, args in calibration._list_calls(dtype, torch.device("cpu")):
        run = describe_kernel(operator, args, {}, list_tensors(args), operator(*args), 0)
        assert run is not None
        assert find_kind("h200").seconds(run) > 0
        groups.add(name_group(run))
    kind = "float32" if dtype is torch.float32 else "half"
    assert groups == {f"products, {kind}", f"passes, {kind}"}
