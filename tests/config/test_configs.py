"""Every config in the repository can be run as written."""

from pathlib import Path

import pytest

from volseg.config.loading import load_config
from volseg.experiment.building import check_components

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


def test_the_configs_are_found():
    assert {path.stem for path in CONFIGS} >= {"quickstart", "task04_unet", "task04_vnet"}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_loads_and_names_known_components(path):
    config = load_config(path)
    check_components(config)
    assert config.name == path.stem
