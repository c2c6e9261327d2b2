import importlib
import pkgutil
import subprocess
import sys

import pytest

import volseg
from volseg import errors

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(volseg.__path__, "volseg.")
    if module.name != "volseg.__main__"  # importing it runs the command line
)


@pytest.mark.parametrize("name", MODULES)
def test_all_names_what_is_there(name):
    module = importlib.import_module(name)
    missing = [public for public in getattr(module, "__all__", ()) if not hasattr(module, public)]
    assert missing == []


def test_the_package_gives_its_public_names_and_no_other():
    for name in volseg.__all__:
        assert getattr(volseg, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'Trainer'"):
        _ = volseg.Trainer


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_is_documented_in_the_tree_and_is_a_builtin_too(name):
    kind = getattr(errors, name)
    assert name in errors.__doc__
    assert issubclass(kind, errors.VolsegError)
    builtin = (ValueError, KeyError, RuntimeError, ArithmeticError, MemoryError)
    assert kind is errors.VolsegError or issubclass(kind, builtin)


def test_the_parallel_package_is_reached_without_a_second_import() -> None:
    call = (
        "import volseg; volseg.parallel.verification.verify, volseg.parallel.whole, volseg.parallel.pointwise_function"
    )
    subprocess.run([sys.executable, "-c", call], check=True)
