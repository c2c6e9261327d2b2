"""Cases from the cache equal cases prepared without it, whatever happened to either."""

import importlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
from digests import digest
from monai.data import MetaTensor

from volseg.data.case_store import cache_folder, case_cache
from volseg.data.case_store.cache_folder import FileMemory, list_entries, remove_entries, verify_entries
from volseg.data.case_store.case_cache import CaseCache
from volseg.data.case_store.preparing import prepare_together
from volseg.data.case_store.preprocessed import DamagedCaseError, StoredCase, write_case
from volseg.data.case_store.volume_cache import VolumeCache
from volseg.data.layouts import load_task
from volseg.data.patches import PatchBatches
from volseg.data.synthetic import make_task
from volseg.errors import ConfigError, DataError
from volseg.experiment import own_components
from volseg.experiment.own_components import REGISTRIES, load_components
from volseg.files import choose_cache_folder
from volseg.transforms.preprocessing import build_preprocessing

pytestmark = pytest.mark.usefixtures("ready_python")

STEPS = [{"name": "Orientation"}, {"name": "Spacing", "spacing": [1.0, 1.2, 1.0]}, {"name": "ZScore"}]
NUM_CASES, NUM_TRAINING = 5, 3


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_task(tmp_path_factory.mktemp("data") / "Task00_Synthetic", num_cases=NUM_CASES, num_test=0)


@pytest.fixture
def task(made, tmp_path):
    """Return a task whose files a test may change."""
    return load_task(shutil.copytree(made, tmp_path / made.name))


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache"


def prepared_by(task, folder=None, *, steps=STEPS, training=NUM_TRAINING, **options):
    preprocessing = build_preprocessing(steps)
    cache = None if folder is None else CaseCache(folder, task, preprocessing, **options)
    return prepare_together(task.training[:training], task.training[training:], task, preprocessing, cache=cache)


def assert_same(prepared, expected):
    for fact in ("order", "fingerprints", "remarks"):
        assert getattr(prepared, fact) == getattr(expected, fact)
    for side in ("training", "validation"):
        for case, wanted in zip(getattr(prepared, side), getattr(expected, side), strict=True):
            assert (case["case"], case.get("reference_file")) == (wanted["case"], wanted.get("reference_file"))
            for field in wanted.keys() & {"image", "label", "reference"}:
                assert case[field].dtype == wanted[field].dtype
                assert torch.equal(case[field].as_subclass(torch.Tensor), wanted[field].as_subclass(torch.Tensor))
                if side == "validation":
                    assert case.keys() - {"mapped"} == wanted.keys() - {"mapped"}
                    assert case[field].meta.keys() == wanted[field].meta.keys()
                    for key, value in wanted[field].meta.items():
                        assert np.array_equal(case[field].meta[key], value), key
    ours, theirs = (
        PatchBatches(VolumeCache(of.training), (12, 14, 10), 2, 4, foreground=0.5).epoch(1)
        for of in (prepared, expected)
    )
    for batch, wanted in zip(ours, theirs, strict=True):
        assert all(torch.equal(batch[name], wanted[name]) for name in ("image", "label"))
        assert batch["case"] == wanted["case"]


def test_cold_warm_and_without_a_cache_are_the_same_bits(task, folder, read):
    without = prepared_by(task)
    assert_same(prepared_by(task, folder), without)
    del read[:]
    assert_same(prepared_by(task, folder), without)
    assert read == []
    assert folder.stat().st_mode & 0o077 == 0  # patients are for their user's eyes only
    assert (folder / "CACHEDIR.TAG").read_bytes().startswith(b"Signature: 8a477f597d28d172789f06886806bc55")


