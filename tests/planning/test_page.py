"""The page names every preset; ``tests/docs`` runs it."""

import pytest
from documented import ROOT

PAGE = ROOT / "docs" / "planning.md"


@pytest.mark.parametrize("preset", ["unet", "resenc", "vnet", "whole"])
def test_every_preset_is_on_the_page(preset):
    assert f"| `{preset}` |" in PAGE.read_text(encoding="utf-8")
