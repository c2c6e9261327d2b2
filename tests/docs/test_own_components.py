"""Every block of the pages on own components and fine-tuning runs, with the promised result."""

import shlex
from pathlib import Path

import pytest
import yaml
from documented import ROOT, read_blocks
from tiny_trainings import as_a_new_process
from typer.testing import CliRunner

from tests.experiment.conftest import CONFIG
from volseg.cli import app
from volseg.config.yaml_values import parse_yaml
from volseg.experiment import load_config, train

METADATA = "Metadata-Version: 2.1\nName: tiny-package\nVersion: 0.1\n"


def blocks(page, language):
    return [block.text for block in read_blocks(ROOT / "docs" / page, language)]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with as_a_new_process():
        yield


def run(line):
    result = CliRunner().invoke(app, shlex.split(line)[1:])
    assert result.exit_code == 0, (line, result.output, result.exception)
    return result.output


def test_the_page_about_ones_own_components_runs(tmp_path):
    file, call = blocks("own-components.md", "python")
    (config,), (commands,) = (blocks("own-components.md", kind) for kind in ("yaml", "sh"))
    Path("components.py").write_text(file, encoding="utf-8")
    Path("config.yaml").write_text(config, encoding="utf-8")
    said = "".join(run(line) for line in commands.splitlines())
    assert "TinyNet" in said
    assert "epoch 1: learning rate" in said
    assert (tmp_path / "runs" / "own" / "components.json").exists()

    exec(compile(call, "own-components.md", "exec"), {"__name__": "a_program"})
    plain = ["losses=[{name: DiceCELoss}]", "augmentation={}", "hooks=[]", "preprocessing=[{name: ZScore}]"]
    plain += ["schedule={name: cosine}"]
    train(load_config("config.yaml", [*plain, "network={name: OneLayer}", "output=runs/called"]))


def test_the_page_about_fine_tuning_runs():
    (block,) = blocks("fine-tuning.md", "yaml")
    config = {**CONFIG, "name": "first", "data": {"root": "Task00_Synthetic"}}
    run("volseg data make Task00_Synthetic --cases 6 --tests 0")
    Path("first.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    run("volseg train first.yaml")
    tuned = parse_yaml(block, "fine-tuning.md")
    config = {**config, "name": "tuned", **tuned, "training": {**config["training"], **tuned["training"]}}
    Path("tuned.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    run("volseg train tuned.yaml")
    assert Path("runs/tuned/start.json").exists()
