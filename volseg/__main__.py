"""The command ``volseg``, as a script, as ``python -m volseg``, and with it as ``torchrun -m volseg``."""

import os
import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line as this process; what signals do to it is settled before anything else is imported."""
    from volseg.signals import end_on_signals  # behind what takes the working folder off the path

    end_on_signals()
    from volseg.cli import run_to_end  # takes time, in which signals come

    run_to_end()


def _leave_working_folder() -> None:
    """Take the working folder off the path, where ``python -m`` puts it: a ``torch.py`` there is not torch."""
    try:
        here = os.getcwd()
    except OSError:  # it was removed, and is not on the path either
        return
    if sys.path[:1] in ([""], [here]) and not sys.flags.safe_path:
        del sys.path[0]


if __name__ == "__main__":
    _leave_working_folder()
    main()
