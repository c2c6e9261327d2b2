import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import volseg
from volseg import errors

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(volseg.__path__, "volseg.")
    if module.name != "volseg.__main__"  # importing it runs the command line
)


def test_all_names_what_is_there():
    modules = [importlib.import_module(name) for name in MODULES]
    named = [(module, public) for module in modules for public in getattr(module, "__all__", ())]
    assert [f"{module.__name__}.{public}" for module, public in named if not hasattr(module, public)] == []


def test_the_package_gives_and_lists_its_public_names_and_tells_a_near_one():
    assert set(dir(volseg)) == {*volseg.__all__, "experiment", "parallel"}
    with pytest.raises(AttributeError, match="has no attribute 'Segmenter'"):
        _ = volseg.Segmenter
    with pytest.raises(AttributeError, match=r"'Trainning'; did you mean 'Training'\?"):
        _ = volseg.Trainning


@pytest.mark.parametrize("name", [name for name in volseg.__all__ if name != "__version__"])
def test_a_public_name_is_documented_with_all_its_parameters_and_stands_on_a_page(name):
    documented = inspect.getdoc(getattr(volseg, name))
    assert documented
    parameters = inspect.signature(getattr(volseg, name)).parameters if name != "VolsegError" else {}
    assert [each for each in parameters if not re.search(rf"\b{each}\b", documented)] == []
    assert f"`{name}`" in volseg.__doc__
    root = Path(__file__).parents[1]
    pages = [root / "README.md", *root.glob("docs/*.md")]
    assert any(re.search(rf"\b{name}\b", page.read_text(encoding="utf-8")) for page in pages)


def test_what_a_type_checker_sees_is_what_there_is():
    told = {
        name.name: statement.module
        for node in ast.parse(inspect.getsource(volseg)).body
        if isinstance(node, ast.If)
        for statement in node.body
        if isinstance(statement, ast.ImportFrom) and statement.module != "volseg"
        for name in statement.names
    }
    assert set(told) == set(volseg.__all__) - {"__version__"}
    for name, module in told.items():
        assert getattr(importlib.import_module(module), name) is getattr(volseg, name)


def test_importing_the_package_imports_no_torch():
    subprocess.run([sys.executable, "-c", "import sys, volseg; assert 'torch' not in sys.modules"], check=True)


def test_every_error_is_documented_in_the_tree_and_is_a_builtin_too():
    builtin = (ValueError, KeyError, RuntimeError, ArithmeticError, MemoryError)
    for name in errors.__all__:
        kind = getattr(errors, name)
        assert name in errors.__doc__
        assert issubclass(kind, errors.VolsegError)
        assert kind is errors.VolsegError or issubclass(kind, builtin), name


def test_the_parallel_package_is_reached_without_a_second_import() -> None:
    call = (
        "import volseg; volseg.parallel.verification.verify, volseg.parallel.whole, volseg.parallel.pointwise_function"
    )
    subprocess.run([sys.executable, "-c", call], check=True)
