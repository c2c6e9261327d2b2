"""Kernels compiled without a GPU are those that a training on such a GPU requests."""

from pathlib import Path

import pytest
from kernels import run_with_compiler

from volseg.device.triton_kernels import INSTALLED

ROOT = Path(__file__).parents[2]

BEFOREHAND = """
import os, sys
from pathlib import Path
from volseg.config.loading import load_config
from volseg.estimate.gpu_kinds import find_kind
from volseg.experiment import compile_beforehand

def compile_with(*overrides):
    config = load_config(sys.argv[1], [*sys.argv[2:], *overrides])
    number = compile_beforehand(config, find_kind("h200"), channels=1, classes=3)
    return number, {file for file in Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin")}

number, files = compile_with()
assert number == len(files) > 15, (number, files)
assert compile_with("data.root=/data/Task04_Hippocampus", "output=/runs/one") == (number, files)
assert len(compile_with("patch.size=[8, 16, 32]")[1]) > number
"""


@pytest.mark.kernels
@pytest.mark.skipif(not INSTALLED, reason="needs Triton: make test-kernels installs it")
def test_what_was_compiled_where_no_gpu_is_is_found_by_the_same_training_on_other_data(tmp_path):
    small = ["network.filters=[16, 32, 32]", "patch.size=[8, 16, 16]", "patch.batch=1", "inference.window=[8, 16, 16]"]
    run_with_compiler(tmp_path, "-c", BEFOREHAND, str(ROOT / "configs/task04_unet.yaml"), *small)
