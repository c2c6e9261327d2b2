"""Build the wheel, install it outside the source tree, and use it there: ``make wheel``.

Its environment is a new one that sees the installed requirements of this interpreter, so that a minute is enough; the
wheel itself comes first in it, and nothing of the source tree is on its path.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

NEEDED = (
    "volseg/py.typed",
    "volseg/config/volseg.schema.json",
    "volseg/configs/quickstart.yaml",
    "volseg/configs/task04_unet.yaml",
    "volseg/configs/msd/task09_spleen.yaml",
    "volseg/reporting/niivue.LICENSE",
)
VIEWER = "volseg/reporting/niivue.js"
"""In wheels where `make viewer` fetched it before."""

USER = """import torch
import volseg
from volseg.config.loading import load_config
from volseg.errors import ConfigError
reveal_type(volseg.__version__)
reveal_type(load_config("a.yaml").training.epochs)
load_config(3)
volseg.Trainning
volseg.ModelParallel(torch.nn.ReLU(), strategi="spatial")
volseg.ModelParallel(torch.nn.ReLU(), strategy="spatial", offload=True)
"""
"""What a user of the library may write; a type checker reports lines 7 to 9."""


def run(*command: str | Path, folder: Path, status: int = 0) -> str:
    """Run a command as a user would, and return what it printed."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VOLSEG"))}
    own |= {"VOLSEG_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": own.get("OMP_NUM_THREADS", "1")}
    ran = subprocess.run([*map(str, command)], cwd=folder, env=own, capture_output=True, encoding="utf-8")
    said = ran.stdout + ran.stderr
    assert ran.returncode == status, f"{command} ended with {ran.returncode}:\n{said}"
    return said


def build(folder: Path) -> Path:
    """Build the wheel of the files that git knows, as a clone would have them, and look into it."""
    clone = folder / "clone"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in listed.decode("utf-8").split("\0"):
        if name and (ROOT / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, clone / name)
    if (ROOT / VIEWER).is_file():
        shutil.copyfile(ROOT / VIEWER, clone / VIEWER)
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, clone, folder=folder)
    (wheel,) = folder.glob("volseg-*.whl")
    with zipfile.ZipFile(wheel) as content:
        names = set(content.namelist())
    needed = [*NEEDED, *([VIEWER] if (ROOT / VIEWER).is_file() else [])]
    assert not (missing := [name for name in needed if name not in names]), missing
    assert not (strange := sorted(name for name in names if name.startswith(("tests/", "workflows/")))), strange
    shutil.rmtree(clone)
    return wheel


def install(wheel: Path, folder: Path) -> Path:
    """Install the wheel into a new environment, which sees what this interpreter has beside; return its scripts."""
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", folder=folder)
    scripts = folder / "venv" / ("Scripts" if os.name == "nt" else "bin")
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(run(scripts / "python", "-c", ask, folder=folder).strip())
    run(sys.executable, "-m", "pip", "--python", scripts / "python", "install", "-q", "--no-deps", wheel, folder=folder)
    # The folder alone: path files in it, such as that of an editable installation of volseg, are not read.
    (site / "requirements.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    where = run(scripts / "python", "-c", "import volseg; print(volseg.__file__)", folder=folder).strip()
    assert Path(where).is_relative_to(site), where
    return scripts


def use(scripts: Path, folder: Path) -> None:
    """Type what a user types first, in an empty folder."""
    volseg = scripts / "volseg"
    assert "quickstart" in run(volseg, "--help", folder=folder)
    assert json.loads(run(volseg, "doctor", "--quick", "--json", folder=folder))["findings"]
    assert "train" in run(volseg, "init", "--like", "task04_cpu", "-o", "mine.yaml", folder=folder)
    schema = json.loads(run(volseg, "schema", folder=folder))
    line = (folder / "mine.yaml").read_text(encoding="utf-8").splitlines()[0]
    assert json.loads(Path(line.partition("file://")[2]).read_text(encoding="utf-8")) == schema
    refused = run(volseg, "train", "task04_unet", folder=folder, status=1)
    assert "Task04_Hippocampus" in refused, refused  # the config is found, and the data is not
    short = ["--set", "training.epochs=1", "--set", "training.iterations=2", "--set", "patch.size=[16,16,16]"]
    said = run(volseg, "quickstart", "--output", "first", *short, folder=folder)
    assert "Next:" in said
    assert (folder / "first" / "config.yaml").is_file()
    assert "<h1>" in (folder / "first" / "report.html").read_text(encoding="utf-8")  # by the wheel's templates
    has_viewer = (ROOT / VIEWER).is_file()
    viewed = run(volseg, "view", "first", "--no-open", folder=folder, status=0 if has_viewer else 1)
    assert ("first/view.html" if has_viewer else "make viewer") in viewed, viewed
    for command in (line.strip() for line in said.splitlines() if " train " in line and "--resume" not in line):
        refused = run(volseg, "train", command.split(" train ")[1].split()[0], folder=folder, status=1)
        assert "Task04_Hippocampus" in refused, f"{command}: {refused}"  # the config is found, by its name or its path


def check_types(scripts: Path, folder: Path) -> None:
    """Let a type checker look at a user's program: it sees volseg's types, and what is wrong with a call."""
    (folder / "user.py").write_text(USER, encoding="utf-8")
    kept = folder / "mypy" if not (ROOT / ".mypy_cache").is_dir() else ROOT / ".mypy_cache" / "of_the_wheel"
    options = ["--follow-imports=silent", "--ignore-missing-imports", "--cache-dir", kept]
    said = run(scripts / "python", "-m", "mypy", *options, "user.py", folder=folder, status=1)
    assert 'user.py:5: note: Revealed type is "str"' in said.replace("builtins.str", "str"), said
    assert 'user.py:6: note: Revealed type is "int"' in said.replace("builtins.int", "int"), said
    assert 'user.py:7: error: Argument 1 to "load_config"' in said, said
    assert 'user.py:8: error: Module has no attribute "Trainning"' in said, said
    assert 'user.py:9: error: Unexpected keyword argument "strategi"' in said, said
    assert "Found 3 errors" in said, said


def main() -> None:
    """Build, install and use the wheel."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--types", action="store_true", help="let mypy look at a user's program too (a minute)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="volseg_wheel_") as name:
        folder = Path(name)
        wheel = build(folder)
        sys.stdout.write(f"{wheel.name}: {wheel.stat().st_size / 2**20:.1f} MiB\n")
        scripts = install(wheel, folder)
        empty = folder / "an empty folder"
        empty.mkdir()
        use(scripts, empty)
        if arguments.types:
            check_types(scripts, empty)
        sys.stdout.write("It works from an empty folder: --help, doctor, init, schema, train by name, quickstart\n")


if __name__ == "__main__":
    main()
