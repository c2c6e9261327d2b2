"""A misspelt path was refused after 4 to 17 seconds: each verb imported torch before it looked for the path.

A near name beside the path was offered for configs only, not for folders.
"""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from volseg.__main__ import main
try:
    main()
finally:
    print("torch" in sys.modules)
"""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train my_dta", "did you mean the folder 'my_data'?"),
        ("train task04_unett", "did you mean 'task04_unet'"),
        ("cross-validate my.yaml", "my.yaml cannot be read: No such file"),
        ("plan my.yaml", "my.yaml cannot be read: No such file"),
        ("configure my_dta -o my.yaml", "my_dta does not exist; name the TaskNN_Name folder"),
        ("data check my_dta", "did you mean 'my_data'?"),
        ("predict runs/first scan.nii.gz", "runs/first does not exist; name a run folder"),
        ("predict my_data scam.nii.gz", "did you mean 'scan.nii.gz'?"),
        ("validate runs/first", "runs/first does not exist; name the folder that"),
        ("evaluate --predictions my_data --labels nowhere", "nowhere does not exist; name a folder with a label map"),
        ("compare runs/first runs/second", "runs/first does not exist; name runs"),
        ("train task04_cpu --set data.root=my_dta", "did you mean 'my_data'?"),
        ("train task04_cpu --set training.epoch=5", "did you mean 'epochs'?"),
        ("cross-validate task04_cpu --set data.root=my_dta", "did you mean 'my_data'?"),
        ("export my_dta -o model.zip", "did you mean 'my_data'?"),
        ("report my_dta", "did you mean 'my_data'?"),
        ("data info ./my_dta", "did you mean 'my_data'?"),
        ("data fetch Tsk4_Hipocampus", "did you mean 'Task04_Hippocampus'"),
    ],
)
def test_a_path_that_does_not_exist_is_refused_before_torch_is_imported(tmp_path, words, message):
    (tmp_path / "my_data").mkdir()
    (tmp_path / "scan.nii.gz").touch()
    ran = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM, *words.split()], cwd=tmp_path, capture_output=True, encoding="utf-8"
    )
    assert ran.returncode == 1
    assert message in ran.stderr
    assert ran.stdout.strip() == "False"


def test_a_value_behind_a_space_is_answered_by_its_key(tmp_path):
    """``--set training.epochs 5`` was an "unexpected extra argument (5)"."""
    words = ["train", "task04_cpu", "--set", "training.epochs", "5"]
    ran = subprocess.run([sys.executable, "-P", "-m", "volseg", *words], cwd=tmp_path, capture_output=True)
    assert ran.returncode == 2
    said = " ".join(ran.stderr.decode("utf-8").replace("│", " ").split())
    assert "training.epochs has no value: write --set training.epochs=VALUE, without a space" in said
