"""Run the command line: each verb is a thin layer over `volseg.experiment`, in a module by subject."""

from volseg.cli.running import app, main, run_to_end

__all__ = ["app", "main", "run_to_end"]
