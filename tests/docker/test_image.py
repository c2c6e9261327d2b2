"""Build the image without Docker and use it: minutes, as root on Linux; ``make test-image`` runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

DOCKER = Path(__file__).parents[2] / "docker"


@pytest.mark.image
@pytest.mark.timeout(3600)
def test_the_image_trains_answers_for_its_health_stops_and_goes_on(tmp_path):
    sys.path.insert(0, str(DOCKER))
    from image import why_not  # the scripts of docker/ are no package

    if (reason := why_not()) is not None:
        pytest.skip(reason)
    result = tmp_path / "result.json"
    tried = subprocess.run([sys.executable, DOCKER / "try_image.py", "--result", result], check=False)
    assert tried.returncode == 0
    took = json.loads(result.read_text(encoding="utf-8"))
    assert took["status_after_sigterm"] == 143
    assert took["versions"]["torch"].endswith("+cpu")
