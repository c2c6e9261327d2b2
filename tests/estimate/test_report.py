"""The table and the JSON of a plan, on constructed forecasts, and the machines that a plan prices."""

import json

import pytest
from pydantic import ValidationError

from volseg.errors import ConfigError
from volseg.estimate.candidate import Candidate, Estimate
from volseg.estimate.gpu_kinds import KINDS, find_kind
from volseg.estimate.instances import INSTANCES, get_instance
from volseg.estimate.report import LargestRow, PlanReport, build_row, build_skipped_row, format_table, format_volumes
from volseg.estimate.step_memory import MemoryUse
from volseg.estimate.trace import Sent

GIB = 2**30


MEMORY = MemoryUse(used=3 * GIB, reserved=4 * GIB, outside=GIB // 2, peak_in="backward", reserved_by_steps=3 * GIB)


def make_rows(price=12.24):
    runs = Estimate(candidate=Candidate(data=4, kernels="torch"), memory=MEMORY, seconds=0.25)
    alone = Estimate(candidate=Candidate(), memory=MEMORY, seconds=1.0, refused="needs 4.5 GiB, and there are 4.0 GiB")
    cannot = Estimate(candidate=Candidate(spatial=4), refused="fft has no sharded form")
    slower = Candidate(pipeline=4, split_size=2, kernels="torch")
    epoch = {"steps_per_epoch": 250, "price_per_hour": price}
    return [
        build_row(alone, chosen=False, **epoch),
        build_row(runs, chosen=True, **epoch),
        build_row(cannot, chosen=False, **epoch),
        build_skipped_row(slower, 0.4),
    ]


def make_report(**changed):
    fields = {"network": "VNet", "shape": (8, 1, 32, 48, 32), "precision": "float16", "gpu": "V100", "num_gpus": 4}
    fields |= {"gpu_bytes": 16 * GIB, "reserve_bytes": 0, "rates": "published", "fits": True, "why": "the fastest"}
    fields |= {"candidates": tuple(make_rows())}
    return PlanReport(**{**fields, **changed})


def test_the_table_marks_what_is_chosen_and_what_does_not_run():
    assert format_table(make_rows()) == "\n".join(
        [
            "| parallel          | used | reserved |      step |   epoch | $/epoch |",
            "|-------------------|------|----------|-----------|---------|---------|",
            "| x one GPU         | 3.00 |     4.50 |    1.00 s | 4.2 min |    0.85 |",
            "| > data 4          | 3.00 |     4.50 |    250 ms | 1.0 min |   0.213 |",
            "| x spatial 4       |      |          |   refused |         |         |",
            "|   pipeline 4 by 2 |      |          | >= 400 ms |         |         |",
        ]
    )
    assert "$" not in format_table(make_rows(price=None)), "a column without cells is left out"


def test_the_table_is_ascii_of_80_columns_whatever_it_holds():
    memory = MemoryUse(used=130 * GIB, reserved=139 * GIB, outside=GIB, peak_in="backward")
    candidates = [Candidate(data=16, spatial=16, checkpoint="all", kernels=kernels) for kernels in ("fast", "torch")]
    forecasts = [Estimate(candidate=each, memory=memory, seconds=99.9) for each in candidates]
    rows = [build_row(each, chosen=False, steps_per_epoch=10_000, price_per_hour=98.32) for each in forecasts]
    lines = format_table(rows).splitlines()
    assert max(map(len, lines)) <= 80
    assert "\n".join(lines).isascii()
    assert any("fast" in line for line in lines), "two of one name are told apart"


def test_json_validates_against_its_schema_and_comes_back_the_same():
    report = make_report()
    text = report.model_dump_json()
    assert PlanReport.model_validate_json(text) == report
    assert [row.state for row in report.candidates] == ["refused", "chosen", "refused", "slower"]
    again = report.candidates[1].estimate
    assert (again.memory, again.seconds, again.refused) == (MEMORY, 0.25, None), "as another process reads it"
    schema = PlanReport.model_json_schema()
    assert schema["additionalProperties"] is False
    assert set(json.loads(text)) == set(schema["properties"])
    row = schema["$defs"]["CandidateRow"]
    assert all(set(each) == set(row["properties"]) for each in json.loads(text)["candidates"])


@pytest.mark.parametrize(
    "changed", [{"rates": "guessed"}, {"gpu_bytes": -1}, {"surplus": 1}, {"candidates": ({"name": "one GPU"},)}]
)
def test_what_the_schema_does_not_know_is_refused(changed):
    with pytest.raises(ValidationError):
        make_report(**changed)


def test_largest_volumes_are_tabulated():
    rows = [
        LargestRow(name="one GPU", aspect=(1, 1, 1), sides=(96,) * 3, next_sides=(112,) * 3, total_bytes=15 * GIB),
        LargestRow(name="spatial: 4", aspect=(32, 48, 32), sides=None, next_sides=None, total_bytes=None),
    ]
    table = format_volumes(rows)
    assert "| one GPU    | cube  | 96x96x96 | 15.00 | 112x112x112 |" in table
    assert "| spatial: 4 | patch |     none |       |             |" in table


# Machines that can be rented.


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
        ("p4d", r"'p4d' \(known: p4d\.24xlarge\)"),
        ("frobnicate", r"'frobnicate' \(known: g4dn\.12xlarge"),
    ],
)
def test_an_unknown_machine_names_the_nearest(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        get_instance(name)


def test_an_unknown_gpu_names_the_known() -> None:
    """For ``a100`` the first hint was ``h100``."""
    with pytest.raises(ConfigError, match=r"'a100' is not known \(did you mean 'a100-\d0' or 'a100-\d0'\?\)"):
        find_kind("a100")
