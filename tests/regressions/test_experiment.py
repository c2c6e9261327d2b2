"""What users of the release before had written, and what became of it: loops that read checkpoints, launch commands."""

import pytest
import yaml
from tiny_trainings import plain_training
from typer.testing import CliRunner

from tests.experiment.conftest import CONFIG
from volseg import experiment
from volseg.cli import app
from volseg.data.case_store.preparing import prepare_together
from volseg.data.layouts import load_task
from volseg.data.synthetic import make_task
from volseg.errors import DataError
from volseg.workflow import load_checkpoint, save_checkpoint


def test_values_that_were_put_beside_the_state_of_a_training_are_kept(tmp_path):
    """A loop wrote ``{**training.state_dict(), "config": ...}``. A state holds metadata of its own now, empty ones,
    which replaced what lay beside it: the checkpoint was written without the config, and nobody was told."""
    kept = {"config": {"name": "x"}, "remark": 7}
    path = save_checkpoint({**plain_training().state_dict(), **kept}, tmp_path / "mine.pt")
    assert load_checkpoint(path).metadata == kept
    again = save_checkpoint({**load_checkpoint(path).as_checkpoint(), "more": 8}, tmp_path / "more.pt")
    assert load_checkpoint(again).metadata == {**kept, "more": 8}


class ReachedError(Exception):
    pass


@pytest.mark.parametrize(("processes", "expected"), [("2", ("spatial", 1)), ("1", ("none", None))])
def test_one_gpu_of_each_of_several_processes(tmp_path, monkeypatch, processes, expected):
    """``torchrun --nproc-per-node 2 -m volseg train CONFIG --gpus 1`` cut volumes over two processes. Then ``--gpus 1``
    took a spatial config for a choice of kernels, and the job was refused for having no strategy."""
    config = {**CONFIG, "data": {"root": "data"}, "parallel": {"strategy": "spatial"}}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    trained = []

    def note(loaded, **_):
        trained.append((loaded.parallel.strategy, loaded.parallel.devices))
        raise ReachedError

    monkeypatch.setattr(experiment, "train", note)
    monkeypatch.setenv("WORLD_SIZE", processes)
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(ReachedError):
        CliRunner().invoke(app, ["train", str(tmp_path / "tiny.yaml"), "--gpus", "1"], catch_exceptions=False)
    assert trained == [expected]


def test_bad_cases_come_before_whatever_a_step_of_ones_own_raises(tmp_path):
    """A case is checked and prepared in one go. A registered step that raised a KeyError for a sound case ended that at
    once, and the bad cases behind it were not named any more."""
    task = load_task(make_task(tmp_path / "Task00_Synthetic", num_cases=3, num_test=0))

    def preprocess(case):
        raise KeyError(case["case"])

    with pytest.raises(KeyError, match=task.training[0]["case"]):
        prepare_together(task.training, (), task, preprocess, workers=1)
    for case in task.training[1:]:
        case["label"].unlink()
    with pytest.raises(DataError, match=r"^2 case\(s\) cannot be used"):
        prepare_together(task.training, (), task, preprocess, workers=1)
