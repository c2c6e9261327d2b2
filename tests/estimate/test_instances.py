"""Machines that can be rented."""

import pytest

from volseg.errors import ConfigError
from volseg.estimate.gpu_kinds import KINDS, find_kind
from volseg.estimate.instances import INSTANCES, get_instance
from volseg.estimate.trace import Sent


def test_the_table_is_complete_and_consistent() -> None:
    wanted = {"p3.2xlarge", "p3.8xlarge", "p3.16xlarge", "p3dn.24xlarge", "p4d.24xlarge", "p5.48xlarge"}
    assert wanted <= set(INSTANCES)
    assert {"g5", "g6"} <= {name.split(".")[0] for name in INSTANCES}
    for name, instance in INSTANCES.items():
        assert instance.instance == name
        assert instance.gpu in KINDS.values()
        assert instance.num_gpus in (1, 4, 8)
        assert instance.links.bandwidth > 0
        assert "2026" in instance.price_source
        assert "us-east-1" in instance.price_source
        assert instance.price_per_hour is None or 0.3 < instance.price_per_hour < 100
        # A message of a megabyte takes longer than one of a byte, and nobody sends to nobody.
        if instance.num_gpus > 1:
            assert instance.links.seconds(Sent("copy", 2**20, 2)) > instance.links.seconds(Sent("copy", 1, 2)) > 0


def test_names_are_found_however_they_are_written() -> None:
    assert get_instance(" P3.8xlarge ").num_gpus == 4
    assert find_kind("V100-16") is KINDS["v100-16"]
    assert find_kind("nvidia h200") is KINDS["h200"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("p3.4xlarge", r"'p3.4xlarge' \(did you mean .*p3\.\d+xlarge.*number of GPUs"),
        ("p4d.12xlarge", r"'p4d\.12xlarge' \(did you mean .*p4d\.24xlarge"),
        ("frobnicate", r"'frobnicate' \(known: g4dn\.12xlarge"),
    ],
)
def test_an_unknown_machine_names_the_nearest(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        get_instance(name)


def test_a_family_of_one_machine_stands_for_it_and_of_several_all_are_listed() -> None:
    families = {name.partition(".")[0] for name in INSTANCES}
    assert len(families) == 10
    for family in families:
        named = [name for name in INSTANCES if name.startswith(f"{family}.")]
        if len(named) == 1:
            assert get_instance(f" {family.upper()}").instance == named[0]
            continue
        with pytest.raises(ConfigError, match=rf"'{family}' is a family of {len(named)} machines: name one of") as told:
            get_instance(family)
        assert all(name in str(told.value) for name in named)


def test_an_unknown_gpu_names_the_known() -> None:
    """For ``a100`` the first hint was ``h100``."""
    with pytest.raises(ConfigError, match=r"'a100' is not known \(did you mean 'a100-\d0' or 'a100-\d0'\?\)"):
        find_kind("a100")
