"""The command line: each verb a few lines onto `volseg.experiment`, in a module by what it is about."""

from volseg.cli.running import app, main, run_to_end

__all__ = ["app", "main", "run_to_end"]
