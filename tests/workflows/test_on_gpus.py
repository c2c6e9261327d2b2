"""The list of measurements that take GPUs: commands exist, no more begin than fit, and a failure ends no other."""

import json
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "workflows" / "benchmarks"))

import on_gpus
from on_gpus import MEASUREMENTS, Measurement, choose, prepare, run

BENCHMARKS = Path(on_gpus.__file__).parent
SLEEPS = Measurement("sleeps", 1, 1, "-m timeit -n 1 -r 1 -s 'import time' 'time.sleep(600)'")


@pytest.mark.parametrize("one", MEASUREMENTS, ids=lambda one: one.name)
def test_commands_name_scripts_and_options_that_exist(one):
    for command in filter(None, (one.command, one.before)):
        words = one.fill(command, Path("folder"), Path("task"))[1:]
        if words[0] == "-m":
            continue
        declared = set(re.findall(r'"(--[a-z-]+)"', (BENCHMARKS / Path(words[0]).name).read_text(encoding="utf-8")))
        assert {word for word in words if word.startswith("--")} <= declared, words
        assert not [word for word in words if re.fullmatch(r"\{\w+\}", word)], words


def test_rows_are_what_the_script_reads():
    [tiles] = [one for one in MEASUREMENTS if one.name == "tiles"]
    words = tiles.fill(tiles.command, Path("folder"), None)
    rows = json.loads(words[words.index("--rows") + 1])
    assert {"kind", "net", "gpus", "shape", "checkpoint"} <= set.intersection(*(set(row) for row in rows))


def test_no_more_is_chosen_than_fits():
    one, two = choose(1, 590, []), choose(2, 590, [])
    assert sum(each.seconds for each in one) <= 590
    assert all(each.gpus == 1 for each in one)
    assert any(each.gpus == 2 for each in two)
    assert one[0].name == "tests"
    assert choose(1, 590, [], {"tests", "tiles"})[0].name == "convolutions"
    assert [each.name for each in choose(1, 590, ["networks"])] == ["networks"]
    assert choose(1, 100, ["networks"]) == []
    with pytest.raises(SystemExit, match="there is no measurement"):
        choose(1, 590, ["network"])


def test_what_takes_too_long_is_stopped_and_what_fails_is_told(tmp_path):
    stopped = run(SLEEPS, tmp_path, None, 1.0)
    assert stopped["status"] is None
    assert "time.sleep(600)" in (tmp_path / "sleeps.log").read_text(encoding="utf-8")
    failed = run(Measurement("fails", 1, 1, "-m no_such_module"), tmp_path, None, 60.0)
    assert failed["status"] == 1
    assert "No module named no_such_module" in (tmp_path / "fails.log").read_text(encoding="utf-8")


def test_a_failure_ends_no_other_and_is_measured_again(tmp_path, monkeypatch, capsys):
    fails, works = Measurement("fails", 1, 1, "-m no_such_module"), Measurement("works", 1, 1, "-m this")
    needs = Measurement("needs", 1, 1, "-m this {prepared}", before="-m this")
    larger = Measurement("larger", 2, 1, "-m this")
    monkeypatch.setattr(on_gpus, "MEASUREMENTS", (fails, works, needs, larger))
    monkeypatch.setattr(sys, "argv", ["on_gpus.py", "--gpus", "1", "--seconds", "60", "--output", str(tmp_path)])
    on_gpus.main()
    told = json.loads((tmp_path / "measured.json").read_text(encoding="utf-8"))
    assert {name: found["status"] for name, found in told.items()} == {"fails": 1, "works": 0}
    assert "needs: left out, --prepare was not called" in capsys.readouterr().out
    prepare(needs, tmp_path)
    on_gpus.main()
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()[1:]] == ["fails", "needs"]
