"""What ``plan_accuracy.py --one-gpu`` measures: sizes that are run in the ways ``auto`` chooses between on one GPU."""

from collections.abc import Iterator

from plan_accuracy_rows import Row, fill_row

__all__ = ["list_rows"]

_FAST = {"kernels": "fast", "recorded": True}
_ALL = {**_FAST, "checkpoint": "all"}
_TILED = {**_FAST, "checkpoint": "tiled"}
_EAGER_ALL = {"kernels": "fast", "checkpoint": "all"}  # dropout in what is recomputed cannot be recorded


def list_rows() -> list[Row]:
    """Return the configurations, in the order in which they are worth their time."""
    return [*_recorded(), *_other_ways(), *_other_sizes()]


def _recorded() -> Iterator[Row]:
    """Yield every network as ``volseg train`` runs it where memory suffices; last those that compile for long.

    Their kernels are told by name, so that the time of each can be laid beside its forecast.
    """
    told = {**_FAST, "profile": True}
    for net in ("dynunet", "vnet", "segresnet", "unet"):
        yield fill_row(net, **told)
    for net in ("unet_residual", "residual_encoder", "unetr", "highresnet", "mednext"):
        yield fill_row(net, batch=1, history=net == "unetr", **told)
    yield fill_row("swinunetr", patch=[96] * 3, **told)


def _other_ways() -> Iterator[Row]:
    """Yield the other ways to run those sizes: recomputed, started one by one, by torch's kernels."""
    for net in ("dynunet", "segresnet"):
        yield fill_row(net, **_ALL)
        yield fill_row(net, **_TILED)
        yield fill_row(net)
        yield fill_row(net, kernels="fast")
    yield fill_row("vnet", **_EAGER_ALL)
    yield fill_row("vnet")
    yield fill_row("unet", **_ALL)
    yield fill_row("unet")
    yield fill_row("swinunetr", patch=[96] * 3)
    yield fill_row("swinunetr", patch=[96] * 3, kernels="fast")
    yield fill_row("mednext", batch=1, **_ALL)
    yield fill_row("residual_encoder", batch=1, **_ALL)
    yield fill_row("unetr", batch=1)
    yield fill_row("unet_residual", batch=1)


def _other_sizes() -> Iterator[Row]:
    """Yield small patches, large ones and float32."""
    small = {"patch": [40, 56, 40], "batch": 9, "ema": 0.999}
    yield fill_row("unet", **_FAST, **small)
    yield fill_row("unet", **small)
    yield fill_row("vnet", **_FAST, patch=[32, 48, 32], batch=8, ema=0.999)
    for way in (_FAST, _ALL, _TILED):
        yield fill_row("dynunet", **way, patch=[256] * 3, batch=1)
    for net in ("dynunet", "segresnet"):
        yield fill_row(net, **_FAST, precision="fp32")
    yield fill_row("swinunetr", **_FAST, patch=[96] * 3, precision="fp32")
    yield fill_row("swinunetr", **_FAST, patch=[128] * 3, batch=1)
    yield fill_row("vnet", **_FAST, patch=[192] * 3, batch=1)
    yield fill_row("vnet", **_EAGER_ALL, patch=[192] * 3, batch=1)
    yield fill_row("segresnet", **_FAST, patch=[192] * 3, batch=1)
    yield fill_row("segresnet", **_TILED, patch=[192] * 3, batch=1)
    yield fill_row("unet", **_FAST, patch=[96] * 3, batch=4, precision="fp32")
    yield fill_row("vnet", **_FAST, patch=[64] * 3, batch=32)
