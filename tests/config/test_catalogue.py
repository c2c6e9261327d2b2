"""volseg finds its own configs and public tasks by name, and runs the configs unchanged."""

from pathlib import Path

import pytest

from volseg.config.catalogue import get_public_task, list_public_tasks, list_shipped, shipped_config_path
from volseg.config.loading import load_config
from volseg.errors import ConfigError, DataError
from volseg.experiment.building import check_components

ROOT = Path(__file__).parents[2]


def test_every_config_of_the_source_tree_is_found_by_its_name():
    assert {"quickstart", "task04_cpu", "task04_unet", "task04_vnet", "msd/task09_spleen"} <= {*list_shipped()}
    assert shipped_config_path("msd/task09_spleen") == ROOT / "configs" / "msd" / "task09_spleen.yaml"


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_config_loads_and_names_known_components(path):
    config = load_config(path)
    check_components(config)
    assert config.name == path.stem


def test_another_name_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="no config called 'task4_cpu' comes with volseg; did you mean 'task04_cpu'"):
        shipped_config_path("task4_cpu")


def test_the_ten_tasks_are_listed_in_order():
    assert [task.name[:6] for task in list_public_tasks()] == [f"Task{number:02d}" for number in range(1, 11)]


@pytest.mark.parametrize("name", ["Task09_Spleen", "task09_spleen", "Task09", "Task9", "9", "09", "spleen"])
def test_a_task_is_found_by_any_of_its_names(name):
    task = get_public_task(name)
    assert (task.name, task.modalities, task.num_training) == ("Task09_Spleen", ("CT",), 41)
    assert task.url.endswith("/Task09_Spleen.tar")


def test_an_unknown_task_names_the_nearest():
    with pytest.raises(DataError, match="no public task is called 'Task4_Hippocampus'; did you mean 'Task04_Hippo"):
        get_public_task("Task4_Hippocampus")
    with pytest.raises(DataError, match="no public task is called 'Task'"):
        get_public_task("Task")
