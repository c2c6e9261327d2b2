"""The command line: each verb a few lines onto `volseg.experiment`, in a module by what it is about."""

from volseg.cli.root import app
from volseg.cli.running import main

__all__ = ["app", "main"]
