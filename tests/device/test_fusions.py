"""Which fusions are on."""

import pytest

from volseg.device import fusions


def test_untried_ones_are_off_but_where_they_are_asked_for() -> None:
    assert {*fusions.UNTRIED} <= {*fusions.NAMES}
    by_default = {name for name in fusions.NAMES if fusions.is_on(name)}
    assert by_default == {*fusions.NAMES} - {*fusions.UNTRIED}
    with fusions.with_untried():
        assert all(map(fusions.is_on, fusions.NAMES))
        with fusions.without("pairs", fusions.UNTRIED[0]):
            assert {name for name in fusions.NAMES if not fusions.is_on(name)} == {"pairs", fusions.UNTRIED[0]}
        assert all(map(fusions.is_on, fusions.NAMES))
    with pytest.raises(RuntimeError), fusions.with_untried():
        raise RuntimeError
    assert {name for name in fusions.NAMES if fusions.is_on(name)} == by_default
