"""Whatever takes a path takes it as text: strings crashed ten of thirteen calls, one of them after a whole training."""

import importlib
import inspect
import pkgutil
import re
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import volseg
from volseg import data, experiment, planning, reporting, workflow
from volseg.config.loading import require_config
from volseg.errors import ConfigError

GIVEN = {"Finding", "RepairedTask", "NnunetModel", "Problem", "Remark"}
"""What functions return; nobody makes them of paths of his own."""


def find_callables() -> dict[str, object]:
    """Return what the packages of volseg name in public and what takes a path, by name."""
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


@pytest.fixture(scope="module")
def here(task, tmp_path_factory):
    """Return paths as texts: of a task, an image, a config, a trained run; ``new()`` gives a free one."""
    from tests.experiment.conftest import write_config  # not the fixture: it is made anew for each test

    folder = tmp_path_factory.mktemp("paths as text")
    config, numbers = write_config(task, folder), count()
    (folder / "own.py").touch()
    return SimpleNamespace(
        task=str(task),
        image=str(task / "imagesTr" / "synthetic_001.nii.gz"),
        labels=str(task / "labelsTr"),
        config=str(config),
        run=str(volseg.train(str(config)).folder.path),
        components=str(folder / "own.py"),
        new=lambda suffix="": str(folder / f"new_{next(numbers)}{suffix}"),
    )


def make_predictor():
    return volseg.Predictor(model=torch.nn.Conv3d(1, 3, 1), num_classes=3)


def write_plan(here):
    planned, path = experiment.configure(here.task), here.new(".yaml")
    planning.write_config(planned, path)
    assert path in experiment.format_plan(planned, path)


def copy_checkpoint(here):
    workflow.save_checkpoint(workflow.load_checkpoint(f"{here.run}/checkpoints/latest.pt"), here.new(".pt"))


def postprocess(here):
    experiment.determine_postprocessing(here.run)
    predicted = experiment.predict(here.run, here.image, here.new(), postprocessing=False).folder
    experiment.apply_postprocessing(here.run, str(predicted), here.new())


def refuse(call, *arguments, kind=ConfigError, match):
    with pytest.raises(kind, match=match):
        call(*arguments)


CALLS = {
    "checkpoints": copy_checkpoint,
    "components": lambda here: volseg.load_components(here.components),
    "cross-validation": lambda here: refuse(volseg.cross_validate, here.config, match="holds a run of one training"),
    "evaluation": lambda here: volseg.evaluate_folders(here.labels, here.labels),
    "export": lambda here: experiment.export(here.run, here.new(".zip")),
    "loaded model": lambda here: [volseg.load(run)(here.image) for run in (here.run, [here.run])],
    "made task": lambda here: volseg.make_task(here.new("/Task00_Made"), num_cases=2, num_test=0),
    "plan": write_plan,
    "postprocessing": postprocess,
    "predictions": lambda here: volseg.predict([here.run], [here.image], here.new()).require_all(),
    "processes": lambda here: refuse(experiment.train_on, 99, here.config, match="--gpus 99 asks for"),
    "quickstart": lambda here: refuse(experiment.quickstart, here.run, match="holds a run already"),
    "repaired task": lambda here: data.repair_task(data.check_task(data.load_task(here.task)), here.new()),
    "report": lambda here: [reporting.write_brief(here.run), reporting.write_report(here.run)],
    "run folder": lambda here: experiment.RunFolder(here.run).config(),
    "training": lambda here: refuse(volseg.train, here.config, match="holds a run already"),
    "validation": lambda here: experiment.validate_and_format(here.run, output=here.new()),
    "verification": lambda here: experiment.verify(here.config, num_devices=2),
    "volume": lambda here: [volseg.read_volume(here.image), volseg.read_volume([here.image])],
}


@pytest.mark.parametrize("name", CALLS)
def test_a_path_may_be_text(here, name):
    CALLS[name](here)


@pytest.mark.parametrize("made", ["Checkpoints", "Testing", "Validation"])
def test_a_folder_that_cannot_be_is_refused_before_anything_is_computed(tmp_path, made):
    (tmp_path / "file").write_text("", encoding="utf-8")
    make = {
        "Checkpoints": volseg.Checkpoints,
        "Testing": lambda folder: volseg.Testing(make_predictor(), [], folder),
        "Validation": lambda folder: volseg.Validation(make_predictor(), [], {1: "a"}, folder=folder),
    }[made]
    refuse(make, str(tmp_path / "file" / "run"), match=f"cannot be written to, as {tmp_path / 'file'} is no folder")
    refuse(make, 3, match="an output folder is a path, such as 'runs/first', got 3")


def test_what_is_no_config_is_refused():
    refuse(require_config, {"name": "a"}, match=r"or the path of a YAML file; got \{'name': 'a'\}")
    assert isinstance(require_config(Path(__file__).parents[2] / "configs" / "quickstart.yaml"), object)
