"""Whatever takes a path takes it as text: strings crashed ten of thirteen calls, one of them after a whole training."""

import importlib
import inspect
import pkgutil
import re
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import volseg
from volseg import data, experiment, planning, reporting, workflow
from volseg.config.loading import require_config
from volseg.data.case_store.preprocessed import prepare
from volseg.data.layouts import find_task
from volseg.errors import ConfigError
from volseg.exchange.nnunet import is_nnunet_model, read_nnunet
from volseg.experiment.building import preprocessing_of

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
    """Return paths as texts: of a task, an image, a config, a trained run, components; ``new()`` gives a free one."""
    folder = tmp_path_factory.mktemp("paths as text")
    config = conftest_config(task, folder)
    outcome = volseg.train(str(config), hooks=[])
    (folder / "own.py").write_text("", encoding="utf-8")
    numbers = count()
    return SimpleNamespace(
        task=str(task),
        image=str(task / "imagesTr" / "synthetic_001.nii.gz"),
        images=str(task / "imagesTs"),
        labels=str(task / "labelsTr"),
        config=str(config),
        loaded=volseg.load_config(str(config)),
        run=str(outcome.folder.path),
        components=str(folder / "own.py"),
        new=lambda suffix="": str(folder / f"new_{next(numbers)}{suffix}"),
    )


def conftest_config(task, folder):
    path = folder / "tiny.yaml"
    text = f"""
name: tiny
data: {{root: "{task}", cache: none}}
output: "{folder / "run"}"
split: {{num_folds: 3}}
preprocessing: [{{name: Orientation}}, {{name: ZScore}}]
patch: {{size: [16, 16, 16]}}
network: {{name: UNet, channels: [4, 8], strides: [2]}}
optimizer: {{name: SGD, lr: 0.01}}
training: {{epochs: 1, iterations: 1}}
"""
    path.write_text(text, encoding="utf-8")
    return path


def make_predictor():
    return volseg.Predictor(model=torch.nn.Conv3d(1, 3, 1), num_classes=3)


def prepare_case(here):
    return prepare(dict(data.load_task(here.task).training[0]), preprocessing_of(here.loaded), keep_reference=True)


def make_checkpoint(here):
    path = here.new(".pt")
    workflow.save_checkpoint(workflow.load_checkpoint(f"{here.run}/checkpoints/latest.pt"), path)
    return path


def write_plan(here):
    planned = experiment.configure(here.task)
    path = here.new(".yaml")
    planning.write_config(planned, path)
    assert path in experiment.format_plan(planned, path)
    return path


def write_splits(here):
    path = here.new(".json")
    data.write_splits(path, data.folds([f"case_{number}" for number in range(5)]))
    return path


def write_space(here):
    path = here.new(".yaml")
    Path(path).write_text("optimizer.lr: [0.1, 0.01]", encoding="utf-8")
    return path


def postprocess(here):
    experiment.determine_postprocessing(here.run)
    predicted = experiment.predict(here.run, here.images, here.new(), postprocessing=False).folder
    return experiment.apply_postprocessing(here.run, str(predicted), here.new())


def plan_and_tell(here):
    machine = experiment.resolve_machine(kind="v100-16")
    words = experiment.plan_words(
        experiment.plan_training(here.loaded, machine), here.config, components=[here.components]
    )
    assert f"volseg train {here.config}" in words.replace("'", "")


def refuse(call, *arguments, kind=ConfigError, match):
    with pytest.raises(kind, match=match):
        call(*arguments)


CALLS = {
    "Checkpoints": lambda here: volseg.Checkpoints(here.new()).folder.name,
    "RunFolder": lambda here: experiment.RunFolder(here.run).config(),
    "Task": lambda here: (
        data.Task(
            name="a", root=here.task, modalities=("MR",), labels={0: "background"}, training=(), test=()
        ).root.name
    ),
    "TensorBoard": lambda here: volseg.TensorBoard(here.new()).folder.name,
    "Testing": lambda here: volseg.Testing(make_predictor(), [prepare_case(here)], here.new())(),
    "Validation": lambda here: volseg.Validation(
        make_predictor(), [prepare_case(here)], {1: "a", 2: "b"}, folder=here.new()
    )(),
    "apply_postprocessing": postprocess,
    "as_volume": lambda here: data.as_volume(np.zeros((1, 2, 2, 2)), np.eye(4), here.image, stored=np.dtype("uint8")),
    "configure": lambda here: experiment.configure(here.task),
    "format_plan": write_plan,
    "cross_validate": lambda here: refuse(volseg.cross_validate, here.config, match="holds a run of one training"),
    "determine_postprocessing": postprocess,
    "evaluate_folders": lambda here: volseg.evaluate_folders(here.labels, here.labels),
    "export": lambda here: experiment.export(here.run, here.new(".zip")),
    "find_task": lambda here: find_task(here.task),
    "is_data_set": lambda here: experiment.is_data_set(here.task) and not experiment.is_data_set(here.config),
    "is_nnunet_model": lambda here: is_nnunet_model(here.run),
    "load": lambda here: [volseg.load(here.run)(here.image), volseg.load([here.run])(here.image)],
    "load_checkpoint": make_checkpoint,
    "load_components": lambda here: (
        volseg.load_components([here.components]),
        volseg.load_components(here.components),
    ),
    "load_config": lambda here: volseg.load_config(here.config, "training.epochs=2"),
    "load_task": lambda here: volseg.load_task(here.task),
    "make_task": lambda here: volseg.make_task(here.new("/Task00_Made"), num_cases=2, num_test=0),
    "repair_task": lambda here: data.repair_task(data.check_task(data.load_task(here.task)), here.new()),
    "plan": lambda here: write_plan(here),
    "plan_run": lambda here: experiment.plan_run(here.task, overrides=[f"output={here.new()}"]),
    "plan_words": plan_and_tell,
    "predict": lambda here: [
        volseg.predict(here.run, here.images, here.new()).require_all(),
        volseg.predict([here.run], [here.image], here.new()).require_all(),
    ],
    "quickstart": lambda here: refuse(experiment.quickstart, here.run, match="holds a run already"),
    "read_nnunet": lambda here: refuse(read_nnunet, here.run, match="is no model folder of nnU-Net 2"),
    "read_splits": lambda here: data.read_splits(write_splits(here)),
    "read_volume": lambda here: [volseg.read_volume(here.image), volseg.read_volume([here.image])],
    "save_checkpoint": make_checkpoint,
    "name_first_stage": lambda here: planning.name_first_stage(here.config),
    "search": lambda here: refuse(
        experiment.search, here.config, write_space(here), match="holds a run of one training"
    ),
    "train": lambda here: refuse(volseg.train, here.config, match="holds a run already"),
    "train_on": lambda here: refuse(experiment.train_on, 99, here.config, match="--gpus 99 asks for"),
    "validate": lambda here: volseg.validate(here.run, output=here.new()),
    "validate_and_format": lambda here: experiment.validate_and_format(here.run, output=here.new()),
    "verify": lambda here: experiment.verify(here.config, num_devices=2),
    "view": lambda here: refuse(partial(experiment.view, cases=["strange"]), here.images, match="strange"),
    "write_brief": lambda here: reporting.write_brief(here.run),
    "write_config": write_plan,
    "write_report": lambda here: reporting.write_report(here.run),
    "write_splits": write_splits,
}


def test_every_callable_that_takes_a_path_is_called_here():
    assert set(find_callables()) - set(CALLS) == set()


@pytest.mark.parametrize("name", sorted(CALLS))
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
