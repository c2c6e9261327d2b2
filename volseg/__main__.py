"""Entry point of the command ``volseg``, of ``python -m volseg`` and of ``torchrun -m volseg``."""

import os
import sys


def main() -> None:
    """Run the command line in this process; install signal handlers before importing anything else."""
    from volseg.signals import end_on_signals  # after the working folder has been removed from the path

    end_on_signals()
    from volseg.cli import run_to_end  # slow import: signals may arrive during it

    run_to_end()


def _leave_working_folder() -> None:
    """Remove the working folder, which ``python -m`` adds, from the path: a ``torch.py`` there is not torch."""
    try:
        here = os.getcwd()
    except OSError:  # the folder was deleted, so it is not on the path either
        return
    if sys.path[:1] in ([""], [here]) and not sys.flags.safe_path:
        del sys.path[0]


if __name__ == "__main__":
    _leave_working_folder()
    main()
