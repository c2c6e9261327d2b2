"""A training with cached cases equals the training that prepares them."""

import re

import pytest
import torch
from typer.testing import CliRunner

from volseg.checkpointing.file import LATEST, load_checkpoint
from volseg.cli import app
from volseg.data.case_store.cache_folder import list_entries
from volseg.errors import ConfigError
from volseg.experiment import train
from volseg.experiment.cross_validation import cross_validate

NUM_CASES = 6
ROOM_FOR_SOME = 0.00025  # GiB, of the 0.0004 that the cases of a fold take


def test_weights_and_scores_are_the_same_cold_warm_and_without(configured, tmp_path, own_cache, read, caplog):
    """Also for any cases on the device: a CPU stores a second copy if it has room."""
    caplog.set_level("INFO", "volseg")
    outcomes = []
    for name, settings in (
        ("without", ["data.cache=none"]),
        ("cold", ["data.keep=device"]),
        ("warm", [f"data.device_limit={ROOM_FOR_SOME}"]),
    ):
        del read[:]
        outcomes.append(train(configured("training.deterministic=true", f"output={tmp_path / name}", *settings)))
        assert len(read) == (0 if name == "warm" else NUM_CASES)
    assert len(list_entries(own_cache)) == NUM_CASES
    states = [load_checkpoint(outcome.folder.checkpoints / LATEST) for outcome in outcomes]
    for outcome, state in zip(outcomes[1:], states[1:], strict=True):
        assert outcome.validated.score == outcomes[0].validated.score
        for name, weight in states[0].model.items():
            assert torch.equal(state.model[name], weight)
        files = [(of.folder.path / "cases.json").read_text(encoding="utf-8") for of in (outcome, outcomes[0])]
        assert files[0] == files[1]
    assert f"cache {own_cache}: 6 prepared case(s) found, 0 added" in caplog.text
    told = re.findall(r"(\d) of (\d) training cases are on cpu", caplog.text)
    assert [there < of for there, of in told] == [False, True]


def test_folds_and_resumes_prepare_nothing_again_unless_the_cache_is_elsewhere(configured, read, tmp_path):
    cross_validate(configured("training.epochs=1"), folds=[0, 1], resume=False)
    assert len(read) == NUM_CASES
    config = configured("training.epochs=2", "output={}".format(configured().folder / "fold_0"), "split.fold=0")
    train(config, resume=True)
    assert len(read) == NUM_CASES
    more = ("training.epochs=3", f"data.cache={tmp_path / 'other'}", "data.cache_limit=1", "data.device_limit=1")
    train(configured(*more, f"output={config.folder}"), resume=True)
    assert len(read) == 2 * NUM_CASES
    assert len(list_entries(tmp_path / "other")) == NUM_CASES


def test_a_folder_that_cannot_be_made_is_an_error_where_it_was_asked_for(configured, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"set data\.cache or VOLSEG_CACHE to another folder"):
        train(configured(f"data.cache={tmp_path / 'file' / 'cache'}"))
    monkeypatch.setenv("VOLSEG_CACHE", str(tmp_path / "file" / "cache"))
    train(configured("training.epochs=1"))
    assert "prepared cases are kept only in memory" in caplog.text


def test_the_command_line_lists_verifies_and_clears(config_file, own_cache, task):
    def run(*arguments):
        result = CliRunner().invoke(app, [*arguments], catch_exceptions=False)
        return result.exit_code, result.output

    arguments = ["train", str(config_file), "--set", "training.epochs=1"]
    assert run(*arguments, "--no-cache")[0] == 0
    assert list_entries(own_cache) == []
    assert run(*arguments, "--output", str(config_file.parent / "again"))[0] == 0
    listed = run("data", "cache", "list")[1]
    assert f"of {task / 'imagesTr'}" in listed
    assert f"in {own_cache}" in listed
    assert run("data", "cache", "verify") == (0, "6 of 6 case(s) are intact\n")
    entry = list_entries(own_cache)[0]
    content = bytearray(entry.path.read_bytes())
    content[1000] ^= 1
    entry.path.write_bytes(content)
    status, said = run("data", "cache", "verify", "--folder", str(own_cache))
    assert status == 1
    assert "was changed after it was written" in said
    assert "5 of 6" in said
    assert "removed 0 case(s)" in run("data", "cache", "clear", "--unused", "1")[1]
    assert "removed 5 case(s)" in run("data", "cache", "clear")[1]
    with pytest.raises(ConfigError, match=r"tiny\.yaml is a file; name the folder of a cache"):
        run("data", "cache", "clear", "--folder", str(config_file))
    with pytest.raises(ConfigError, match="nowhere does not exist; name the folder of a cache"):
        run("data", "cache", "list", "--folder", str(own_cache / "nowhere"))
    assert run("data", "cache", "list", "--folder", "none")[1] == "no cases are stored: the cache is off (none)\n"
