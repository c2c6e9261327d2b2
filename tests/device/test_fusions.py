"""Which fusions are on."""

import pytest

from volseg.device import fusions


def test_all_are_on_but_where_they_are_switched_off() -> None:
    assert all(map(fusions.is_on, fusions.NAMES))
    with fusions.without("pairs", "attention"):
        with fusions.without("pairs"):
            assert {name for name in fusions.NAMES if not fusions.is_on(name)} == {"pairs", "attention"}
        assert {name for name in fusions.NAMES if not fusions.is_on(name)} == {"pairs", "attention"}
    with pytest.raises(RuntimeError), fusions.without("sums"):
        raise RuntimeError
    assert all(map(fusions.is_on, fusions.NAMES))


def test_an_unknown_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no fusion is called \['paris'\]; there are pooled statistics, "):
        fusions.without("paris").__enter__()
