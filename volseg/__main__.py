"""``python -m volseg``, and with it ``torchrun -m volseg``."""

from volseg.cli import main

if __name__ == "__main__":
    main()
