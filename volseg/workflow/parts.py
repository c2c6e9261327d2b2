"""Parts of a network, by patterns of its parameters' names: frozen, or with a learning rate of their own.

Names are the plain network's, whatever it is wrapped in. In a pattern ``*`` stands for anything, dots too. A pattern
that matches nothing is refused: a part that is believed frozen must not train.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from volseg.config.nearest import did_you_mean
from volseg.device.module_internals import NormBase
from volseg.errors import ConfigError

__all__ = ["find_frozen_norms", "freeze_parts", "group_parameters", "match_parameters"]

ALIKE = frozenset({"capturable", "differentiable", "foreach", "fused", "maximize", "params"})
"""Settings of an optimizer that say how it computes, and are the same for all parameters."""


def match_parameters(patterns: Iterable[str], names: Sequence[str], setting: str) -> dict[str, list[str]]:
    """Return the names that each pattern matches.

    Raises
    ------
    ConfigError
        For a pattern that matches none, with the nearest names.
    """
    matched = {pattern: [name for name in names if fnmatchcase(name, pattern)] for pattern in patterns}
    for pattern in [pattern for pattern, found in matched.items() if not found]:
        stem = pattern.partition("*")[0].rstrip(".") or pattern
        parts = {".".join(name.split(".")[:depth]) for name in names for depth in range(1, name.count(".") + 2)}
        near = get_close_matches(stem, parts, n=3) or {name.partition(".")[0] for name in names}
        near = [part if part in names else f"{part}.*" for part in near]  # a part's own name matches no parameter
        raise ConfigError(f"{setting}: no parameter is called {pattern!r}; {did_you_mean(stem, near)}")
    return matched


def freeze_parts(network: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Let no optimizer change the parameters that ``patterns`` match; return their names.

    Raises
    ------
    ConfigError
        For a pattern that matches none, or if nothing would be left to train.
    """
    names = [name for name, _ in network.named_parameters()]
    frozen = {name for found in match_parameters(patterns, names, "training.frozen").values() for name in found}
    if frozen and frozen == set(names):
        raise ConfigError(f"training.frozen: {list(patterns)} match all {len(names)} parameters; leave some to train")
    for name, parameter in network.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)
    return [name for name in names if name in frozen]


def find_frozen_norms(network: nn.Module) -> list[nn.Module]:
    """Return the norms with running statistics that lie in frozen parts.

    Such a norm has only frozen parameters; one without any belongs to the smallest part around it that has some.
    """
    modules = dict(network.named_modules())
    found: list[nn.Module] = []
    for path, module in modules.items():
        if not (isinstance(module, NormBase) and module.running_mean is not None):
            continue
        around = (modules[part] for part in _paths_upwards(path))
        part = next((one for one in around if any(True for _ in one.parameters())), None)
        if part is not None and not any(parameter.requires_grad for parameter in part.parameters()):
            found.append(module)
    return found


def group_parameters(network: nn.Module, parts: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the parameters that train as groups for an optimizer: those of no part first.

    Raises
    ------
    ConfigError
        For a pattern that matches no parameter that trains, a parameter of two parts, or a setting that all
        parameters share.
    """
    trained = {name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad}
    groups, part_of = [], dict[str, str]()
    for pattern, found in match_parameters(parts, list(trained), "optimizer.parts").items():
        if shared := sorted(ALIKE & parts[pattern].keys()):
            raise ConfigError(f"optimizer.parts: {pattern}: {shared[0]} is the same for all parameters; leave it out")
        if twice := [name for name in found if name in part_of]:
            raise ConfigError(
                f"optimizer.parts: {twice[0]} is matched by {part_of[twice[0]]!r} and {pattern!r}; narrow one of them"
            )
        part_of.update(dict.fromkeys(found, pattern))
        groups.append({"params": [trained[name] for name in found], **parts[pattern]})
    rest = [parameter for name, parameter in trained.items() if name not in part_of]
    return [{"params": rest}, *groups] if rest else groups


def _paths_upwards(path: str) -> Iterator[str]:
    """Yield a module's path and those of the modules around it, the network itself last."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""
