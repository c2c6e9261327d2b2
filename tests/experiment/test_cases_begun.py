"""The cases of a training that a copy of the command line's process has begun to prepare."""

import json
import multiprocessing
import os

import pytest
from typer.testing import CliRunner

from volseg import experiment
from volseg.cli import app
from volseg.data.cases_ahead import CasesAhead, can_prepare_ahead
from volseg.experiment.cases import begin_cases

pytestmark = pytest.mark.skipif(not can_prepare_ahead(), reason="needs Linux, two cores and no GPU in use")


def test_a_training_takes_what_was_begun_and_comes_to_the_same(configured, tmp_path, monkeypatch):
    taken = []

    def count(self, collect=CasesAhead.collect):
        taken.append(dict(collect(self)))
        return iter(taken[-1].items())

    monkeypatch.setattr(CasesAhead, "collect", count)
    alone = experiment.train(configured("data.cache=none", f"output={tmp_path / 'alone'}"))
    config = configured("data.cache=none", f"output={tmp_path / 'beside'}")
    with begin_cases(config) as ahead:
        beside = experiment.train(config, ahead=ahead)
        assert not multiprocessing.active_children()
    assert len(taken) == 1
    assert [one.losses for one in beside.history] == [one.losses for one in alone.history]
    told = [
        json.loads((run / "validation" / "summary.json").read_text(encoding="utf-8"))
        for run in (tmp_path / "alone", tmp_path / "beside")
    ]
    assert told[0]["mean"] == told[1]["mean"]


def test_the_command_line_begins_it_and_ends_it(config_file, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(experiment, "train", lambda config, resume, ahead: seen.append(ahead), raising=False)
    monkeypatch.setattr(experiment, "closing_words", lambda outcome: "done", raising=False)
    arguments = ["train", str(config_file), "--no-cache", "-o", str(tmp_path / "run")]
    told = CliRunner().invoke(app, arguments)
    assert told.exit_code == 0, told.output
    assert isinstance(seen[0], CasesAhead)
    assert not multiprocessing.active_children()


def test_none_is_begun_where_a_cache_keeps_them_or_there_is_no_task(configured, tmp_path, monkeypatch):
    monkeypatch.setattr(CasesAhead, "__init__", lambda self, *_: pytest.fail("began"))
    for override in (f"data.cache={tmp_path / 'cache'}", f"data.root={tmp_path / 'nowhere'}"):
        with begin_cases(configured("data.cache=none", override)) as ahead:
            assert ahead is None
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    with begin_cases(configured("data.cache=none")) as ahead:  # one core
        assert ahead is None
