"""What a user met in `volseg search`."""

import shlex

import pytest
from ready_python import acting_when
from tiny_trainings import DYNUNET, config_factory
from typer.testing import CliRunner

from volseg.cli import app
from volseg.errors import ConfigError
from volseg.experiment import RunFolder, search
from volseg.reporting.several_runs import describe_search, read_search

SETTINGS = (DYNUNET, "split.validation=fold", "device=cpu", "training.iterations=1", "training.validate_every=1")
SPACE = "optimizer.lr: {low: 0.1, high: 0.2}"


@pytest.fixture
def searched(tmp_path):
    """Return a function from a space to what `search` takes first."""
    config_factory(tmp_path)

    def write(space):
        (tmp_path / "search.yaml").write_text(space, encoding="utf-8")
        return tmp_path / "config.yaml", tmp_path / "search.yaml", (*SETTINGS, f"output={tmp_path / 'run'}")

    return write


@pytest.mark.usefixtures("ready_python")
@pytest.mark.timeout(120)
def test_a_config_that_is_edited_meanwhile_changes_no_trial_and_the_next_command_is_of_this_search(searched, tmp_path):
    """Each trial read the config's file again: a search of hours, beside which its user edited the file, compared
    trials of two configs. And the page's command for more trials lacked the metric, so that it was refused."""
    config, over, settings = searched(SPACE)
    before = config.read_text(encoding="utf-8")
    edited = before.replace("lr: 0.3", "lr: 0.3\n  momentum: 0.5")
    has_begun = (tmp_path / "run" / "trial_0.yaml").exists
    with acting_when(has_begun, lambda: config.write_text(edited, encoding="utf-8")):
        search(config, over, settings, trials=2, metric="volume_diff_ml/Anterior", minimize=True, pruner="none")
    assert config.read_text(encoding="utf-8") == edited != before
    momenta = [RunFolder(tmp_path / "run" / f"trial_{n}").config().optimizer.spec().get("momentum") for n in (0, 1)]
    assert momenta == [None, None]

    config.write_text(before, encoding="utf-8")
    [commands] = describe_search(read_search(tmp_path / "run")).sections[-1].blocks
    command = shlex.split(dict(commands.commands)["Try more values:"])
    assert command[-2:] == ["--trials", "4"]
    result = CliRunner().invoke(app, [*command[command.index("search") : -1], "1"], catch_exceptions=False)
    assert (result.exit_code, read_search(tmp_path / "run").results["wanted"]) == (0, 1)
    assert describe_search(read_search(tmp_path / "run")).state == "finished"  # it said: 2 of 1 trials


@pytest.mark.parametrize(
    ("space", "metric", "setting", "message"),
    [
        (SPACE, "hd95/Anterior", "evaluation.distances=false", "no validation gives the metric 'hd95/Anterior'"),
        (SPACE, "nsd/Anterior", "evaluation.tolerance={Posterior: 1.0}", "did you mean .* 'nsd/Posterior'"),
        (SPACE, "lesion_f1/Anterior", "evaluation.lesions=[Posterior]", "did you mean 'lesion_f1/Posterior'"),
        ("split.validation: [fold, none]", "dice_mean", "seed=1", r"search\.yaml: a search compares validations"),
        ("evaluation.distances: [true, false]", "assd/Anterior", "seed=1", r"search\.yaml: no validation gives"),
        ("patch.batch: {low: 2.0, high: 4.0}", "dice_mean", "seed=1", r"patch\.batch: .* whole number, got 2\.7"),
        ("patch.batch: {low: 2, high: 4, step: 0.5}", "dice_mean", "seed=1", r"needed: a whole number, got 2\.5"),
    ],
)
def test_trials_that_could_only_fail_are_not_begun(searched, tmp_path, space, metric, setting, message):
    """Every trial was trained to its end, and failed there for its metric is no number; or at once, for a value
    between two ends that were whole by chance."""
    config, over, settings = searched(space)
    with pytest.raises(ConfigError, match=message):
        search(config, over, [*settings, setting], metric=metric)
    assert not (tmp_path / "run").exists()
