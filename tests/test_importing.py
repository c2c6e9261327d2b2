"""Modules that are imported late: whoever collects garbage, or does not, goes on as before."""

import gc

import pytest

from volseg.importing import import_late


@pytest.mark.parametrize("collects", [True, False])
@pytest.mark.parametrize(
    "text", ["", "raise KeyError", "from volseg.importing import import_late; import_late('json')"]
)
def test_garbage_is_collected_afterwards_if_it_was_before(collects, text, tmp_path, monkeypatch):
    name = f"imported_late_{collects}_{len(text)}"
    (tmp_path / f"{name}.py").write_text(f"import gc\nassert not gc.isenabled()\n{text}\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    (gc.enable if collects else gc.disable)()
    try:
        if text.startswith("raise"):
            with pytest.raises(KeyError):
                import_late(name)
        else:
            import_late(name)
        assert gc.isenabled() == collects
    finally:
        gc.enable()
