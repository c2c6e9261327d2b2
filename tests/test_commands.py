"""Printed commands run when they are typed, and shells complete them."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from volseg.commands import spell

SAID = "import sys; from volseg.commands import spell; print(spell('volseg --version')); print(spell('tensorboard -h'))"


@pytest.fixture
def program(tmp_path):
    """Return a program called volseg, as pip installs it, that prints the next command; tensorboard is beside it."""
    folder = tmp_path / "an environment" / "bin"
    folder.mkdir(parents=True)
    source = f"#!{shutil.which('env')} -S {shlex.quote(sys.executable)}\n{SAID}\n"
    for name in ("volseg", "tensorboard"):
        (folder / name).write_text(source, encoding="utf-8")
        (folder / name).chmod(0o755)
    return folder / "volseg"


def run(*command, path, cwd):
    environment = {**os.environ, "PATH": os.pathsep.join(map(str, path)), "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, encoding="utf-8", check=True)
    return done.stdout.splitlines()


def test_a_program_is_spelled_by_its_name_only_if_the_path_leads_to_it(program, tmp_path):
    expected = ["'an environment/bin/volseg' --version", "'an environment/bin/tensorboard' -h"]
    assert run(program, path=["/usr/bin"], cwd=tmp_path) == expected
    here = tmp_path / "elsewhere"
    here.mkdir()
    assert run(program, path=["/usr/bin"], cwd=here)[0] == f"{shlex.quote(str(program))} --version"
    assert run(program, path=[program.parent, "/usr/bin"], cwd=tmp_path) == ["volseg --version", "tensorboard -h"]
    links = tmp_path / "links"
    links.mkdir()
    (links / "volseg").symlink_to(program)
    assert run(program, path=[links, "/usr/bin"], cwd=tmp_path)[0] == "volseg --version"
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(program, other / "volseg")
    assert run(program, path=[other, "/usr/bin"], cwd=tmp_path)[0].startswith("'an environment/bin/volseg'")


def test_what_was_run_as_a_module_is_spelled_as_one_and_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "volseg" / "__main__.py")])
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert spell("volseg --version") == f"{shlex.quote(sys.executable)} -m volseg --version"
    assert spell("tensorboard --version").endswith(" -m tensorboard.main --version")
    assert run(*shlex.split(spell("volseg --version")), path=["/usr/bin"], cwd=tmp_path)[0].startswith("volseg ")


def test_an_answer_takes_no_import_of_torch() -> None:
    ask = {**os.environ, "_VOLSEG_COMPLETE": "complete_bash", "COMP_WORDS": "volseg doctor --q", "COMP_CWORD": "2"}
    code = "import sys; sys.argv = ['volseg']\nfrom volseg.cli import app\ntry:\n    app(prog_name='volseg')\n"
    code += "finally:\n    sys.stderr.write(str('torch' in sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], env=ask, capture_output=True, encoding="utf-8")
    assert (ran.stdout.split(), ran.stderr) == (["--quick"], "False")
