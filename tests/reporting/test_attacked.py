"""Run folders with changed values: every report is written, and lists the parts that it leaves out."""

import contextlib
import copy
import json
import math
import random
import shutil
import subprocess
import sys
import warnings

import pytest
import yaml
from typer.testing import CliRunner

from tests.reporting.run_folders import make_crossed, make_run
from volseg.cli import app
from volseg.reporting import write_brief, write_report

FILES = (
    "config.yaml",  # JSON is YAML
    "environment.json",
    "memory.json",
    "replanned.json",
    "split.json",
    "status.json",
    "task.json",
    "times.json",
    "told.json",
    "history.jsonl",
    "validation/summary.json",
)

BROKEN = ("", "{", "[" * 100_000)
"""Content that is neither JSON nor YAML of a config."""

VALUES = (
    None,
    True,
    -1,
    0,
    2**70,
    10**400,
    -1e308,
    1e308,
    math.nan,
    math.inf,
    "",
    "text",
    "\x1b[2J\x00",
    [],
    [1],
    [[]],
    {},
    {"a": 1},
    {"a": {"b": None}},
)


def list_places(content, here=()):
    """Return the path of every value; of a list its first and last one."""
    keys = range(0, len(content), max(1, len(content) - 1)) if isinstance(content, list) else ()
    keys = content if isinstance(content, dict) else keys
    return [here, *(place for key in keys for place in list_places(content[key], (*here, key)))]


def change(content, place, value):
    """Return the content with another value in one place; ``...`` removes it."""
    whole = {"content": copy.deepcopy(content)}
    node, (*path, last) = whole, ("content", *place)
    for key in path:
        node = node[key]
    if value is ...:
        del node[last]
    else:
        node[last] = value
    return whole.get("content", {})


def read_content(file):
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".jsonl":
        return [json.loads(line) for line in text.splitlines()]
    return json.loads(text)


def write_content(file, content):
    if file.suffix == ".jsonl" and isinstance(content, list):
        text = "".join(f"{json.dumps(line)}\n" for line in content)
    else:
        text = content if content in BROKEN else json.dumps(content)
    file.write_text(text, encoding="utf-8")


def attack(folder, names, *, changes=5):
    """Write both reports and read the status after changes of each file; return the failures."""
    draw, failed = random.Random(0), []
    for name in names:
        file = folder / name
        sound = file.read_bytes()
        content = read_content(file)
        every = [(place, value) for place in list_places(content) for value in (..., *VALUES)]
        chosen = draw.sample(every, min(changes, len(every)))
        texts = [(place, value, change(content, place, value)) for place, value in chosen]
        for place, value, changed in [*texts, *(("whole", text, text) for text in BROKEN)]:
            write_content(file, changed)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    write_report(folder, folder.parent / "page.html")
                    write_brief(folder)
                told = CliRunner().invoke(app, ["status", str(folder), "--max-age", "10m"])
                if told.exception is not None and not isinstance(told.exception, SystemExit):
                    raise told.exception
            except Exception as fault:
                failed.append((name, place, value if value is ... else str(value)[:30], repr(fault)[:200]))
        file.write_bytes(sound)
    return failed


@pytest.fixture
def run(tmp_path):
    folder = make_run(tmp_path / "run", cases=3, epochs=2, overlays=False)
    write_content(folder / "replanned.json", {"from": "a", "to": "b"})
    write_content(folder / "config.yaml", yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8")))
    return folder


def test_a_changed_value_keeps_no_report_of_a_run_from_being_written(run):
    assert attack(run, FILES) == []


def test_nor_one_of_a_cross_validation(tmp_path):
    folder = make_crossed(tmp_path / "crossed", cases=3, epochs=2, overlays=False)
    assert attack(folder, ("cross_validation.json", "summary.json")) == []


def test_what_is_left_out_is_told_with_its_reason(run):
    change_file(run / "told.json", ("published", 0, "dice"), 7)
    change_file(run / "memory.json", ("measured", 0, "devices", 0, "used"), "much")
    change_file(run / "times.json", ("parts", 0, "begun"), 1e300)
    page = write_report(run).read_text(encoding="utf-8")
    for words in (
        "The report lacks the section &#39;Published results&#39;: a file in the folder differs from what volseg",
        "The report lacks the section &#39;GPU memory&#39;",
        "No time budget: times.json is damaged: its content differs from what volseg writes.",
    ):
        assert words in page
    for heading in ("Scores", "Curves", "Config"):
        assert f"<h2>{heading}</h2>" in page


@pytest.fixture
def small_disk(tmp_path):
    """Return a folder that is a disk of its own, of 400 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", folder]
    mounted = shutil.which("mount") and subprocess.run(command, check=False, capture_output=True)
    if not mounted or mounted.returncode:
        pytest.skip("a disk of its own cannot be mounted here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def say(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", "volseg", *arguments], capture_output=True, encoding="utf-8", check=False
    )
    return done.returncode, done.stderr.strip()


def test_a_disk_that_is_full_or_takes_nothing_is_one_sentence(small_disk, tmp_path):
    run = make_run(small_disk / "run", cases=3, epochs=2, overlays=False)
    page = write_report(run)
    kept = page.read_bytes()
    with contextlib.suppress(OSError):
        (small_disk / "rest").write_bytes(bytes(400 * 1024))
    status, told = say("report", str(run))
    assert status == 1
    assert f"{page}: No space left on device; free space, or name another folder" in told
    assert len(told.splitlines()) == 1
    assert page.read_bytes() == kept, "the page that was there stays"
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    status, told = say("report", str(run))
    assert status == 1
    assert "Read-only file system; free space, or name another folder" in told
    assert len(told.splitlines()) == 1
    assert say("report", str(run), "-o", str(tmp_path / "page.html")) == (0, "")
    assert say("status", str(run)) == (0, "")


def test_a_run_that_lies_elsewhere_now_is_told_of_from_there(run, tmp_path):
    moved = tmp_path / "another disk" / "kept"
    shutil.copytree(run, moved)
    shutil.rmtree(run)
    page = write_report(moved).read_text(encoding="utf-8")
    assert f"from {moved}" in page
    assert f"volseg train &#39;{moved}/config.yaml&#39;" in page or f"volseg predict &#39;{moved}&#39;" in page
    assert str(run) not in page.replace(str(moved), "")


def change_file(file, place, value):
    write_content(file, change(read_content(file), place, value))
