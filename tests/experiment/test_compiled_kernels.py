"""What is compiled without a GPU, and the note of it that a training on such a GPU finds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from volseg.device.triton_kernels import INSTALLED

ROOT = Path(__file__).parents[2]

BEFOREHAND = """
import sys
from volseg.config.loading import load_config
from volseg.estimate.candidate import Candidate
from volseg.estimate.gpu_kinds import find_kind
from volseg.experiment.placement import compiled_kernels
from volseg.experiment.placement.kernel_worker import make_order

config, gpu = load_config(sys.argv[1], sys.argv[2:]), find_kind("h200")
compiled = compiled_kernels.compile_beforehand(config, gpu, channels=1, classes=3)
assert make_order(config, Candidate(), gpu, 1) is None
elsewhere = load_config(sys.argv[1], [*sys.argv[2:], "data.root=/data/Task04_Hippocampus", "output=/runs/one"])
assert make_order(elsewhere, Candidate(), gpu, 1) is None
seen, facts = [], compiled_kernels.load_facts(config, 1, 3)
again = compiled_kernels.compile_kernels(
    config, gpu, processes=1, facts=facts, ready=lambda: seen.append(1)
)
assert seen == [1] and again.kernels == compiled.kernels > 15, (seen, again, compiled)
print(compiled_kernels.note_path(config, ["NVIDIA A10G"]).exists())
print(compiled_kernels.note_path(config, [gpu.name], 2).exists())
cut = compiled_kernels.compile_kernels(config, gpu, candidate=Candidate(spatial=2), facts=facts)
assert cut.kernels > 15 and not cut.problem, cut
"""


@pytest.mark.kernels
@pytest.mark.skipif(not INSTALLED, reason="needs Triton: make test-kernels installs it")
def test_what_was_compiled_where_no_gpu_is_is_not_compiled_by_a_training_on_that_gpu(tmp_path):
    small = ["network.filters=[16, 32, 32]", "patch.size=[8, 16, 16]", "patch.batch=1", "inference.window=[8, 16, 16]"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", BEFOREHAND, str(ROOT / "configs/task04_unet.yaml"), *small],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["False", "False"]
