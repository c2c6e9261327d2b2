"""A real bash completes the real program's command line."""

import os
import shutil
import subprocess
import sys

import pytest

# The first word of what bash is given is how it calls the program: here not installed, but put on the path.
PROGRAM = f"#!{sys.executable}\nfrom volseg.cli import main\nmain()\n"
ASK = """
eval "$(_VOLSEG_COMPLETE=source_bash volseg)"
while read -r line; do
  COMP_WORDS=(volseg $line); [ "${line% }" = "$line" ] && COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
  COMPREPLY=(); _volseg_completion volseg; echo "${COMPREPLY[*]}" | tr '\\n' ' '; echo
done
"""


ASKED = {"tra": ["train"], "doctor --q": ["--quick"]}
"""What is typed, and what bash offers."""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Return bash's completions of each beginning."""
    if shutil.which("bash") is None:
        pytest.skip("needs bash")
    folder = tmp_path_factory.mktemp("completion")
    program = folder / "volseg"
    program.write_text(PROGRAM, encoding="utf-8")
    program.chmod(0o755)
    ran = subprocess.run(
        ["bash", "-c", ASK],
        input="\n".join(ASKED) + "\n",
        capture_output=True,
        encoding="utf-8",
        cwd=folder,
        env={**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"},
        check=True,
    )
    return dict(zip(ASKED, (line.split() for line in ran.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("asked", ASKED)
def test_bash_is_answered(answers: dict[str, list[str]], asked: str) -> None:
    assert answers[asked] == ASKED[asked]


def test_an_answer_takes_no_import_of_torch() -> None:
    ask = {**os.environ, "_VOLSEG_COMPLETE": "complete_bash", "COMP_WORDS": "volseg doctor --q", "COMP_CWORD": "2"}
    code = "import sys; sys.argv = ['volseg']\nfrom volseg.cli import app\ntry:\n    app(prog_name='volseg')\n"
    code += "finally:\n    sys.stderr.write(str('torch' in sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], env=ask, capture_output=True, encoding="utf-8")
    assert (ran.stdout.split(), ran.stderr) == (["--quick"], "False")
