"""Local processes start, fail together, and the error names the one that failed."""

import signal
from pathlib import Path

import pytest

from volseg.errors import ParallelError
from volseg.parallel import is_worker, launch

pytestmark = pytest.mark.usefixtures("ready_python")


def test_signals_find_their_handlers_again_afterwards() -> None:
    def mine(number: int, frame: object) -> None:
        raise AssertionError

    before = {number: signal.signal(number, mine) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        launch(["-c", "pass"], 1)
        assert all(signal.getsignal(number) is mine for number in before)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_failing_process_ends_the_others_and_is_named(tmp_path: Path) -> None:
    script = tmp_path / "fail.py"
    script.write_text(
        "import os, sys, time\nsys.exit(3) if os.environ['RANK'] == '1' else time.sleep(600)\n", encoding="utf-8"
    )
    with pytest.raises(ParallelError, match=r"process 1 of 2 \(\S+, \S+\) failed with exit code 3"):
        launch([str(script)], 2)


def test_numbers_and_nesting_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ParallelError, match="processes must be at least 1 and"):
        launch(["-c", "pass"], 0)
    assert not is_worker()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "0")
    assert is_worker()
    with pytest.raises(ParallelError, match="rank 0 of a launched job already"):
        launch(["-c", "pass"], 2)
