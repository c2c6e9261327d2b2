"""The page about training shows configs that are accepted, and Python that runs."""

import re
from pathlib import Path

import pytest

from volseg.config.base import validated
from volseg.config.loading import load_config
from volseg.config.schema import ExperimentConfig
from volseg.config.shipped import find_shipped
from volseg.config.yaml_values import parse_yaml
from volseg.experiment.building import check_components

PAGE = (Path(__file__).parents[1] / "docs" / "training.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, flags=re.M | re.S)
SPLITS = re.findall(r"^\| `(\{.*?\})` \|", PAGE, flags=re.M)


@pytest.mark.parametrize("text", [text for kind, text in BLOCKS if kind == "yaml"] + [f"split: {s}" for s in SPLITS])
def test_a_part_of_a_config_is_accepted(text):
    base = load_config(find_shipped("quickstart"), ["data.root=x"]).model_dump()
    part = parse_yaml(text, "the page")
    assert part
    merged = {key: {**base[key], **value} if isinstance(value, dict) else value for key, value in part.items()}
    check_components(validated(ExperimentConfig, {**base, **merged}, "the page"))


def test_the_page_has_all_kinds_of_split():
    assert len(SPLITS) == 5


@pytest.mark.parametrize("code", [text for kind, text in BLOCKS if kind == "python"])
def test_the_python_runs(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "training.md", "exec"), {"__name__": "page"})
