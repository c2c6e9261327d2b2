"""Checkpoints of runs."""

from volseg.checkpointing.file import load_checkpoint


def latest(folder):
    """Return the newest checkpoint of a run folder."""
    return load_checkpoint(folder / "checkpoints" / "latest.pt")
