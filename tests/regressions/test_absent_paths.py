"""A misspelt path was refused after 4 to 17 seconds: each verb imported torch before it looked for the path.

A near name beside the path was offered for configs only, not for folders. ``--set training.epochs 5`` was an
"unexpected extra argument (5)".
"""

import os
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
        ("train 4", "did you mean the folder 'Dataset004_Heart'?"),
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
        ("train task04_cpu --set training.epochs 5", "training.epochs has no value: write --set training.epochs=VALUE"),
        ("cross-validate task04_cpu --set data.root=my_dta", "did you mean 'my_data'?"),
        ("export my_dta -o model.zip", "did you mean 'my_data'?"),
        ("report my_dta", "did you mean 'my_data'?"),
        ("data info ./my_dta", "did you mean 'my_data'?"),
        ("data fetch Tsk4_Hipocampus", "did you mean 'Task04_Hippocampus'"),
    ],
)
def test_a_path_that_does_not_exist_is_refused_before_torch_is_imported(tmp_path, words, message):
    for name in ("my_data", "Dataset004_Heart"):
        (tmp_path / name).mkdir()
    (tmp_path / "scan.nii.gz").touch()
    ran = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM, *words.split()],
        cwd=tmp_path,
        env={**os.environ, "nnUNet_raw": "."},
        capture_output=True,
        encoding="utf-8",
    )
    assert ran.returncode == (2 if "Usage:" in ran.stderr else 1)
    assert message in " ".join(ran.stderr.replace("│", " ").split())
    assert ran.stdout.strip() == "False"
