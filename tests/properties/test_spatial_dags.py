"""Random networks on slabs equal themselves on one device, or are refused with a typed error."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import spatial_dags as dags
from in_group import in_group
from torch import Tensor

from volseg.parallel.spatial.volume import ShardedVolume


def assert_equal_or_refused(seeds: range, draw: Callable[[int], Any] = dags.draw) -> Counter[str]:
    """Compare the networks of these seeds; return how many came out how."""
    verdicts: Counter[str] = Counter()
    for seed in seeds:
        plan = draw(seed)
        outcome = dags.compared(plan, **dags.devices_of(plan))
        assert outcome.ok, f"seed {seed} is {outcome.verdict}: {outcome.what}\n{plan}"
        verdicts[outcome.verdict] += 1
    return verdicts


@pytest.mark.parametrize("first", range(0, 300, 100))
def test_a_random_network_on_slabs_equals_itself_or_is_refused(first: int) -> None:
    verdicts = assert_equal_or_refused(range(first, first + 100))
    assert verdicts["equal"] >= 33, f"few networks run at all: {verdicts}"


@pytest.mark.parametrize(
    ("kind", "count", "equal"),
    [("draw_fused", 60, 42), ("draw_stack", 75, 60), ("draw_deep", 40, 10), ("draw_slabs", 50, 25)],
)
def test_a_random_network_of_one_kind_equals_itself_or_is_refused(kind: str, count: int, equal: int) -> None:
    assert assert_equal_or_refused(range(count), getattr(dags, kind))["equal"] >= equal


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, *range(1000, 3000, 500)])
@pytest.mark.parametrize("kind", ["draw", "draw_fused", "draw_stack", "draw_deep", "draw_slabs"])
def test_more_random_networks(kind: str, first: int) -> None:
    assert_equal_or_refused(range(first, first + 500), getattr(dags, kind))


def check_ranks(processes: int, first: int, count: int, kind: str = "draw") -> None:
    found = in_group(processes, dags.compared_on_processes, first, count, kind, seconds=count * 10)
    for rank, outcomes in enumerate(found):
        for seed, (verdict, what) in outcomes.items():
            assert verdict not in ("WRONG", "CRASH"), f"seed {seed} on rank {rank} is {verdict}: {what}"
    assert len(found[0]) == count
    verdicts = [[verdict for verdict, _ in outcomes.values()] for outcomes in found]
    assert all(one == verdicts[0] for one in verdicts), "the processes do not refuse alike"
    assert verdicts[0].count("equal") >= count // 4


@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["draw", "draw_deep", "draw_slabs"])
def test_random_networks_on_processes(processes: int, kind: str) -> None:
    check_ranks(processes, 0, 12, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["draw", "draw_deep", "draw_slabs"])
@pytest.mark.parametrize("processes", [2, 3])
def test_more_random_networks_on_processes(processes: int, kind: str) -> None:
    check_ranks(processes, 1000, 400, kind)


def plan_of(*steps: tuple[str, str]) -> object:
    drawn = [dags.Step(kind, name, 1, 1) for kind, name in steps]
    return dags.Plan(0, ("conv", "norm and activation"), tuple(drawn), (1, 4, 8, 5, 4), "another", "last")


def test_the_comparison_rejects_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison that passes everything shows nothing: drop the halo, lose half of a gradient."""
    plan = plan_of(("layer", "0"), ("unary", "tanh and sigmoid"), ("layer", "1"))
    assert dags.compared(plan, **dags.devices_of(plan)).verdict == "equal"

    def halved(x: Tensor) -> Tensor:
        y = x.tanh() * x.sigmoid()
        return y / 2 + y.detach() / 2 if isinstance(x, ShardedVolume) else y

    monkeypatch.setitem(dags.UNARY, "tanh and sigmoid", halved)
    outcome = dags.compared(plan, **dags.devices_of(plan))
    assert outcome.verdict == "WRONG"
    assert "gradient of layers.0.weight" in outcome.what

    def crashing(x: Tensor) -> Tensor:
        return x if not isinstance(x, ShardedVolume) else x.missing

    monkeypatch.setitem(dags.UNARY, "tanh and sigmoid", crashing)
    assert dags.compared(plan, **dags.devices_of(plan)).verdict == "CRASH"
