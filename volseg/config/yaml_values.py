"""Read YAML as people mean it.

PyYAML follows YAML 1.1, in which ``1e-3`` is a text (a float needs a dot) and a key that stands twice silently keeps
its last value. Both would train with something else than what was written.
"""

import copy
import re
from collections.abc import Hashable
from functools import lru_cache
from typing import Any

import yaml

from volseg.errors import ConfigError
from volseg.files import require_text

__all__ = ["parse_yaml"]


class _Loader(yaml.SafeLoader):
    """Plain values only, as in ``yaml.safe_load``."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Return the mapping; a key that stands in it twice is an error."""
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} stands twice; keep one", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


# YAML 1.2's floats with an exponent: 1e-3, 2E5. SafeLoader copies the table of its base before it is added to.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def parse_yaml(text: str, source: str) -> Any:
    """Return the plain values that ``text`` holds.

    Raises
    ------
    ConfigError
        Names ``source``, line and column.

    Examples
    --------
    >>> parse_yaml("lr: 1e-3", "config.yaml")
    {'lr': 0.001}
    """
    try:
        values = copy.deepcopy(_load(text))
    except yaml.YAMLError as fault:
        remedy = "\nindent by spaces: YAML takes no tabs" if "'\\t'" in str(fault) else ""
        raise ConfigError(f"{source} is not valid YAML: {fault}{remedy}") from fault
    except RecursionError:
        raise ConfigError(f"{source} is nested too deeply to be a config") from None
    require_text(values, f"a name in {source}")
    return values


@lru_cache(maxsize=8)
def _load(text: str) -> Any:
    """Load a text once: what trains, validates and reports each reads a run's config, twenty milliseconds a time."""
    return yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader
