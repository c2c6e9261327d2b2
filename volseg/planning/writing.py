"""A plan as a YAML file in which every value says why it is what it is."""

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from volseg.config.json_schema import refer_to_schema
from volseg.config.loading import load_config
from volseg.config.yaml_values import dump_yaml
from volseg.files import replacing, require_new
from volseg.planning.geometry import PRESETS
from volseg.planning.plan import Plan
from volseg.version import __version__

__all__ = ["write_config"]

WIDTH = 110

DIRECTIONS = {"R": "right", "L": "left", "A": "front", "P": "back", "S": "head", "I": "feet"}

SOURCES = (
    "Rules: docs/planning.md. Spacing, patch, batch, network, intensities are nnU-Net's (Isensee et al. 2021,",
    "doi:10.1038/s41592-020-01008-z; its residual encoders: Isensee et al. 2024, arXiv:2404.09556).",
)


def write_config(plan: Plan, path: str | Path, *, overwrite: bool = False) -> Path:
    """Write the config of a plan, whole or not at all; `load_config` reads what `Plan.config` is.

    Parameters
    ----------
    plan : Plan
        See `volseg.planning.plan`.
    path : path
        The file.
    overwrite : bool
        Replace a file that is there.

    Raises
    ------
    ConfigError
        If there is one and ``overwrite`` is off.
    """
    path = Path(path)
    require_new(path, overwrite=overwrite)
    with replacing(path) as partial:
        partial.write_text("\n".join(_list_lines(plan)) + "\n", encoding="utf-8")
        written = load_config(partial)
        assert written == plan.config(), "the file says something else than the plan"
    return path


def _list_lines(plan: Plan) -> Iterator[str]:
    fingerprint = plan.fingerprint
    yield refer_to_schema()
    network = PRESETS[plan.preset] if plan.like is None else f"the network of {plan.like.source}"
    directions = [DIRECTIONS[letter] for letter in plan.geometry.axcodes]
    yield from _comment(
        f"{fingerprint.task}: {network}, for {plan.geometry.num_gpus} GPU(s) of {plan.gpu_memory:g} GiB. "
        f"Planned by volseg {__version__} from {len(fingerprint.cases)} cases of {len(fingerprint.channels)} "
        f"channel(s) ({', '.join(fingerprint.channels)}) and {len(fingerprint.labels)} labels. D, H, W of a case "
        f"point to the {directions[0]}, to the {directions[1]} and to the {directions[2]}."
    )
    yield from (f"# {line}" for line in SOURCES)
    section = ""
    for setting in plan.settings:
        now, _, key = setting.key.rpartition(".")
        if now != section and now:
            yield f"{now}:"
        section = now if setting.key else section
        indent = "  " if section else ""
        yield from _comment(setting.reason, indent)
        if key.isdigit():
            yield f"{indent}- {_as_yaml(setting.value)}"
        elif key:
            yield f"{indent}{key}: {_as_yaml(setting.value)}"


def _comment(text: str, indent: str = "") -> Iterator[str]:
    for line in textwrap.wrap(text, WIDTH - len(f"{indent}# ")):
        yield f"{indent}# {line}"


def _as_yaml(value: Any) -> str:
    text = dump_yaml(value, default_flow_style=True, width=float("inf"))
    return text.removesuffix("...\n").rstrip("\n")
