"""Files of a run folder that somebody damaged: one typed error that names the file, in every verb that reads it."""

import pytest

from volseg.errors import DataError
from volseg.experiment import predict, train, validate


@pytest.fixture
def outcome(configured):
    return train(configured("training.epochs=1", "training.iterations=1"))


DAMAGED = {
    "empty": b"",
    "cut": b'{"name": "Ta',
    "no text": b"\xff\xfe\x00\x00",
    "a list": b"[]",
    "null": b"null",
    "nothing in it": b"{}",
    "labels are none": b'{"name": "a", "modalities": ["MRI"], "labels": null}',
    "labels are a list": b'{"name": "a", "modalities": ["MRI"], "labels": [1, 2]}',
    "a label is no number": b'{"name": "a", "modalities": ["MRI"], "labels": {"0": "b", "x": "c"}}',
    "a label is no name": b'{"name": "a", "modalities": ["MRI"], "labels": {"0": "b", "1": null}}',
    "no modality": b'{"name": "a", "modalities": [], "labels": {"0": "b", "1": "c"}}',
    "nested": b"[" * 100_000,
}


def test_a_damaged_task_or_split_is_named_by_every_verb(outcome, task, configured):
    images = [task / "imagesTs"]
    verbs = {
        "task.json": [lambda: predict(outcome.folder, images), lambda: validate(outcome.folder, overwrite=True)],
        "split.json": [
            lambda: validate(outcome.folder, overwrite=True),
            lambda: train(configured("training.epochs=2", "training.iterations=1"), resume=True),
        ],
    }
    for name, calls in verbs.items():
        file = outcome.folder.path / name
        sound = file.read_bytes()
        for content in DAMAGED.values():
            file.write_bytes(content)
            for call in calls:
                with pytest.raises(DataError, match=name):
                    call()
        file.unlink()
        for call in calls:
            with pytest.raises(DataError, match=name):
                call()
        file.write_bytes(sound)
    assert validate(outcome.folder, overwrite=True).score >= 0
