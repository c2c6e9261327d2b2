"""Every config that comes with volseg is found by its name and can be run as written."""

from pathlib import Path

import pytest

from volseg.config.loading import load_config
from volseg.config.shipped import list_shipped, shipped_config_path
from volseg.errors import ConfigError
from volseg.experiment.building import check_components

ROOT = Path(__file__).parents[2]


def test_every_config_of_the_source_tree_is_found_by_its_name():
    assert {"quickstart", "task04_cpu", "task04_unet", "task04_vnet", "msd/task09_spleen"} <= {*list_shipped()}
    assert shipped_config_path("msd/task09_spleen") == ROOT / "configs" / "msd" / "task09_spleen.yaml"


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_config_loads_and_names_known_components(path):
    config = load_config(path)
    check_components(config)
    assert config.name == path.stem


def test_another_name_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="no config called 'task4_cpu' comes with volseg; did you mean 'task04_cpu'"):
        shipped_config_path("task4_cpu")
