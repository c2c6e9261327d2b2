"""``volseg status`` showed gloo's own text of a job whose process was killed: a connection to some address was closed.

The leader writes the status of a job, and its own error was the broken connection. It waits now until the supervision
knows which process died, or is ended by it, and the status says that.
"""

import os
import re
import subprocess
import sys

import pytest

from tests.experiment.conftest import write_config
from volseg.data.synthetic import make_task
from volseg.monitoring.run_files import look_at

pytestmark = pytest.mark.usefixtures("ready_python")

KILLED = """
import os, signal
import volseg
from volseg.parallel.devices import get_process_rank

@volseg.register("hook", "Killed")
class Killed(volseg.Hook):
    def on_batch_end(self, training, fields):
        if get_process_rank() == 1 and training.epoch == 1:
            {what}
"""


def run_job(what, start, folder, *settings):
    """Train under torchrun with a process that does something in its second epoch; return the status that is left."""
    (folder / "killed.py").write_text(KILLED.format(what=what), encoding="utf-8")
    config_file = write_config(make_task(folder / "Task00_Synthetic", num_cases=6, num_test=1), folder)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "volseg"]
    command += ["train", str(config_file), "--components", str(folder / "killed.py")]
    told = ("device=cpu", "hooks=[{name: Killed}]", "training.epochs=9", *settings)
    command += [part for each in told for part in ("--set", each)]
    job = start(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, encoding="utf-8")
    _, errors = job.communicate(timeout=300)
    assert job.returncode != 0
    status = look_at(folder / "run").status
    assert status.state == "failed", errors
    assert "gloo" not in status.message
    return status.message


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", r"process 1 of 2 \(\S+, cpu\) died silently, last seen at"),
        ("raise KeyError('something of ours')", r"process 1 of 2 \(\S+, cpu\): KeyError: 'something of ours'"),
    ],
    ids=["killed", "fails"],
)
@pytest.mark.parametrize("mesh", ["parallel.data=2", "parallel.spatial=2"])
def test_the_status_names_the_process_that_died(what, told, mesh, start, tmp_path):
    message = run_job(what, start, tmp_path, mesh)
    assert re.search(told, message), message


def test_the_status_of_a_job_that_hung_says_where_each_process_was(start, tmp_path):
    """The status stayed at the last batch, and its process was gone."""
    message = run_job("signal.pause()", start, tmp_path, "parallel.data=2", "parallel.timeout=20")
    assert re.search(r"no process has made progress for \d+ s", message), message
    assert re.search(r"process 1 of 2 \(\S+, cpu\): train, epoch 2, batch 1", message), message
