"""Trainings whose cases have weights, of the config or of a table."""

import json
from collections import Counter

import pytest
from training_hooks import At, press_ctrl_c

from volseg.data import load_task
from volseg.errors import ConfigError, DataError
from volseg.experiment import train
from volseg.experiment.cases import choose_cases
from volseg.workflow import Hook

GROWTH = ("patch.growth=[{until: 0.5, size: [8, 8, 8]}]", "training.iterations=20", "training.validate_every=null")


class Seen(Hook):
    """Note the cases of each batch."""

    def __init__(self):
        self.cases = []

    def on_batch_end(self, training, fields):
        self.cases.append((training.epoch, tuple(fields["image"].shape[2:]), tuple(fields["case"])))


@pytest.fixture
def tabled(task, tmp_path, configured):
    """Return a function from the column ``weight`` to a config whose data set is a table."""

    def write(*weights, settings=(), name="weight"):
        known = load_task(task)
        rows = [
            f"{case['case']},{case['image']},{case['label']},{weight}"
            for case, weight in zip(known.training, weights, strict=True)
        ]
        labels = {"labels": {str(value): name for value, name in known.labels.items()}}
        (tmp_path / "dataset.json").write_text(json.dumps(labels), encoding="utf-8")
        (tmp_path / "cases.csv").write_text("\n".join([f"case,image,label,{name}", *rows]), encoding="utf-8")
        return configured(f"data.root={tmp_path / 'cases.csv'}", *settings)

    return write


def weights_of(config):
    return [case.get("weight") for case in choose_cases(config).training]


def test_a_table_and_a_config_give_weights(configured, tabled):
    names = [case["case"] for case in choose_cases(configured("split.validation=none")).training]
    everything = ("split.validation=none",)
    assert weights_of(tabled(2, "", "0.5", 1, "1e-3", 3, settings=everything)) == [2, None, 0.5, 1, 0.001, 3]
    assert weights_of(tabled(*"123456", name="height", settings=everything)) == [None] * 6
    later = f"data.weights={{'*': 2, {names[1]}: 0, {names[2]}: 0.25}}"
    assert weights_of(configured(*everything, later)) == [2, 0.25, 2, 2, 2]  # one of weight 0 is not prepared
    assert weights_of(tabled(*"234567", settings=(*everything, f"data.weights.{names[0]}=9"))) == [9, 3, 4, 5, 6, 7]


def test_weights_that_cannot_be_are_refused_with_their_names(configured, tabled):
    with pytest.raises(
        ConfigError, match=r"data\.weights names 'synthetic_01', 'x\*', which fit no case; did you mean"
    ):
        choose_cases(configured("data.weights={synthetic_01: 1, 'x*': 2}"))
    for wrong in ("-1", ".nan", ".inf", "much"):
        with pytest.raises(ConfigError, match=r"data\.weights\.case_7"):
            configured(f"data.weights={{case_7: {wrong}}}")
    for wrong in ("-1", "nan", "inf", "70kg"):
        with pytest.raises(DataError, match=rf"the weight of case \w+ is '{wrong}'; needed: a finite number from 0 on"):
            choose_cases(tabled(1, 1, wrong, 1, 1, 1))
    with pytest.raises(DataError, match="all 4 training cases have weight 0: "):
        choose_cases(configured("data.weights={'*': 0}"))
    misspelt = tabled(*"111111", name="weights")
    with pytest.raises(DataError, match="column 'weights'; rename it to 'weight'"):
        choose_cases(misspelt)


def test_a_training_draws_by_weight_and_goes_on_with_the_same_batches(configured, caplog):
    """Interrupted in the epoch after its patches grew, from cases of a cache that the first training filled."""
    names = [case["case"] for case in choose_cases(configured()).training]
    weights = f"data.weights={{{names[0]}: 4, {names[1]}: 0}}"
    whole, half = Seen(), Seen()
    with caplog.at_level("INFO"):
        train(configured(*GROWTH, weights, "training.epochs=2"), hooks=[whole])
    assert "patches are drawn by weights of cases: 1 of weight 0, 2 of weight 1, 1 of weight 4" in caplog.text
    assert [entry[:2] for entry in whole.cases] == [(0, (8, 8, 8))] * 20 + [(1, (16, 16, 16))] * 20
    counts = Counter(case for *_, cases in whole.cases for case in cases)
    assert counts.keys() == {names[0], names[2], names[3]}
    assert counts[names[0]] > counts[names[2]] + counts[names[3]]

    again = configured(*GROWTH, weights, "training.epochs=2", f"output={configured().folder.parent / 'again'}")
    with pytest.raises(KeyboardInterrupt):
        train(again, hooks=[half, At(1, 7, press_ctrl_c)])
    rest = Seen()
    train(again, resume=True, hooks=[rest])
    assert [*half.cases, *rest.cases] == whole.cases


def test_other_weights_do_not_prepare_cases_again_and_do_not_go_on(tabled, caplog):
    config = tabled(1, 2, 1, 1, 1, 1, settings=("training.epochs=1",))
    train(config)
    with pytest.raises(DataError, match=r"weights of cases .*task\.json: \w+ 2 -> 1, \w+ 1 -> 0\.5\. Restore"):
        train(tabled(1, 1, 0.5, 1, 1, 1, settings=("training.epochs=2",)), resume=True)
    caplog.clear()
    with caplog.at_level("INFO"):
        train(tabled(1, 1, 0.5, 1, 1, 1, settings=(f"output={config.folder.parent / 'other'}",)))
    assert "6 prepared case(s) found" in caplog.text
