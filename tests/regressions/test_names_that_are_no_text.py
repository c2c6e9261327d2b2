"""Names of files that are not UTF-8, and lone surrogates in JSON, ended a command in a UnicodeEncodeError.

They are refused where they come in, and characters that a terminal cannot show are escaped.
"""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from planted_faults import save, write_manifest
from volume_files import FORMATS, write_dicom

from volseg import experiment
from volseg.checkpointing.folder import RunFolder
from volseg.config.yaml_values import parse_yaml
from volseg.data import load_task
from volseg.data.json_files import read_json
from volseg.data.readers import read_volume
from volseg.errors import ConfigError, DataError, ReaderError
from volseg.evaluation.folders import pair_files
from volseg.experiment.prediction.predicting import resolve_images
from volseg.files import replacing, require_text, require_writable

BAD = os.fsdecode(b"M\xfcller")
REFUSED = r"M\\xfcller.*which is not valid UTF-8; rename it"

pytestmark = pytest.mark.skipif(sys.platform in ("darwin", "win32"), reason="their file systems hold no such names")


def make(root, *patterns, names=("a", "b", BAD)):
    voxels = np.zeros((16, 16, 15), np.uint8)
    voxels[4:9, 4:9, 4:9] = 1
    for name in names:
        for pattern in patterns:
            save(root / pattern.format(name), voxels, np.eye(4))
    return root


def make_msd(root, names=("a", "b", "c"), **changes):
    make(root, "imagesTr/{}.nii.gz", "labelsTr/{}.nii.gz", names=names)
    return write_manifest(root, list(names), [], **changes)


def make_nnunet(root):
    declared = {"channel_names": {"0": "MRI"}, "labels": {"background": 0, "front": 1}, "file_ending": ".nii.gz"}
    make(root, "imagesTr/{}_0000.nii.gz", "labelsTr/{}.nii.gz")
    (root / "dataset.json").write_text(json.dumps(declared), encoding="utf-8")
    return root


DATA_SETS = {
    "a folder": lambda root: make_msd(root / BAD),
    "a case": lambda root: make_msd(root / "Task01", ["a", "b", BAD]),
    "a test case": lambda root: make_msd(root / "Task01", test=[f"imagesTr/{BAD}.nii.gz"]),
    "a case of nnU-Net's": lambda root: make_nnunet(root / "Dataset001"),
    "a pair": lambda root: make(root / "pairs", "images/{}.nii.gz", "labels/{}.nii.gz"),
    "a folder of a case": lambda root: make(root / "folders", "{}/image.nii.gz", "{}/seg.nii.gz"),
    "a label": lambda root: make_msd(root / "Task01", labels={"0": "background", "1": BAD}),
    "a name": lambda root: make_msd(root / "data", name=BAD),
}


@pytest.mark.parametrize("kind", DATA_SETS)
def test_a_data_set_is_refused_before_it_is_read(kind, tmp_path):
    root = DATA_SETS[kind](tmp_path)
    with pytest.raises((ConfigError, DataError), match=f"(?s){REFUSED}"):
        load_task(root, require_files=False)
    with pytest.raises((ConfigError, DataError), match=f"(?s){REFUSED}"):
        experiment.configure(root)


@pytest.mark.parametrize("text", ["\\ud800", "\\uDCFC", "a\\udfffb"])
def test_lone_surrogates_in_json_are_refused_and_pairs_are_read(text, tmp_path):
    file = tmp_path / "dataset.json"
    file.write_text(f'{{"labels": {{"0": "{text}"}}}}', encoding="utf-8")
    with pytest.raises(DataError, match=r"a name in .*dataset\.json is .*, which is not valid UTF-8"):
        read_json(file)
    file.write_text('{"labels": ["\\ud83e\\udde0", "\\u00fc"]}', encoding="utf-8")
    assert read_json(file) == {"labels": ["🧠", "ü"]}
    with pytest.raises(ConfigError, match=r"surrogate|invalid Unicode"):
        parse_yaml(f'name: ["{text}"]', "config.yaml")


