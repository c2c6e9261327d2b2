"""Faults of images that bring something along."""

import os

import volseg
from volseg.experiment.placement.compiled_kernels import _digest_sources


def test_kernels_that_came_with_an_image_are_found_by_its_training(tmp_path, monkeypatch):
    """The note beside them went by the times of volseg's files, of which an image's layers keep whole seconds.

    An image that was pushed and pulled found no note of what was compiled into it, and its trainings compiled again
    beside their reading.
    """
    source = tmp_path / "volseg" / "__init__.py"
    other = source.parent / "device" / "few_taps.py"
    other.parent.mkdir(parents=True)
    for file in (source, other):
        file.write_text("value = 1\n", encoding="utf-8")
        os.utime(file, ns=(1, 1_700_000_000_123_456_789))
    monkeypatch.setattr(volseg, "__file__", str(source))
    built = _digest_sources()
    os.utime(other, ns=(1, 1_700_000_000_000_000_000))
    assert _digest_sources() == built
    other.write_text("value = 2\n", encoding="utf-8")
    os.utime(other, ns=(1, 1_700_000_000_000_000_000))
    assert _digest_sources() != built, "an editable installation changes without a new version"
    other.write_text("value = 1\n", encoding="utf-8")
    assert _digest_sources() == built
    other.rename(other.with_name("many_taps.py"))
    assert _digest_sources() != built
