"""Cases are read once and kept once per machine, and all processes come to the same end."""

import os
import shutil
import signal
import sys
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

from volseg.data.case_store import preparing, preprocessed, reading_group
from volseg.data.case_store.case_cache import CaseCache
from volseg.data.case_store.preparing import prepare_together
from volseg.data.case_store.preprocessed import SharedCases, StoredCase
from volseg.data.case_store.reading_group import meet_readers
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
    """Yield a list to which every case that is read is added; ``change`` may change what its check says."""
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
    """Return what tells cases apart: every bit of their volumes, in the types in which a bank keeps them."""
    return [(case["case"], [digest(case[name]) for name in ("image", "label")]) for case in cases]


def mappings(of="/memfd:volseg"):
    """Return the memory of cases that this process maps, or the stored ones: inode, and kilobytes that are its own."""
    found, own = [], None
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        fields = line.split()
        if "-" in fields[0] and not fields[0].endswith(":"):
            own = fields[4] if of in line else None
        elif own and fields[0] == "Anonymous:":
            found.append((own, int(fields[1])))
    return found


def read_and_kept(root, folder):
    counted, cache = [], None
    if folder is not None:
        cache = CaseCache(folder, load_task(root), build_preprocessing(STEPS))
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
        "mapped": mappings() if cache is None else mappings(f"{folder}/cases/"),
    }


@pytest.mark.skipif(not preprocessed.can_share(), reason="this platform cannot share memory between processes")
@pytest.mark.parametrize("is_stored", [False, True], ids=["memory", "cache"])
def test_every_file_is_read_once_and_every_voxel_kept_once(made, tmp_path, is_stored):
    processes = 4
    task = load_task(made)
    alone = prepare_alone(task)
    ids = [case["case"] for case in task.training]
    for is_warm in (False, True)[: 1 + is_stored]:
        told = in_group(processes, read_and_kept, made, tmp_path / "cache" if is_stored else None)
        assert sorted(name for found in told for name in found["files"]) == ([] if is_warm else sorted(ids))
        assert sorted(case for found in told for case in found["validation"]) == sorted(fingerprint(alone.validation))
        for rank, found in enumerate(told):
            assert found["training"] == fingerprint(alone.training)
            assert found["order"] == ids[NUM_TRAINING:]
            assert found["references"] == [1] * len(found["validation"])
            assert found["problems"] == []
            assert found["progress"] == len(ids)
            # The same pages in every process: one mapping per case, and no page is anybody's own.
            assert len(found["mapped"]) == NUM_TRAINING + is_stored * len(found["validation"])
            assert (
                len({inode for inode, _ in found["mapped"]} & {inode for inode, _ in told[0]["mapped"]}) >= NUM_TRAINING
            )
            assert all(own == 0 for _, own in found["mapped"])
            if not is_warm:
                assert set(ids[rank:NUM_TRAINING:processes]) <= set(found["files"])
                assert {case for case, _ in found["validation"]} <= set(found["files"])


def with_a_follower(root):
    """Process 0 reads nothing."""
    with counting() as files:
        prepared = prepared_in(root, reads=dist.get_rank() > 0)
    return len(files), len(prepared.training), len(prepared.validation), list(prepared.order)


def test_who_reads_nothing_is_told_all_the_same(made):
    told = in_group(4, with_a_follower, made)
    assert told[0] == (0, 0, 0, told[1][3])
    assert [trained for _, trained, *_ in told[1:]] == [NUM_TRAINING] * 3
    assert sum(validated for *_, validated, _ in told) == sum(read for read, *_ in told) - NUM_TRAINING == 3


def on_two_machines(root, damaged):
    """Processes 0 and 1 run on one machine, 2 and 3 on another, whose file of one case is damaged."""
    rank, counted = dist.get_rank(), []

    def damage(checked):
        if rank < 2 or checked.case["case"] != damaged:
            return checked
        return replace(checked, problems=(Problem(damaged, Path("there"), "is damaged there"),))

    with patch.object(reading_group, "name_machine", lambda: f"machine {rank // 2}"), counting(damage) as files:
        prepared = prepared_in(root, skip_bad=True, progress=lambda: counted.append(1))
    return {
        "files": files,
        "training": fingerprint(prepared.training),
        "validation": [case["case"] for case in prepared.validation],
        "problems": [str(problem) for problem in prepared.problems],
        "progress": len(counted),
        "inodes": {inode for inode, _ in mappings()},
    }


