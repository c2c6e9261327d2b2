"""No module but those of ``volseg.device`` that are for it, ``*_internals.py``, names a private name of torch."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import volseg

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
