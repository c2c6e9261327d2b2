"""The examples of docs/data.md: the files that it lists, the manifests that it shows, and what comes of them."""

import doctest
import re
from pathlib import Path

import nibabel
import numpy as np

from volseg.data.layouts import load_task

PAGE = Path(__file__).parents[3] / "docs" / "data.md"
BLOCK = re.compile(r"^```(\w+) ?(\S*)\n(.*?)^```", re.M | re.S)


def test_the_examples_of_the_page_do_what_it_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tried = 0
    for kind, name, text in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        if name == "files":
            for path in map(Path, text.split()):
                path.parent.mkdir(parents=True, exist_ok=True)
                nibabel.save(nibabel.Nifti1Image(np.ones((3, 4, 5), np.uint8), np.eye(4)), path)
        elif name:
            Path(name).write_text(text, encoding="utf-8")
        elif kind == "pycon":
            example = doctest.DocTestParser().get_doctest(text, {"load_task": load_task}, "data.md", str(PAGE), None)
            said: list[str] = []
            doctest.DocTestRunner(verbose=False).run(example, out=said.append)
            assert said == []
            tried += 1
    assert tried == 4
