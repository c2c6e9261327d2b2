"""Sharded operators, one family per module; importing this package registers all of them in the table."""

from importlib import import_module
from pkgutil import iter_modules

for family in sorted(module.name for module in iter_modules(__path__)):
    import_module(f"{__name__}.{family}")
