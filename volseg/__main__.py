"""``python -m volseg``, and with it ``torchrun -m volseg``."""

from volseg.cli import run_to_end

if __name__ == "__main__":
    run_to_end()
