"""How old a process is, to who counts all of it, and how it begins anew."""

import subprocess
import sys
import time

from volseg.lifetime import count_from_beginning, take_age


def test_only_one_piece_of_work_gets_the_seconds_since_its_process_began():
    assert take_age() == 0  # a notebook may do something else
    begun = time.monotonic()
    count_from_beginning()
    time.sleep(0.01)
    assert 0.01 <= take_age() <= time.monotonic() - begun
    assert take_age() == 0


def test_a_process_with_no_descriptor_left_begins_anew():
    code = "import os, resource; from volseg.lifetime import begin_anew\n"
    code += "if 'BEGUN' in os.environ: raise SystemExit(7)\nresource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
    code += "try:\n    while True: os.open('/dev/null', 0)\nexcept OSError: begin_anew({'BEGUN': '1'})"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 7
