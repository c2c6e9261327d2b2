import pytest

from volseg.config.catalogue import get_public_task, list_public_tasks
from volseg.errors import DataError


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
