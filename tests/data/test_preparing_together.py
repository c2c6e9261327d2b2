"""With a cache, each case is read and stored once per machine, and all processes get the same cases."""

import logging
import shutil
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from digests import digest
from in_group import in_group

from volseg.data.case_store import preparing
from volseg.data.case_store.case_cache import CaseCache
from volseg.data.case_store.preparing import meet_readers, prepare_together
from volseg.data.case_store.volume_cache import VolumeCache
from volseg.data.checks.kinds import Problem
from volseg.data.checks.reading import check_cases
from volseg.data.layouts import load_task
from volseg.data.synthetic import make_task
from volseg.errors import VolsegError
from volseg.transforms.preprocessing import build_preprocessing

pytestmark = pytest.mark.usefixtures("ready_python")

NUM_TRAINING = 5
STEPS = [{"name": "Orientation"}, {"name": "ZScore"}]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_task(tmp_path_factory.mktemp("data") / "Task00_Synthetic", num_cases=8, num_test=0)


@pytest.fixture
def root(made, tmp_path):
    """Return a task's folder whose files a test may damage."""
    return shutil.copytree(made, tmp_path / made.name)


def truncate(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


@contextmanager
def counting(change=lambda checked: checked):
    """Yield a list of the cases that are read; ``change`` may change the result of their check."""
    plain, names = preparing.read_case, []

    def counted(case, task):
        names.append(case["case"])
        return change(plain(case, task))

    with patch.object(preparing, "read_case", counted):
        yield names


def prepared_in(root, *, steps=STEPS, reads=True, **options):
    task = load_task(root, require_files=False)
    readers = meet_readers(dist.group.WORLD, reads=reads)
    sides = task.training[:NUM_TRAINING], task.training[NUM_TRAINING:]
    return prepare_together(*sides, task, build_preprocessing(steps), readers=readers, workers=2, **options)


def prepare_alone(task):
    sides = task.training[:NUM_TRAINING], task.training[NUM_TRAINING:]
    return prepare_together(*sides, task, build_preprocessing(STEPS))


def fingerprint(cases):
    """Return every bit of the cases' volumes, in the types that a bank stores."""
    return [(case["case"], [digest(case[name]) for name in ("image", "label")]) for case in cases]


def mappings(of):
    """Return the stored cases that this process maps: inode, and kilobytes that are its own."""
    found, own = [], None
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        fields = line.split()
        if "-" in fields[0] and not fields[0].endswith(":"):
            own = fields[4] if of in line else None
        elif own and fields[0] == "Anonymous:":
            found.append((own, int(fields[1])))
    return found


def read_and_kept(root, folder):
    counted, cache = [], CaseCache(folder, load_task(root), build_preprocessing(STEPS))
    with counting() as files:
        prepared = prepared_in(root, progress=lambda: counted.append(1), cache=cache)
    bank = VolumeCache(prepared.training, keep="memory")
    assert [bank._images[index].data_ptr() for index in range(len(bank))] == [
        case["image"].data_ptr() for case in prepared.training
    ]
    assert bank._labels[0].data_ptr() == prepared.training[0]["label"].data_ptr()
    bank.gather(torch.arange(len(bank)), torch.zeros(len(bank), 3, dtype=torch.int64), (9, 9, 9))
    return {
        "files": files,
        "training": fingerprint(prepared.training),
        "validation": fingerprint(prepared.validation),
        "references": [case["reference"].shape[0] for case in prepared.validation],
        "order": list(prepared.order),
        "problems": list(prepared.problems),
        "progress": len(counted),
        "mapped": mappings(f"{folder}/cases/"),
    }


def test_every_file_is_read_once_and_every_voxel_kept_once(made, tmp_path):
    task = load_task(made)
    alone = prepare_alone(task)
    ids = [case["case"] for case in task.training]
    for is_warm in (False, True):
        told = in_group(4, read_and_kept, made, tmp_path / "cache")
        assert sorted(name for found in told for name in found["files"]) == ([] if is_warm else sorted(ids))
        assert sorted(case for found in told for case in found["validation"]) == sorted(fingerprint(alone.validation))
        first = {inode for inode, _ in told[0]["mapped"]}
        for found in told:
            assert found["training"] == fingerprint(alone.training)
            assert found["order"] == ids[NUM_TRAINING:]
            assert found["references"] == [1] * len(found["validation"])
            assert found["problems"] == []
            assert found["progress"] == len(ids)
            # The same pages in every process: one mapping per case, and no page is anybody's own.
            assert len(found["mapped"]) == NUM_TRAINING + len(found["validation"])
            assert len({inode for inode, _ in found["mapped"]} & first) >= NUM_TRAINING
            assert all(own == 0 for _, own in found["mapped"])


def with_a_follower(root, damaged):
    """Process 0 reads nothing; process 1 finds a case damaged."""
    rank, told = dist.get_rank(), []

    def damage(checked):
        if rank != 1 or checked.case["case"] != damaged:
            return checked
        return replace(checked, problems=(Problem(damaged, Path("there"), "is damaged there"),))

    logger = logging.getLogger("volseg.data")
    logger.addHandler(handler := logging.Handler())
    handler.emit = lambda record: told.append(record.getMessage())
    with counting(damage) as files:
        prepared = prepared_in(root, reads=rank > 0, skip_bad=True)
    problems = [str(problem) for problem in prepared.problems]
    validation = [case["case"] for case in prepared.validation]
    return len(files), fingerprint(prepared.training), validation, list(prepared.order), problems, told


def test_without_a_cache_every_reader_keeps_its_own_and_who_reads_nothing_is_told_the_same(made):
    task = load_task(made)
    ids = [case["case"] for case in task.training]
    told = in_group(4, with_a_follower, made, ids[2])
    assert [order for *_, order, _, _ in told] == [ids[NUM_TRAINING:]] * 4
    assert [problems for *_, problems, _ in told] == [[f"{ids[2]}: is damaged there"]] * 4
    assert told[0][:3] == (0, [], [])
    expected = [case for case in fingerprint(prepare_alone(task).training) if case[0] != ids[2]]
    assert [trained for _, trained, *_ in told[1:]] == [expected] * 3
    assert sorted(name for _, _, validation, *_ in told for name in validation) == ids[NUM_TRAINING:]
    assert [read for read, *_ in told[1:]] == [NUM_TRAINING + 1] * 3
    assert [len(said) for *_, said in told] == [0, 1, 0, 0]
    assert "each of 3 processes prepares and keeps all training cases" in told[1][-1][0]


def ended(root, options):
    try:
        prepared = prepared_in(root, **options)
    except Exception as error:
        return type(error).__name__, str(error)
    return [case["case"] for case in prepared.training], list(prepared.order), [str(p) for p in prepared.problems]


def test_bad_cases_are_named_at_once_or_left_out_in_every_process(root):
    task = load_task(root)
    truncate(task.training[1]["image"])
    truncate(task.training[3]["label"])
    task.training[6]["label"].unlink()
    ids = [case["case"] for case in task.training]
    problems = [str(problem) for problem in check_cases(task.training, task)]
    assert len(problems) == 3
    told = in_group(2, ended, root, {})
    assert told[0] == told[1]
    assert told[0][0] == "DataError"
    assert told[0][1].splitlines()[:4] == ["3 case(s) cannot be used:", *(f"  {problem}" for problem in problems)]
    expected = [ids[index] for index in (0, 2, 4)], [ids[5], ids[7]], problems
    assert in_group(2, ended, root, {"skip_bad": True}) == [expected] * 2


def broken_reader(root):
    def break_or_wait(checked):
        if dist.get_rank() == 1:
            raise ZeroDivisionError("a bug")
        time.sleep(0.2)
        return checked

    with counting(break_or_wait):
        return ended(root, {})


CROPPED_AWAY = [{"name": "CropForeground", "above": 1e9}]


def test_what_cannot_be_preprocessed_is_the_first_case_in_every_process(made):
    task = load_task(made)
    with pytest.raises(VolsegError) as alone:
        prepare_together(task.training, (), task, build_preprocessing(CROPPED_AWAY))
    told = in_group(2, ended, made, {"steps": CROPPED_AWAY})
    assert told == [(type(alone.value).__name__, str(alone.value))] * 2


def test_any_other_error_ends_all_and_is_named(made):
    first, second = in_group(2, broken_reader, made)
    assert second == ("ZeroDivisionError", "a bug")
    assert first == ("ParallelError", "process 1 failed, so this process stops too: ZeroDivisionError: a bug")
