import json
from pathlib import Path

import pytest

from volseg.data.layouts import load_task
from volseg.data.splits import Split, folds, read_splits, write_splits
from volseg.errors import DataError

PUBLISHED = json.loads((Path(__file__).parent / "msd_task04_folds.json").read_text(encoding="utf-8"))


def test_folds_are_the_published_ones_of_task04():
    """The lists that MONAI's DynUNet pipeline ships, which are nnU-Net's."""
    ids = PUBLISHED["validation_fold0"] + PUBLISHED["train_fold0"]
    assert len(ids) == 260
    first, second, *_ = folds(ids)
    assert list(first.validation) == PUBLISHED["validation_fold0"]
    assert list(first.training) == PUBLISHED["train_fold0"]
    assert list(second.validation) == PUBLISHED["validation_fold1"]


def test_the_first_folds_take_what_does_not_divide():
    assert [len(split.validation) for split in folds(map(str, range(13)))] == [3, 3, 3, 2, 2]


@pytest.mark.parametrize(
    ("ids", "num_folds", "message"),
    [
        ("abc", 5, r"got 5 folds of 3 cases; set split\.num_folds to 3"),
        ("abc", 1, r"need 2 folds or more.*set split\.num_folds to 2"),
        ("abb", 2, "case ids must be unique, but 'b' came twice"),
    ],
)
def test_folds_that_cannot_be(ids, num_folds, message):
    with pytest.raises(DataError, match=message):
        folds(ids, num_folds)


def test_written_splits_are_nnunets_and_read_back(tmp_path):
    splits = folds("abcdefg")
    path = write_splits(tmp_path / "splits_final.json", splits)
    assert json.loads(path.read_text(encoding="utf-8"))[0] == {
        "train": list(splits[0].training),
        "val": list(splits[0].validation),
    }
    assert read_splits(path, "abcdefg") == splits
    assert read_splits(path) == splits
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("no json", "splits.json cannot be read as a split file: "),
        ("{}", r"should be a list of folds, \[\{\"train\""),
        ("[]", "should be a list of folds"),
        ('[["a"]]', r'fold 0 should be \{"train": \[...\], "val": \[...\]\}, got list'),
        ('[{"train": ["a"]}]', r"fold 0 should be .*, got keys \['train'\]"),
        ('[{"train": "a", "val": ["b"]}]', r"fold 0: 'train' should be a list of case ids \(strings\)"),
        ('[{"train": [1], "val": ["b"]}]', r"fold 0: 'train' should be a list of case ids \(strings\)"),
        ('[{"train": ["a"], "val": ["b"]}, {"train": ["a", "b"], "val": ["b"]}]', "fold 1: 'b' stand in training and"),
        ('[{"train": ["a", "a"], "val": ["b"]}]', "fold 0: 'a' stand twice among the training cases; keep each once"),
        ('[{"train": [], "val": ["a"]}]', r"fold 0: a split needs cases to train on, got none \(1 for validation\)"),
        ('[{"train": ["a"], "val": ["hippocampus_1"]}]', "fold 0: 'val' names 'hippocampus_1', not in the task; did"),
    ],
)
def test_bad_split_files(tmp_path, content, message):
    (tmp_path / "splits.json").write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        read_splits(tmp_path / "splits.json", ["a", "b", "hippocampus_001"])


def test_absent_split_file(tmp_path):
    with pytest.raises(DataError, match=r"none\.json cannot be read as a split file"):
        read_splits(tmp_path / "none.json")


def test_long_lists_are_abridged():
    with pytest.raises(DataError, match="'a', 'b', 'c', 'd', 'e' and 2 more stand in training and in validation"):
        Split(training=tuple("abcdefg"), validation=tuple("abcdefg"))


@pytest.mark.real_data
def test_the_real_cases_validate_once_each(msd_task04):
    ids = [case["case"] for case in load_task(msd_task04).training]
    validated = [name for split in folds(ids) for name in split.validation]
    assert sorted(validated) == ids