def change_a_voxel(path):
    """Change one voxel, and leave the file's date as it was."""
    before = path.stat()
    image = nibabel.load(path)
    voxels = np.asarray(image.dataobj).copy()
    place = tuple(np.argwhere(voxels == voxels.max())[0])
    voxels[place] = 1 if voxels[place] != 1 else 2
    nibabel.save(type(image)(voxels, image.affine, image.header), path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns


@pytest.mark.parametrize(("field", "settled"), [("image", True), ("label", False)])
def test_a_changed_voxel_is_seen_though_the_date_is_kept(task, folder, field, settled, monkeypatch):
    if settled:  # as if the files had lain there for long, so that their digests are remembered
        monkeypatch.setattr(cache_folder, "YOUNG_NS", -(10**18))
    before = prepared_by(task, folder)
    assert any((folder / "files").glob("*.json")) is settled
    change_a_voxel(task.training[0][field])
    now = prepared_by(task, folder)
    assert_same(now, prepared_by(task))
    assert not torch.equal(now.training[0][field], before.training[0][field])
    assert len(list_entries(folder)) == NUM_CASES + 1


def test_a_file_is_digested_again_once_it_has_changed(tmp_path, monkeypatch):
    file, folder = tmp_path / "image.nii", tmp_path / "cache"
    memory = FileMemory(folder / "files")
    file.write_bytes(b"voxels")
    found = memory.digest_images([file])
    assert not folder.exists()  # it may be changed again within a tick of the clock
    monkeypatch.setattr(cache_folder, "YOUNG_NS", -(10**18))
    assert memory.digest_images([file]) == found
    assert folder.stat().st_mode & 0o077 == 0  # patients are stored there later
    with monkeypatch.context() as patched:
        patched.setattr(cache_folder, "file_digest", None)
        assert memory.digest_images([file]) == found
        (remembered,) = folder.glob("files/*.json")
        remembered.write_text("{", encoding="utf-8")
        with pytest.raises(TypeError):
            memory.digest_images([file])
    before = file.stat()
    deadline = time.monotonic() + 60
    while file.stat().st_ctime_ns == before.st_ctime_ns:  # the clock of some file systems ticks every 10 ms, or 2 s
        assert time.monotonic() < deadline
        file.write_bytes(b"Voxels")
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert memory.digest_images([file]) != found


def other_code(monkeypatch, tmp_path):
    assert {code.name for code in case_cache.OWN_CODE} == {"data", "transforms"}
    copies = tuple(shutil.copytree(code, tmp_path / "code" / code.name) for code in case_cache.OWN_CODE)
    (copies[1] / "preprocessing.py").write_text("# another resampling\n", encoding="utf-8")
    monkeypatch.setattr(case_cache, "OWN_CODE", copies)


CHANGES = {
    "parameter": {"steps": [{**STEPS[1], "spacing": [1.0, 1.2, 1.1]}]},
    "step": {"steps": STEPS[:2]},
    "order": {"steps": [STEPS[1], STEPS[0], STEPS[2]]},
    "label's name": {"labels": {0: "background", 1: "a", 2: "b"}},
    "region": {"regions": {"all": (1, 2)}},
    "code": {},
    "library": {},
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_prepared_otherwise_has_another_name(task, folder, monkeypatch, tmp_path, change):
    case = task.training[0]
    key = CaseCache(folder, task, build_preprocessing(STEPS)).key_of(case)
    assert CaseCache(folder, task, build_preprocessing(STEPS)).key_of({**case, "case": "renamed"}) == key
    if change == "code":
        other_code(monkeypatch, tmp_path)
    if change == "library":
        monkeypatch.setattr(case_cache, "installed_version", lambda name: "9.9" if name == "monai" else "1.0")
    steps = CHANGES[change].get("steps", STEPS)
    changed = replace(task, **{name: value for name, value in CHANGES[change].items() if name != "steps"})
    cache = CaseCache(folder, changed, build_preprocessing(steps))
    assert len({key, *(cache.key_of({**case, **more}) for more in ({}, {"labelled": (1,)}, {"labelled": (1, 2)}))}) == 4
    with pytest.raises(ConfigError, match="cannot identify cases by object"):
        cache.key_of({**case, "more": object()})


@pytest.fixture
def key_with(task, folder):
    """Return a function that returns a case's name with one more step, possibly a component's name."""

    def key(step):
        preprocessing = build_preprocessing([*STEPS, {"name": step}] if isinstance(step, str) else STEPS)
        if not isinstance(step, str):
            preprocessing.transforms = (*preprocessing.transforms, step)
        return CaseCache(folder, task, preprocessing).key_of(task.training[0])

    return key


def test_ones_own_code_and_what_it_imports_is_part_of_the_name(key_with, tmp_path, monkeypatch):
    """A step's parameters may be the same, and the function that it calls in another file not."""
    monkeypatch.syspath_prepend(tmp_path)
    helper, module = tmp_path / "own_helper", tmp_path / "own_scaling.py"
    helper.mkdir()
    (helper / "__init__.py").write_text("", encoding="utf-8")
    (helper / "halving.py").write_text("FACTOR = 0.5\n", encoding="utf-8")
    step = "import os\nimport torch\nimport yaml\n\n\nclass Scale:\n    def __call__(self, case):\n"
    step += "        from own_helper.halving import FACTOR\n\n        import no_such_module\n"
    module.write_text(step, encoding="utf-8")
    own_scaling = __import__("own_scaling")

    def key():
        return key_with(own_scaling.Scale())

    keys = [key(), key()]
    (helper / "halving.py").write_text("FACTOR = 0.25\n", encoding="utf-8")
    keys.append(key())
    module.write_text(step + "# changed\n", encoding="utf-8")
    keys.append(key())
    monkeypatch.setattr(cache_folder, "version", lambda name: "0.1")
    keys.append(key())
    (tmp_path / "no_such_module.py").write_text("", encoding="utf-8")
    importlib.invalidate_caches()
    keys.append(key())
    assert keys[0] == keys[1]
    assert len(set(keys)) == 5
    module.unlink()
    with pytest.raises(ConfigError, match="the code of own_scaling, which prepares cases, cannot be found"):
        key()


def test_a_file_of_components_counts_as_it_was_run(key_with, tmp_path, monkeypatch):
    monkeypatch.setattr(own_components, "_files", {})  # processes of later tests are not to know this file
    file = tmp_path / "components.py"
    text = "import volseg\n\n\n@volseg.register('transform', 'Idle')\nclass Idle:\n    def __init__(self, fields):\n"
    text += "        pass\n\n    def __call__(self, case):\n"
    file.write_text(text + "        return case\n", encoding="utf-8")
    load_components([file])

    try:
        before = key_with("Idle")
        file.write_text(text + "        return dict(case)\n", encoding="utf-8")  # while the training starts
        assert key_with("Idle") == before
        file.unlink()
        assert key_with("Idle") == before
    finally:
        REGISTRIES["transform"].forget("Idle")


def damage(file, how):
    content = bytearray(file.read_bytes())
    if how == "flipped":
        content[len(content) // 3] ^= 16
    elif how == "description":
        content[-20] ^= 1
    else:
        del content[int(how * len(content)) :]
    file.write_bytes(content)


@pytest.mark.parametrize("how", ["flipped", "description", 0.5])
def test_a_damaged_case_is_made_again(task, folder, read, how):
    without = prepared_by(task)
    prepared_by(task, folder)
    del read[:]
    damage(list_entries(folder)[1].path, how)
    assert_same(prepared_by(task, folder), without)
    assert len(read) == 1
    assert_same(prepared_by(task, folder), without)
    assert len(read) == 1
    assert not [fault for _, fault in verify_entries(folder) if fault]


def test_every_truncation_and_damaged_descriptions_names_and_places_are_noticed(tmp_path):
    """Some raised UnicodeDecodeError, zlib's error or OSError, which ended ``volseg data cache verify``."""
    file = tmp_path / "whole.case"
    with file.open("wb") as writer:
        write_case(writer, {"image": torch.ones(1, 2, 3, 5), "none": torch.zeros(0, 3)}, {"a": "told"})
    whole = file.read_bytes()
    StoredCase.open(file).require_whole()
    name, entry = whole.index(b"archive/data/0"), whole.index(b"PK\1\2")
    places = (name + 8, b"\xef"), (entry + 10, b"\x08"), (len(whole) - 50, b"\xff\xff\xff\x7f")
    for damaged in (
        whole.replace(b"told", b"tolD"),
        *(whole[:length] for length in range(0, len(whole), 3)),
        *(whole[:place] + changed + whole[place + len(changed) :] for place, changed in places),
    ):
        file.write_bytes(damaged)
        with pytest.raises(DamagedCaseError):
            StoredCase.open(file).require_whole()


def test_metadata_keep_every_bit_and_type(tmp_path):
    meta = {
        "affine": torch.rand(4, 4, dtype=torch.float64),
        "original_affine": np.random.default_rng(0).random((4, 4)),
        "spatial_shape": (3, 4, 5),
        "padding": ((0, 1), (2, 3), (4, 5)),
        "mixed": [None, True, 1, 0.1, "text", {"key": (1, "b")}],
    }
    file = tmp_path / "x.case"
    with file.open("wb") as writer:
        write_case(writer, {"image": MetaTensor(torch.ones(1, 1, 1, 1), meta=dict(meta))}, {})
    found = StoredCase.open(file).volumes()["image"].meta
    for key, value in meta.items():
        assert type(found[key]) is (torch.Tensor if isinstance(value, np.ndarray) else type(value))
        assert np.array_equal(found[key], value) if key != "mixed" else found[key] == value
    # Types whose reading would execute code become the types that they extend.
    meta = {"number": signal.SIGINT, "text": np.str_("a"), "pair": os.terminal_size((3, 4)), "part": torch.eye(999)[0]}
    with file.open("wb") as writer:
        write_case(writer, {"image": MetaTensor(torch.ones(1, 1, 1, 1), meta=meta)}, {})
    found = StoredCase.open(file).volumes()["image"].meta
    assert [type(found[key]) for key in ("number", "text", "pair")] == [int, str, tuple]
    assert (found["number"], found["text"], found["pair"]) == (2, "a", (3, 4))
    assert file.stat().st_size < 10_000
    for strange in (object(), np.datetime64("2020-01-01")):
        with pytest.raises(TypeError, match=r"metadata of the type \w+ cannot be stored"):
            write_case(BytesIO(), {"image": MetaTensor(torch.ones(1), meta={"x": strange})}, {})


def count_descriptors():
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


def test_mapped_cases_outlive_their_files_and_take_no_descriptors_and_no_writes(task, folder):
    without = prepared_by(task)
    prepared_by(task, folder)
    before = count_descriptors()
    prepared = prepared_by(task, folder)
    assert count_descriptors() == before
    for case in prepared_by(task, folder).training:
        case["image"].zero_()
    assert len(remove_entries(folder, unused_seconds=3600)) == 0
    os.utime(list_entries(folder)[0].path, 2 * (time.time() + 3600,))  # the clock was set back, or a disk's is ahead
    assert len(remove_entries(folder)) == NUM_CASES
    assert list_entries(folder) == []
    assert_same(prepared, without)


def test_bad_cases_are_told_afresh_and_good_ones_kept(task, folder, read):
    first, bad, *_, last = task.training
    bad["label"].write_bytes(bad["label"].read_bytes()[:100])
    for field in ("image", "label"):
        shutil.copy(first[field], last[field])
    told = []
    for _ in range(2):
        with pytest.raises(DataError) as refused:
            prepared_by(task, folder)
        told.append(str(refused.value))
    assert told[0] == told[1]
    assert told[0].startswith("2 case(s) cannot be used")
    assert f"{first['case']}: " in told[0]
    assert "contains the same voxels as the validation case" in told[0]


@pytest.mark.parametrize("reason", ["each process keeps its own in memory", "GiB at most, stays free"])
def test_where_it_cannot_be_written_is_said_once_and_cases_stay_in_memory(task, folder, caplog, monkeypatch, reason):
    if reason.startswith("they"):
        folder.mkdir()
        (folder / "cases").write_text("no folder", encoding="utf-8")
    else:
        monkeypatch.setattr(case_cache, "LEFT_FREE_SHARE", 1.0)
        monkeypatch.setattr(case_cache, "LEFT_FREE_BYTES", 2**62)
    assert_same(prepared_by(task, folder), prepared_by(task))
    (said,) = [record.message for record in caplog.records if "no longer stored" in record.message]
    assert reason in said
    assert not (folder / "cases").is_dir() or list_entries(folder) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_can_only_be_read_is_read(task, folder, read):
    without = prepared_by(task)
    prepared_by(task, folder)
    del read[:]
    (folder / "cases").chmod(0o500)
    try:
        assert_same(prepared_by(task, folder), without)
    finally:
        (folder / "cases").chmod(0o700)
    assert read == []


def test_a_disk_that_takes_no_more_leaves_nothing_half(task, folder, caplog):
    without = prepared_by(task)
    largest = max(tensor.nbytes for case in without.training for tensor in (case["image"],))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest // 2, before[1]))  # the kernel refuses the rest
    try:
        prepared = prepared_by(task, folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert_same(prepared, without)
    assert list((folder / "cases").iterdir()) == []
    assert len([record for record in caplog.records if "(File too large)" in record.message]) == 1


def test_what_was_used_longest_ago_makes_room_and_what_was_used_today_does_not(task, folder, caplog):
    prepared_by(task, folder)
    entries = list_entries(folder)
    limit = sum(entry.size for entry in entries)
    for age, entry in enumerate(entries):
        os.utime(entry.path, (time.time() - 864000 + age,) * 2)
    other = [{**STEPS[1], "spacing": [1.3, 1.3, 1.3]}]
    oldest = entries[0].path
    prepared_by(task, folder, steps=other, limit_bytes=limit)
    kept = list_entries(folder)
    assert sum(entry.size for entry in kept) <= limit
    assert oldest not in {entry.path for entry in kept}
    assert len(kept) > NUM_CASES  # no more than needed went
    for entry in kept:
        os.utime(entry.path)
    prepared_by(task, folder, steps=STEPS[:1], limit_bytes=limit)
    assert {entry.path for entry in list_entries(folder)} >= {entry.path for entry in kept}
    assert "data.cache_limit" in caplog.text


PREPARE = """
import json, os, signal, sys
sys.path.insert(0, sys.argv[5])
from digests import digest
from volseg.data.case_store import case_cache
from volseg.data.case_store import preparing
from volseg.data.layouts import load_task
from volseg.transforms.preprocessing import build_preprocessing

root, folder, steps, kills = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), sys.argv[4] == "kill"
if kills:
    def half(file, case, about):
        file.write(bytes(1000))
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    case_cache.write_case = half
task, preprocessing = load_task(root), build_preprocessing(steps)
cache = case_cache.CaseCache(folder, task, preprocessing)
print("ready", flush=True)
sys.stdin.readline()
prepared = preparing.prepare_together(task.training, (), task, preprocessing, cache=cache, workers=2)
digests = [digest(case["image"]) for case in prepared.training]
print(json.dumps({"stored": cache.num_stored, "digests": digests}))
"""


def start(task, folder, kills=False):
    arguments = [task.root, folder, json.dumps(STEPS), "kill" if kills else "live", Path(__file__).parents[1]]
    command = [sys.executable, "-c", PREPARE, *map(str, arguments)]
    started = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8")
    assert started.stdout.readline() == "ready\n"
    return started


def test_two_trainings_at_once_make_every_case_once_and_one_that_is_killed_leaves_nothing_of_use(task, folder):
    killed, *both = [start(task, folder, kills) for kills in (True, False, False)]
    killed.communicate("\n", timeout=300)
    assert killed.returncode == -signal.SIGKILL
    assert list_entries(folder) == []
    assert list((folder / "cases").glob(".*.partial"))
    for one in both:
        one.stdin.write("\n")
        one.stdin.flush()
    told = [json.loads(one.communicate(timeout=300)[0]) for one in both]
    assert sum(one["stored"] for one in told) == NUM_CASES == len(list_entries(folder))
    expected = [digest(case["image"]) for case in prepared_by(task, training=NUM_CASES).training]
    assert [one["digests"] for one in told] == [expected] * 2
    remove_entries(folder)
    assert list((folder / "cases").iterdir()) == []


@pytest.mark.parametrize("budget_bytes", [0, 10**9])
def test_an_epoch_does_not_begin_on_a_mapped_file_that_was_cut_off(task, folder, budget_bytes):
    """Reading beyond the end of a mapped file ends the process silently, by SIGBUS."""
    training = prepared_by(task, folder).training
    batches = PatchBatches(VolumeCache(training, budget_bytes=budget_bytes), (12, 14, 10), 2, 3)
    mapped, other = (case["mapped"].path for case in training[:2])
    other.rename(other.with_suffix(".away"))  # what is removed or replaced is mapped as it was
    other.write_bytes(b"another")
    before = len(list(batches.epoch(0)))
    size = mapped.stat().st_size
    os.truncate(mapped, size // 2)
    if budget_bytes:  # nothing of it is read any more
        assert len(list(batches.epoch(1))) == before
    else:
        with pytest.raises(
            DataError,
            match=rf"{mapped.name}, the prepared case of \S+, was overwritten while it was used: it had {size} bytes",
        ):
            list(batches.epoch(1))


def test_the_folder_is_the_variables_then_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "c"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    for named, expected in ((str(tmp_path / "a"), tmp_path / "a"), ("none", None), ("", tmp_path / "b" / "volseg")):
        monkeypatch.setenv("VOLSEG_CACHE", named)
        assert choose_cache_folder("auto") == expected
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert choose_cache_folder("auto") == tmp_path / "c" / ".cache" / "volseg"
    assert choose_cache_folder("none") is None
    assert choose_cache_folder(str(tmp_path)) == tmp_path
