"""The page that a training leaves, however it ends, and that never costs one."""

import html
import math
import re
import shlex
import shutil
from pathlib import Path

import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from training_hooks import At, raising

from volseg.data import load_task
from volseg.data.mock_msd import make_mock_task
from volseg.errors import ConfigError, NonFiniteLossError
from volseg.experiment import load_config, train
from volseg.monitoring.run_files import read_times
from volseg.reporting import write_report


def read_page(config):
    return (config.folder / "report.html").read_text(encoding="utf-8")


def test_a_finished_training_leaves_a_page_with_its_cases(configured, true_pictures):
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
    for file in pictures.iterdir():
        with Image.open(file) as picture:
            assert min(picture.size) >= 384
    events = EventAccumulator(str(config.folder / "tensorboard"), size_guidance={"images": 0}).Reload()
    shown = [image for tag in events.Tags()["images"] if tag != "train/patches" for image in events.Images(tag)]
    assert len(shown) == 4  # two cases, after each of two epochs
    assert all(min(image.width, image.height) >= 512 for image in shown)
    for heading in ("Curves", "Scores", "Spread over the cases", "Cases to look at closely", "Time", "Next"):
        assert f"<h2>{heading}</h2>" in page
    assert "HD95" in page

    with pytest.raises(ConfigError, match="holds a run already"):
        train(config)
    assert read_page(config) == page  # it is another run's, which was left alone


def test_an_interrupted_training_leaves_one_and_what_came_before_a_resume_counts(configured):
    config = configured()
    with pytest.raises(KeyboardInterrupt):
        train(config, hooks=[At(1, 1, raising(KeyboardInterrupt))])
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


def test_a_run_that_was_moved_goes_on_where_it_lies_as_its_page_says(configured, tmp_path):
    config = configured()
    with pytest.raises(KeyboardInterrupt):
        train(config, hooks=[At(1, 1, raising(KeyboardInterrupt))])
    moved = tmp_path / "moved here"
    config.folder.rename(moved)
    page = html.unescape(write_report(moved).read_text(encoding="utf-8"))
    (command,) = re.findall(r"volseg train (.+?)</pre>", page)
    file, option, place, resume = shlex.split(command)
    assert (option, resume) == ("-o", "--resume")
    outcome = train(load_config(Path(file), [f"output={place}"]), resume=True)
    assert outcome.folder.path == moved
    assert [record.epoch for record in outcome.history] == [0, 1]
    assert not config.folder.exists()


def test_a_training_that_failed_says_why(configured):
    config = configured()
    with pytest.raises(NonFiniteLossError):
        train(config, hooks=[At(1, 1, raising(NonFiniteLossError("the loss is <b>NaN</b>")))])
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


def test_pictures_show_the_channel_that_the_config_names(configured, tmp_path):
    folder = make_mock_task(tmp_path / "twin", "Task05_Prostate", num_cases=5, num_test=0)
    task = load_task(folder)
    assert task.modalities == ("T2", "ADC")
    one = ["training.epochs=1", "training.iterations=1", "training.validate_every=1", f"data.root={folder}"]
    drawn = {}
    for channel in ("0", "ADC"):
        config = configured(*one, f"logging.channel={channel}", f"output={tmp_path / channel}")
        train(config)
        events = EventAccumulator(str(tmp_path / channel / "tensorboard"), size_guidance={"images": 0}).Reload()
        overlays = sorted((tmp_path / channel / "validation" / "overlays").iterdir())
        shown = [events.Images(tag)[0].encoded_image_string for tag in sorted(events.Tags()["images"])]
        drawn[channel] = [*shown, *(file.read_bytes() for file in overlays)]
    # The two networks are the same: what differs is what is seen behind their lines.
    assert len(drawn["0"]) == len(drawn["ADC"]) >= 2
    assert all(one != other for one, other in zip(*drawn.values(), strict=True))
    for wrong in ("2", "PD", "-1", "t2"):
        if wrong == "-1":
            with pytest.raises(ConfigError, match=r"logging\.channel"):
                configured(f"logging.channel={wrong}")
            continue
        with pytest.raises(ConfigError, match=r"by number or name, got .*; there are 0 \(T2\), 1 \(ADC\)"):
            train(configured(*one, f"logging.channel={wrong}", f"output={tmp_path / 'refused'}"))
    assert not (tmp_path / "refused").exists()


def test_a_cross_validation_leaves_a_page(cross_validated):
    page = (cross_validated / "report.html").read_text(encoding="utf-8")
    assert ">finished</span>" in page
    assert "3 of 3" in page
    assert page.count("data:image/jpeg;base64,") == 6  # of the three folds' cases all that there are
    for number in range(3):
        assert f"fold {number}" in page
