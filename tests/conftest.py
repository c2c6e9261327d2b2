"""Settings of every test: fixed seeds, exact matrix products, and the real data if it is next to the project."""

import locale
import os
import re
import shutil
import signal
import subprocess
import tempfile
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from in_group import end_groups
from small_pictures import restore_pictures, shrink_pictures

# The Makefile runs the tests of a marker from the files that name it.
NAMED = {"gpu": r"mark\.gpu|with_kernels", "kernels": r"mark\.kernels|with_kernels", "multi_gpu": r"mark\.multi_gpu"}

# The machine may be busy; the time of one example says nothing.
settings.register_profile("random", deadline=None)
settings.register_profile("thorough", deadline=None, max_examples=2000)  # --hypothesis-profile thorough
# The same examples in each run: what fails for a change did not fail before it. `make test-all` draws others.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")

# Processes that a test starts of its own file find the modules that tests share, as pytest does.
SHARED = str(Path(__file__).parent)
PATHS = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != SHARED]
os.environ["PYTHONPATH"] = os.pathsep.join([SHARED, *PATHS])  # once, also in a worker, whose parent has said it already

# Never the user's own cache; processes that outlive a test use the session's.
SESSION_CACHE = tempfile.mkdtemp(prefix="volseg_cache_")
os.environ["VOLSEG_CACHE"] = SESSION_CACHE

collect_ignore = ["oracles"]  # these write fixtures by packages that the tests do not need

LOCALE = locale.setlocale(locale.LC_ALL)

LONG = {
    line.partition(" ")[2] for line in Path(__file__).with_name("long.txt").read_text(encoding="utf-8").splitlines()
}

# Under nohup, or in the background of a script, the processes that tests start would ignore these signals as this one
# does. A handler is not inherited.
for number in (signal.SIGINT, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, lambda *_: None)

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(autouse=True)
def exact_and_seeded():
    # Without a GPU torch.manual_seed writes a stack for each kind of device that might come: milliseconds of each test.
    (torch if torch.cuda.is_available() else torch.default_generator).manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


@pytest.fixture(autouse=True)
def small_pictures():
    """Let trainings draw small pictures, unless a test asks for ``true_pictures``."""
    shrink_pictures()


@pytest.fixture
def true_pictures(small_pictures):
    """Let trainings of this process draw pictures as large as a user's."""
    restore_pictures()


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """Return a folder for prepared cases that no other test has used; it is made when something is kept."""
    folder = tmp_path_factory.getbasetemp() / "cache" / uuid.uuid4().hex
    monkeypatch.setenv("VOLSEG_CACHE", str(folder))
    return folder


@pytest.fixture(autouse=True)
def watched_kernels(request):
    """Let Triton's interpreter, where it runs kernels, find what would go wrong on a GPU only; returns the launches."""
    if os.environ.get("TRITON_INTERPRET") != "1" or request.node.get_closest_marker("kernels") is None:
        yield []
        return
    from kernel_sanitizer import watching  # not in the processes that tests start

    # Networks run the same kernels hundreds of times: there, memory is poisoned, and no access looked at.
    of_kernels = request.path.parent.name in ("device", "inference", "regressions", "transforms")
    with watching(most=24 if of_kernels else 0) as launches:
        yield launches


@pytest.fixture
def ready_python(monkeypatch):
    """Let processes of this interpreter begin with everything imported: see the module of that name."""
    import ready_python as module  # not in the processes that tests start of this folder

    monkeypatch.setattr(subprocess, "Popen", module.Popen)
    # It has taken the name from subprocess; an older one asks there.
    monkeypatch.setattr(
        "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler.Popen",
        module.Popen,
        raising=False,
    )


@pytest.fixture(autouse=True, scope="module")
def groups_of_one_file() -> Iterator[None]:
    """End a file's groups of processes with it: gloo's threads wake while nobody calls, and took a sixth of a core."""
    yield
    end_groups()


@pytest.fixture
def read(monkeypatch):
    """Return the ids of the cases that are decompressed from now on."""
    from volseg.data.case_store import preparing

    plain, names = preparing.read_case, []

    def noted(case, task):
        names.append(case["case"])
        return plain(case, task)

    monkeypatch.setattr(preparing, "read_case", noted)
    return names


def pytest_sessionfinish():
    """Remove what the session's processes have kept."""
    shutil.rmtree(SESSION_CACHE, ignore_errors=True)


@pytest.fixture(autouse=True)
def one_locale() -> Iterator[None]:
    """Fail a test after which the process has another locale: so would a user's, and read its files as something else.

    SimpleITK sets it to C where it writes a DICOM slice with the metadata of another one, or reads VTK's format.
    """
    yield
    after = locale.setlocale(locale.LC_ALL)
    locale.setlocale(locale.LC_ALL, LOCALE)
    assert after == LOCALE


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen]]:
    """Return a function that starts a process, as ``subprocess.Popen``; none outlives the test, however that ends."""
    with ExitStack() as ending:

        def started(command: Sequence[str], **options: object) -> subprocess.Popen:
            process = ending.enter_context(subprocess.Popen(command, **options))  # waits for it, and closes its pipes
            ending.callback(process.kill)  # the stack goes backwards
            return process

        yield started


@pytest.fixture
def reads(monkeypatch) -> Counter[Path]:
    """Return how often each compressed file has been read since."""
    counter = Counter()
    plain = Path.open

    def counted(path, mode="r", *args, **kwargs):
        if path.suffix == ".gz" and "r" in mode:
            counter[path] += 1
        return plain(path, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", counted)
    return counter


def _shared(folder: str) -> Path:
    path = SHARED / folder
    if not path.exists():
        pytest.skip(f"real data are not at {path}")
    return path


@pytest.fixture(scope="session")
def msd_task04() -> Path:
    """Return the folder of 208 real cases in MSD layout."""
    return _shared("Task04_Hippocampus")


@pytest.fixture(scope="session")
def dicom_series() -> Path:
    """Return the folder of one real DICOM series."""
    return _shared("dicom/hippocampus_crop")


@pytest.hookimpl(tryfirst=True)  # before -m leaves tests out
def pytest_collection_modifyitems(items):
    """Mark the tests of ``long.txt``, skip those that need absent devices, refuse those that no target would run."""
    for path, marker in sorted(
        {(item.path, name) for item in items for name in NAMED if item.get_closest_marker(name)}
    ):
        if not re.search(NAMED[marker], path.read_text(encoding="utf-8")):
            raise pytest.UsageError(f"{path} has tests marked {marker}, and its text does not name {NAMED[marker]}")
    devices = torch.cuda.device_count()
    for item in items:
        if LONG & {item.nodeid, item.nodeid.partition("[")[0]}:
            item.add_marker("long")
        for marker, needed in (("gpu", 1), ("multi_gpu", 2)):
            if item.get_closest_marker(marker) and devices < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device(s), found {devices}"))
