"""The page's Python runs as it stands there."""

import re
from pathlib import Path

import pytest

from volseg.config.loading import load_config
from volseg.data.synthetic import make_task

PAGE = Path(__file__).parents[2] / "docs" / "planning.md"


def test_examples_of_the_page_run(tmp_path, monkeypatch, capsys):
    make_task(tmp_path / "Task00_Synthetic", num_cases=4, num_test=0)
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.M | re.S)
    assert blocks
    for block in blocks:
        exec(compile(block, PAGE.name, "exec"), {})
    patch = capsys.readouterr().out.partition(")")[0].strip("(")
    assert load_config("my_task.yaml").patch.size == tuple(map(int, patch.split(", ")))


@pytest.mark.parametrize("preset", ["unet", "resenc", "vnet", "whole"])
def test_every_preset_is_on_the_page(preset):
    assert f"| `{preset}` |" in PAGE.read_text(encoding="utf-8")