@pytest.mark.skipif(not preprocessed.can_share(), reason="this platform cannot share memory between processes")
def test_each_machine_reads_what_trains_and_one_of_them_what_validates(made):
    task = load_task(made)
    ids = [case["case"] for case in task.training]
    alone = prepare_alone(task)
    told = in_group(4, on_two_machines, made, ids[2])
    for first in (0, 2):
        read = told[first]["files"] + told[first + 1]["files"]
        assert sorted(name for name in read if name in ids[:NUM_TRAINING]) == ids[:NUM_TRAINING]
        assert told[first]["inodes"] == told[first + 1]["inodes"]
    assert not told[0]["inodes"] & told[2]["inodes"]
    assert sorted(name for found in told for name in found["validation"]) == ids[NUM_TRAINING:]
    for found in told:
        assert found["training"] == [case for case in fingerprint(alone.training) if case[0] != ids[2]]
        assert found["problems"] == [f"{ids[2]}: is damaged there"]
        assert found["progress"] == len(ids)


def without_sharing(root):
    with patch.object(reading_group, "can_share", lambda: False), counting() as files:
        prepared = prepared_in(root)
    return len(files), fingerprint(prepared.training), len(prepared.validation)


def test_where_memory_cannot_be_shared_every_process_keeps_its_own(made):
    task = load_task(made)
    alone = prepare_alone(task)
    told = in_group(2, without_sharing, made)
    assert sum(read for read, *_ in told) == 2 * NUM_TRAINING + 3
    assert [trained for _, trained, _ in told] == [fingerprint(alone.training)] * 2
    assert sum(validated for *_, validated in told) == 3


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


def test_writing_to_shared_memory_changes_ones_own_copy_only():
    store = SharedCases()
    path = Path(store.add({"image": torch.arange(5.0), "label": torch.ones(2, 3, dtype=torch.uint8)}, {"case": "a"}))
    opened = [StoredCase.open(path) for _ in range(2)]
    store.close()
    first, second = (one.volumes() for one in opened)
    first["image"].fill_(9)
    assert opened[0].volumes()["image"].tolist() == [9.0] * 5
    assert second["image"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert second["label"].tolist() == [[1, 1, 1], [1, 1, 1]]
    opened[1].require_unchanged()


def be_killed(meeting, root):
    """Prepare cases; the first process is then ended by SIGKILL, the second goes on using them."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    prepared = prepared_in(root)
    before = fingerprint(prepared.training)
    dist.barrier()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1)
    assert fingerprint(prepared.training) == before
    Path(f"{meeting}.pages").write_text(" ".join(inode for inode, _ in mappings()), encoding="utf-8")
    os._exit(3)


@pytest.mark.skipif(not preprocessed.can_share(), reason="this platform cannot share memory between processes")
def test_nothing_is_left_of_a_process_that_is_killed(start, made, tmp_path):
    """What lay in memory stays for those who use it, and goes with the last of them."""
    folders = [Path("/dev/shm"), tmp_path]
    before = [sorted(folder.iterdir()) for folder in folders]
    processes = [
        start(
            [sys.executable, __file__, str(tmp_path / "meet"), str(made)],
            env={**os.environ, "RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    assert [process.wait(timeout=180) for process in processes] == [-signal.SIGKILL, 3]
    pages = (tmp_path / "meet.pages").read_text(encoding="utf-8").split()
    assert len(pages) == NUM_TRAINING
    for name in ("meet", "meet.pages"):
        (tmp_path / name).unlink(missing_ok=True)
    assert [sorted(folder.iterdir()) for folder in folders] == before
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = maps.read_text(encoding="utf-8").splitlines()
        except OSError:  # it has just ended, or is another user's
            continue
        assert not [line for line in lines if "memfd:volseg" in line and line.split()[4] in pages]


if __name__ == "__main__":
    be_killed(Path(sys.argv[1]), Path(sys.argv[2]))
