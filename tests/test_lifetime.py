"""A process that starts itself again."""

import subprocess
import sys


def test_a_process_with_no_descriptor_left_begins_anew():
    code = "import os, resource; from volseg.lifetime import begin_anew\n"
    code += "if 'BEGUN' in os.environ: raise SystemExit(7)\nresource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
    code += "try:\n    while True: os.open('/dev/null', 0)\nexcept OSError: begin_anew({'BEGUN': '1'})"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 7
