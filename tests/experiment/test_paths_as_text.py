"""Every parameter for a path accepts text, and is typed so for mypy: text crashed ten of thirteen calls."""

import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest
import torch

import volseg
from volseg import data
from volseg.config.loading import require_config
from volseg.errors import ConfigError

GIVEN = {"Finding", "RepairedTask", "NnunetModel", "Problem", "Remark"}
"""What functions return; nobody makes them of paths of his own."""


def find_callables() -> dict[str, object]:
    """Return the public functions and classes of volseg with a path parameter, by name."""
    packages = [volseg, *(importlib.import_module(each.name) for each in pkgutil.walk_packages(
        volseg.__path__, "volseg.") if each.ispkg and each.name != "volseg.cli")]  # fmt: skip
    named = {name: getattr(package, name) for package in packages for name in getattr(package, "__all__", ())}
    return {name: each for name, each in named.items() if callable(each) and list_paths(each) and name not in GIVEN}


def list_paths(called: object) -> dict[str, str]:
    try:
        parameters = inspect.signature(called).parameters.values()
    except ValueError:  # a builtin
        return {}
    return {each.name: str(each.annotation) for each in parameters if re.search(r"\bPath\b", str(each.annotation))}


@pytest.mark.parametrize("name", sorted(find_callables()))
def test_a_path_may_be_text_by_its_annotation(name):
    called = find_callables()[name]
    if called is data.Task:  # a dataclass, whose attribute is a path, whatever it is made of
        return
    assert [each for each, annotation in list_paths(called).items() if not re.search(r"\bstr\b", annotation)] == []


def make_predictor():
    return volseg.Predictor(model=torch.nn.Conv3d(1, 3, 1), num_classes=3)


def refuse(call, *arguments, kind=ConfigError, match):
    with pytest.raises(kind, match=match):
        call(*arguments)


@pytest.mark.parametrize("made", ["Checkpoints", "Testing", "Validation"])
def test_a_folder_that_cannot_be_is_refused_before_anything_is_computed(tmp_path, made):
    (tmp_path / "file").write_text("", encoding="utf-8")
    make = {
        "Checkpoints": volseg.Checkpoints,
        "Testing": lambda folder: volseg.Testing(make_predictor(), [], folder),
        "Validation": lambda folder: volseg.Validation(make_predictor(), [], {1: "a"}, folder=folder),
    }[made]
    refuse(make, str(tmp_path / "file" / "run"), match=f"written to, because {tmp_path / 'file'} is not a folder")
    refuse(make, 3, match="an output folder must be a path, such as 'runs/first', got 3")


def test_what_is_no_config_is_refused():
    refuse(require_config, {"name": "a"}, match=r"or the path of a YAML file; got \{'name': 'a'\}")
    assert isinstance(require_config(Path(__file__).parents[2] / "configs" / "quickstart.yaml"), object)
