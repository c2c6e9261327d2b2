import ast
import gc
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import volseg
from volseg import errors
from volseg.importing import import_late

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


# No module but those of ``volseg.device`` that are for it, ``*_internals.py``, names a private name of torch.


ROOT = Path(volseg.__file__).parent
ALLOWED = {ROOT / "device" / f"{of}_internals.py" for of in ("torch", "module", "fake", "compiler")}
FILES = sorted({*ROOT.rglob("*.py")} - ALLOWED)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


REGISTRIES = {name for name in vars(nn.Module()) if is_private(name)}
"""Of a module: also as a string, by which they are read and set."""

ATTRIBUTES = REGISTRIES | {
    name
    for of in (Tensor, nn.Module, torch.ops.aten.add.Tensor, torch.UntypedStorage, torch.Generator, torch.dtype)
    for name in dir(of)
    if is_private(name)
}
"""Of objects of torch, whatever an expression calls them."""


def find_private_names(tree: ast.Module) -> Iterator[str]:
    """Yield the private names of torch in a module, with their lines."""
    imported: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [(alias.name, alias.asname or alias.name.split(".")[0]) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [(f"{node.module}.{alias.name}", alias.asname or alias.name) for alias in node.names]
        else:
            continue
        for name, bound in names:
            if name.split(".")[0] == "torch":
                imported.add(bound)
                if any(map(is_private, name.split("."))):
                    yield f"line {node.lineno}: import of {name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in REGISTRIES:
            yield f"line {node.lineno}: {node.value!r}"
        if not isinstance(node, ast.Attribute) or not is_private(node.attr):
            continue
        owner = ast.unparse(node.value)
        of_torch = owner.split(".")[0] in imported
        if of_torch or (node.attr in ATTRIBUTES and owner not in ("self", "cls", "super()")):
            yield f"line {node.lineno}: {owner}.{node.attr}"


def test_no_private_name_of_torch() -> None:
    names = {str(file): [*find_private_names(ast.parse(file.read_text(encoding="utf-8")))] for file in FILES}
    found = {file: sorted(set(private)) for file, private in names.items() if private}
    assert not found, f"give it a public name, and a test, in volseg/device/torch_internals.py or beside it: {found}"


@pytest.mark.parametrize(
    ("source", "number"),
    [
        ("import torch\ntorch._C.DisableTorchFunction()", 1),
        ("from torch.utils import _pytree as pytree", 1),
        ("from torch import nn\nnn.modules.batchnorm._NormBase", 1),
        ("def changed(x): return x._version", 1),
        ("def own(module): return module._buffers, vars(module)['_parameters']", 2),
        ("class Ours:\n    def get(self): return self._version", 0),
        ("def slabs(volume): return volume._slabs", 0),
        ("import torch\ntorch.overrides.__doc__", 0),
    ],
)
def test_what_counts_as_private(source: str, number: int) -> None:
    found = list(find_private_names(ast.parse(source)))
    assert len(found) == number, found


# Modules that are imported late leave the garbage collector on or off, as it was before.


@pytest.mark.parametrize("collects", [True, False])
@pytest.mark.parametrize(
    "text", ["", "raise KeyError", "from volseg.importing import import_late; import_late('json')"]
)
def test_garbage_is_collected_afterwards_if_it_was_before(collects, text, tmp_path, monkeypatch):
    name = f"imported_late_{collects}_{len(text)}"
    (tmp_path / f"{name}.py").write_text(f"import gc\nassert not gc.isenabled()\n{text}\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    (gc.enable if collects else gc.disable)()
    try:
        if text.startswith("raise"):
            with pytest.raises(KeyError):
                import_late(name)
        else:
            import_late(name)
        assert gc.isenabled() == collects
    finally:
        gc.enable()