def test_images_to_predict_and_folders_to_evaluate_are_refused(tmp_path):
    make(tmp_path, "labels/{}.nii.gz", f"{BAD}/{{}}.nii.gz", names=["a"])
    make(tmp_path, "images/{}.nii.gz", names=["a", BAD])
    for paths in (tmp_path / "images", tmp_path / BAD, tmp_path / "images" / f"{BAD}.nii.gz"):
        with pytest.raises(ConfigError, match=REFUSED):
            resolve_images(paths)
    for pair in (("images", "labels"), ("labels", "images")):
        with pytest.raises(ConfigError, match=REFUSED):
            pair_files(*(tmp_path / folder for folder in pair))


@pytest.mark.parametrize("ending", [".nii.gz", ".mha", ".nrrd"])
def test_a_volume_is_refused_before_itk_ends_the_process(ending, tmp_path):
    FORMATS[f"a{ending}"](tmp_path / f"a{ending}", np.zeros((4, 4, 4), np.int16), np.eye(4))
    file = (tmp_path / f"a{ending}").rename(tmp_path / f"{BAD}{ending}")
    with pytest.raises(ReaderError, match=REFUSED):
        read_volume(file)


def test_a_slice_of_a_series_is_refused(tmp_path):
    write_dicom(tmp_path / "series", np.arange(4 * 4 * 3, dtype=np.int16).reshape(4, 4, 3), np.eye(4))
    first, second, _ = sorted((tmp_path / "series").iterdir())
    bad = first.rename(first.with_name(f"{BAD}.dcm"))
    for path in (tmp_path / "series", second, bad):
        with pytest.raises(ReaderError, match=REFUSED):
            read_volume(path)


def test_folders_and_files_to_write_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=REFUSED):
        RunFolder(tmp_path / BAD / "run").require_free()
    with pytest.raises(ConfigError, match=REFUSED):
        require_writable(tmp_path / BAD)
    with pytest.raises(ConfigError, match=REFUSED), replacing(tmp_path / BAD / "config.yaml"):
        pytest.fail("the block ran")
    assert list(tmp_path.iterdir()) == []


def test_names_are_checked_as_bytes_and_in_nested_values():
    require_text({"a": ["ü", {"🧠": ("b", None, 3)}]}, "nothing")
    for content in (os.fsencode(BAD), {BAD: 1}, {"a": [{"b": BAD}]}):
        with pytest.raises(ConfigError, match=REFUSED):
            require_text(content, "something")


def run(*words, **variables):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG"))}
    command = [sys.executable, "-m", "volseg", *words]
    return subprocess.run(command, capture_output=True, env={**environment, **variables}, check=False, timeout=300)


def test_the_command_line_refuses_a_name(tmp_path):
    ended = run("configure", tmp_path, "-o", os.fsencode(tmp_path / "x") + b"\xfc.yaml")
    assert ended.returncode == 1
    assert rb"x\xfc.yaml', which is not valid UTF-8; rename it" in ended.stderr
    assert b"Traceback" not in ended.stderr


def test_an_ascii_terminal_shows_escapes(tmp_path):
    root = make_msd(tmp_path / "Task01_Good", labels={"0": "background", "1": "für"}, modality={"0": "T2 ü"})
    described = run("data", "info", root, LC_ALL="C", PYTHONUTF8="0")
    assert (described.returncode, described.stderr) == (0, b"")
    assert rb"1 f\xfcr" in described.stdout or "1 für".encode() in described.stdout
    moved = shutil.move(root, os.fsencode(tmp_path) + "/Müller".encode())
    refused = run("data", "info", moved, LC_ALL="C", PYTHONUTF8="0")
    assert refused.returncode == 1
    assert b"this Python decodes names as ascii: set PYTHONUTF8=1" in refused.stderr
    assert b"Traceback" not in refused.stderr
