"""What became of the second stage of a cascade when folders were moved, or the data set was absent."""

import shutil
from pathlib import Path

import pytest
from tiny_trainings import DYNUNET, config_factory

import volseg
from volseg.data import load_task
from volseg.errors import ConfigError, DataError
from volseg.experiment import predict, train, validate
from volseg.experiment.network_plan import load_facts

SECOND = (
    DYNUNET,
    "preprocessing=[{name: Spacing, spacing: [4.0, 4.0, 4.0]}, {name: ZScore}, {name: PreviousStage, labels: [1, 2]}]",
    *("split.validation=fold", "device=cpu", "evaluation.distances=false", "training.validate_every=null"),
)


@pytest.fixture
def second(tmp_path):
    """Return the config of a second stage; the label maps of the first one are the references themselves."""
    configured = config_factory(tmp_path)
    (tmp_path / "first" / "validation").mkdir(parents=True)
    for case in load_task(configured(tmp_path / "run", DYNUNET).data.root).training:
        shutil.copy(case["label"], tmp_path / "first" / "validation" / f"{case['case']}.nii.gz")
    stored = (f"data.previous_stage={tmp_path / 'first'}", f"data.cache={tmp_path / 'cache'}")
    return configured(tmp_path / "run", *SECOND, *stored)


def test_the_new_place_of_the_first_stage_can_be_named(second, tmp_path, caplog):
    """A cascade that was copied to another machine could not predict: its config names the first stage by an absolute
    path, no option took another one, and the error named neither the key nor the second stage. And `volseg validate`
    prepared again what the training had left in the cache, for its task had no channels of the first stage."""
    run = train(second).folder
    first = tmp_path / "first"
    moved = first.rename(tmp_path / "moved")
    image = next(second.data.root.glob("imagesTs/*.nii.gz"))
    for attempt in (lambda: predict(run, image, tmp_path / "out"), lambda: volseg.load(run.path)):
        with pytest.raises(ConfigError, match=r"first one, .*first, is absent; .*--set data\.previous_stage=FOLDER"):
            attempt()
    with pytest.raises(DataError, match=r"no validated label map of 1 of 1 cases.*--set data\.previous_stage=FOLDER"):
        validate(run, overwrite=True)
    with caplog.at_level("INFO"):
        validate(run, overwrite=True, overrides=[f"data.previous_stage={moved}"])
    assert "1 prepared case(s) found" in caplog.text


def test_a_forecast_counts_the_masks_of_the_first_stage(second):
    """With `--channels` and `--classes`, or by what is published, only the channels of the image were counted."""
    assert load_facts(second, channels=1, classes=3).task.num_inputs == 3
    absent = second.with_values(data={"root": Path("Task04_Hippocampus")})
    assert load_facts(absent).task.num_inputs == load_facts(second).task.num_inputs == 3
