"""A training always writes its report and heartbeat, however it ends, and they never end a training."""

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

from volseg import Hook
from volseg.data import load_task
from volseg.data.mock_msd import make_mock_task
from volseg.errors import ConfigError, NonFiniteLossError
from volseg.experiment import RunFolder, load_config, train
from volseg.monitoring.heartbeat import Heartbeat
from volseg.monitoring.run_files import read_times
from volseg.parallel.processes.progress import report_progress
from volseg.reporting import write_report


def read_page(config):
    return (config.folder / "report.html").read_text(encoding="utf-8")


def test_a_finished_training_leaves_a_page_with_its_cases(configured, true_pictures):
    config = configured("evaluation.distances=true", "logging={}")
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
    for heading in ("Curves", "Scores", "Spread over the cases", "Best and worst cases", "Time", "Next"):
        assert f"<h2>{heading}</h2>" in page
    assert "HD95" in page

    with pytest.raises(ConfigError, match=r"continue it with volseg train --resume, or choose another"):
        train(config)
    assert read_page(config) == page  # it is another run's, which was left alone


def test_an_interrupted_training_leaves_one_by_which_it_goes_on_also_where_it_was_moved(configured, tmp_path):
    config, moved = configured(), tmp_path / "moved here"
    with pytest.raises(KeyboardInterrupt):
        train(config, hooks=[At(1, 1, raising(KeyboardInterrupt))])
    assert ">interrupted</span>" in read_page(config)
    assert RunFolder(config.folder).status().state == "interrupted"
    assert not (config.folder / "report.md").exists()
    assert not (config.folder / "validation").exists()
    config.folder.rename(moved)
    page = html.unescape(write_report(moved).read_text(encoding="utf-8"))
    (command,) = re.findall(r"volseg train (.+?)</pre>", page)
    file, option, place, resume = shlex.split(command)
    assert (option, resume) == ("-o", "--resume")
    outcome = train(load_config(Path(file), [f"output={place}"]), resume=True)
    assert outcome.folder.path == moved
    assert not config.folder.exists()
    assert [record.epoch for record in outcome.history] == [0, 1]
    assert outcome.validated is not None
    parts = read_times(moved / "times.json")
    assert len(parts) == 2
    assert math.fsum(part.seconds for part in parts) > parts[-1].seconds
    page = (moved / "report.html").read_text(encoding="utf-8")
    assert ">finished</span>" in page
    for told in (page, (moved / "report.md").read_text(encoding="utf-8")):
        assert " in 2 parts, as the training was resumed" in told


def test_a_report_that_cannot_be_written_costs_no_training(trained, configured, caplog):
    config = configured()
    shutil.copytree(trained.folder.path, config.folder)
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
        logging = f"logging={{channel: {channel}, loggers: [tensorboard]}}"
        config = configured(*one, logging, f"output={tmp_path / channel}")
        train(config)
        events = EventAccumulator(str(tmp_path / channel / "tensorboard"), size_guidance={"images": 0}).Reload()
        overlays = sorted((tmp_path / channel / "validation" / "overlays").iterdir())
        shown = [events.Images(tag)[0].encoded_image_string for tag in sorted(events.Tags()["images"])]
        drawn[channel] = [*shown, *(file.read_bytes() for file in overlays)]
    # The two networks are the same: what differs is what is seen behind their lines.
    assert len(drawn["0"]) == len(drawn["ADC"]) >= 2
    assert all(one != other for one, other in zip(*drawn.values(), strict=True))
    with pytest.raises(ConfigError, match=r"logging\.channel"):
        configured("logging.channel=-1")
    for wrong in ("2", "PD", "t2"):
        with pytest.raises(ConfigError, match=r"number or name .*, got .*; the channels are 0 \(T2\), 1 \(ADC\)"):
            train(configured(*one, f"logging.channel={wrong}", f"output={tmp_path / 'refused'}"))
    assert not (tmp_path / "refused").exists()


def test_a_cross_validation_leaves_a_page(cross_validated):
    page = (cross_validated / "report.html").read_text(encoding="utf-8")
    assert ">finished</span>" in page
    assert "3 of 3" in page
    assert page.count("data:image/jpeg;base64,") == 6  # of the three folds' cases all that there are
    for number in range(3):
        assert f"fold {number}" in page


class Fails(Hook):
    """Fail after the first epoch's validation, and after a resume within the second epoch; keep the statuses."""

    def __init__(self, folder):
        self.folder, self.seen, self.state = folder, [], None

    def on_validation_begin(self, training):
        self.seen.append(self.folder.status())

    def on_epoch_end(self, training, record):
        self.seen.append(self.folder.status())
        raise NonFiniteLossError("the loss is <b>NaN</b>")

    def on_batch_end(self, training, fields):
        if (training.epoch, training.position) == (1, 2):  # behind a checkpoint of the first epoch
            self.state = training.state()
            raise RuntimeError("something of the user's")


def test_a_run_says_how_far_it_is_how_it_failed_and_how_it_went_on(configured):
    config = configured()
    folder, hook = RunFolder(config.folder), Fails(RunFolder(config.folder))
    with pytest.raises(NonFiniteLossError):
        train(config, hooks=[hook])
    begun, validated = hook.seen
    assert (begun.state, begun.epoch, begun.batch) == ("validating", 0, 3)
    assert (validated.state, validated.epoch, validated.epochs, validated.batches) == ("training", 1, 2, 3)
    assert validated.loss is not None
    assert validated.score is not None
    failed = folder.status()
    assert (failed.state, failed.message) == ("failed", "NonFiniteLossError: the loss is <b>NaN</b>")
    page = read_page(config)
    for told in (">failed</span>", "The training failed: ", "the loss is &lt;b&gt;NaN&lt;/b&gt;"):
        assert told in page
    assert [line.epoch for line in folder.history()] == [1]

    with pytest.raises(RuntimeError, match="something of the user's"):
        train(config, resume=True, hooks=[hook])
    assert folder.status().message == "RuntimeError: something of the user's"
    seconds, waited = hook.state.seconds
    assert seconds > waited > 0  # a run that goes on from here has not waited longer than it took

    train(config, resume=True)
    assert folder.status().state == "finished"
    # The checkpoint was written before the fault: the first epoch ran twice, and the report lists it once.
    assert [(line.epoch, line.step) for line in folder.history()] == [(1, 3), (2, 6)]
    parts = folder.times()
    assert [part.begun for part in parts] == sorted({part.begun for part in parts})
    for part in parts:
        assert {"start", "reading", "preparing", "building", "training", "waiting for data"} <= {*part.spans}
        assert all(seconds >= 0 for seconds in part.spans.values())
        assert math.fsum(part.spans.values()) == pytest.approx(part.seconds), "a second is counted twice, or not at all"
    assert ["final validation" in part.spans for part in parts] == [False, False, True]
    assert "writing" in parts[-1].spans


def test_the_thread_writes_when_the_work_goes_on_and_is_silent_when_it_hangs(tmp_path):
    folder = RunFolder(tmp_path)
    signs = Heartbeat(every_seconds=0.001)
    with signs.writing(tmp_path):
        report_progress("read", item="case_7")
        while folder.status().message != "read, case_7":  # the thread's next look
            pass
        before = folder.status_file.stat().st_mtime_ns
        looks = Heartbeat(every_seconds=0.001)
        with looks.writing(tmp_path / "another"):  # its thread looks as often meanwhile, and sees nothing new
            pass
        assert folder.status_file.stat().st_mtime_ns == before
    assert folder.status().state == "finished"
