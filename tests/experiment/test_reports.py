"""The page that a training leaves, however it ends, and that never costs one."""

import math
import shutil

import pytest

from volseg.errors import ConfigError, NonFiniteLossError
from volseg.experiment import train
from volseg.monitoring.run_files import read_times
from volseg.reporting import write_report
from volseg.workflow.hooks import Hook


class EndAt(Hook):
    """End in the second epoch, as Ctrl-C or a fault would."""

    def __init__(self, fault):
        self.fault = fault

    def on_batch_end(self, training, fields):
        if training.epoch == 1:
            raise self.fault


def read_page(config):
    return (config.folder / "report.html").read_text(encoding="utf-8")


def test_a_finished_training_leaves_a_page_with_its_cases(configured):
    config = configured("evaluation.distances=true")
    outcome = train(config)
    page = read_page(config)
    assert ">finished</span>" in page
    assert "Not shown" not in page
    assert f">{outcome.validated.score:.4f}</dd>" in page
    validated = outcome.folder.split().validation
    pictures = outcome.folder.validation / "overlays"
    assert sorted(file.stem for file in pictures.iterdir()) == sorted(validated)
    assert page.count("data:image/jpeg;base64,") == len(validated)
    for heading in ("Curves", "Scores", "Spread over the cases", "Cases to look at closely", "Time", "Next"):
        assert f"<h2>{heading}</h2>" in page
    assert "HD95" in page

    with pytest.raises(ConfigError, match="holds a run already"):
        train(config)
    assert read_page(config) == page  # it is another run's, which was left alone


def test_an_interrupted_training_leaves_one_and_what_came_before_a_resume_counts(configured):
    config = configured()
    with pytest.raises(KeyboardInterrupt):
        train(config, hooks=[EndAt(KeyboardInterrupt())])
    page = read_page(config)
    assert ">interrupted</span>" in page
    assert "--resume" in page
    assert not (config.folder / "report.md").exists()
    assert not (config.folder / "validation").exists()
    outcome = train(config, resume=True)
    parts = read_times(config.folder / "times.json")
    assert len(parts) == 2
    assert ">finished</span>" in read_page(config)
    assert " in 2 parts, as it was resumed" in read_page(config)
    report = (config.folder / "report.md").read_text(encoding="utf-8")
    assert " in 2 parts, as it was resumed" in report
    assert math.fsum(part.seconds for part in parts) > parts[-1].seconds
    assert outcome.validated is not None


def test_a_training_that_failed_says_why(configured):
    config = configured()
    with pytest.raises(NonFiniteLossError):
        train(config, hooks=[EndAt(NonFiniteLossError("the loss is <b>NaN</b>"))])
    page = read_page(config)
    assert ">failed</span>" in page
    assert "The training failed: " in page
    assert "the loss is &lt;b&gt;NaN&lt;/b&gt;" in page


def test_a_report_that_cannot_be_written_costs_no_training(configured, caplog):
    config = configured("training.epochs=1")
    train(config)
    # Folders where the pages would come, and a file where the pictures would.
    for name in ("report.html", "report.md"):
        (config.folder / name).unlink()
        (config.folder / name / "in the way").mkdir(parents=True)
    shutil.rmtree(config.folder / "validation" / "overlays")
    (config.folder / "validation" / "overlays").touch()
    outcome = train(config, resume=True)
    assert outcome.validated is not None
    told = "\n".join(caplog.messages)
    for what in ("report.html was not written", "report.md was not written", "no pictures of cases were drawn"):
        assert told.count(what) == 1
    page = write_report(config.folder, config.folder.parent / "elsewhere.html").read_text(encoding="utf-8")
    assert "No pictures of cases" in page


def test_a_cross_validation_leaves_a_page(cross_validated):
    page = (cross_validated / "report.html").read_text(encoding="utf-8")
    assert ">finished</span>" in page
    assert "3 of 3" in page
    assert page.count("data:image/jpeg;base64,") == 6  # of the three folds' cases all that there are
    for number in range(3):
        assert f"fold {number}" in page
