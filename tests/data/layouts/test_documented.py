"""The examples of docs/data.md (files, manifests, results) are true."""

import doctest
from pathlib import Path

import nibabel
import numpy as np
from documented import ROOT, read_blocks

from volseg.data.layouts import load_task

PAGE = ROOT / "docs" / "data.md"


def test_the_examples_of_the_page_do_what_it_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tried = 0
    for block in read_blocks(PAGE):
        name, text = block.title, block.text
        if name == "files":
            for path in map(Path, text.split()):
                path.parent.mkdir(parents=True, exist_ok=True)
                nibabel.save(nibabel.Nifti1Image(np.ones((3, 4, 5), np.uint8), np.eye(4)), path)
        elif name:
            Path(name).write_text(text, encoding="utf-8")
        elif block.language == "pycon":
            example = doctest.DocTestParser().get_doctest(text, {"load_task": load_task}, "data.md", str(PAGE), None)
            said: list[str] = []
            doctest.DocTestRunner(verbose=False).run(example, out=said.append)
            assert said == []
            tried += 1
    assert tried == 4
