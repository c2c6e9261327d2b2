"""Which files are collected for a marker: one that holds such a test and does not say so ends the collection."""

import re

import pytest
from marked_files import SAID, leaves_out, require_said


def test_only_files_that_name_a_marker_are_collected_for_it(tmp_path):
    texts = {
        "test_plain.py": "def test_on_a_gpu(): pass\n",
        "test_gpus.py": "@pytest.mark.multi_gpu\ndef test(): pass\n",
        "test_kernel.py": "from kernels import with_kernels\n",
        "conftest.py": "",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    left = {marker: {name for name in texts if leaves_out(tmp_path / name, marker)} for marker in (*SAID, "not slow")}
    assert left == {
        "gpu": {"test_plain.py", "test_gpus.py"},
        "kernels": {"test_plain.py", "test_gpus.py"},
        "multi_gpu": {"test_plain.py", "test_kernel.py"},
        "not slow": set(),
    }


def test_a_marked_test_in_a_file_that_does_not_say_so_is_refused(tmp_path):
    silent, loud = tmp_path / "test_silent.py", tmp_path / "test_loud.py"
    silent.write_text("from elsewhere import on_a_device\n", encoding="utf-8")
    loud.write_text("pytestmark = pytest.mark.kernels\n", encoding="utf-8")
    require_said([(loud, "kernels")])
    with pytest.raises(pytest.UsageError, match=rf"{re.escape(str(silent))} holds tests marked kernels, and its text"):
        require_said([(loud, "kernels"), (silent, "kernels")])
