"""Rates of the machine one sits at: kept, and measured anew where the file will not do."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from volseg.errors import ConfigError
from volseg.forecast.calibration.stored import calibrate, describe_kind, find_file, read_calibration
from volseg.forecast.trace import KernelRun

MACHINE = {
    "gpu": "NVIDIA H200",
    "torch": "2.11.0",
    "cudnn": 91900,
    "capability": [9, 0],
    "processors": 132,
    "total_memory": 150109880320,
    "date": "2026-11-22",
}
VOLUME = [1, 8, 64, 64, 64]
PARTS = ("convolution", "norm", "pointwise")
HOST = {f"{part} {way}": 1e-5 for part in PARTS for way in ("forward", "backward")}
STORED = {
    "version": 1,
    "machine": MACHINE,
    "host": {**HOST, "operator": 5e-6, "triton": 3e-5, "replay": 1e-4, "graph": 1e-6},
    "rows": [
        {
            "name": "aten.add",
            "dtype": "float32",
            "flops": 0,
            "bytes_moved": 25165824,
            "shapes": [VOLUME, VOLUME, VOLUME],
            "channels_last": False,
            "stream": 0,
            "seconds": 1e-5,
        }
    ],
    "links": [],
}


def keep(folder: Path, stored: Any) -> Path:
    file = find_file(MACHINE["gpu"], MACHINE["torch"], folder)
    file.write_text(stored if isinstance(stored, str) else json.dumps(stored), encoding="utf-8")
    return file


def test_what_was_kept_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = keep(tmp_path, STORED)
    assert file.name == "NVIDIA-H200-torch-2.11.0.json"
    assert read_calibration(file, MACHINE) == STORED
    assert not caplog.records


def test_what_was_never_kept_is_measured_without_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read_calibration(tmp_path / "none.json", MACHINE) is None
    assert not caplog.records


@pytest.mark.parametrize(
    ("stored", "word"),
    [
        ('{"version": 1, "machine"', "cannot be read"),
        ("[]", "of form list"),
        ({**STORED, "version": 0}, "of form 0, and this is form 1"),
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
    assert "the GPU is measured anew" in caplog.text


def test_the_kind_that_was_measured_speaks_of_its_own_rows() -> None:
    kind = describe_kind(STORED)
    assert kind.memory == 150109880320
    assert kind.source == "measured here on 2026-11-22 with torch 2.11.0"
    volumes = (tuple(VOLUME),) * 3
    assert kind.seconds(KernelRun("aten.add", torch.float32, 0, 25165824, volumes)) == pytest.approx(1e-5)
    assert kind.host_rates().triton == 3e-5


def test_a_gpu_that_nobody_knows_is_as_fast_as_it_was_seen() -> None:
    kind = describe_kind({**STORED, "machine": {**MACHINE, "gpu": "NVIDIA X1", "capability": [12, 0]}})
    assert kind.name == "NVIDIA X1"
    assert kind.capability == (12, 0)
    assert kind.peaks.bandwidth == pytest.approx(25165824 / 1e-5)


def test_a_cpu_cannot_be_measured(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="only a GPU can be measured, got cpu"):
        calibrate(torch.device("cpu"), tmp_path)
    assert not list(tmp_path.iterdir())


def test_rates_are_kept_where_the_system_keeps_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert find_file("NVIDIA H200", "2.11.0").parent == tmp_path / "volseg" / "rates"
