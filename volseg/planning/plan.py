"""Plan a training from a fingerprint, and write the plan as a commented config."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from volseg.config.base import validated
from volseg.config.describing import comment, refer_to_schema
from volseg.config.loading import format_inline, load_config
from volseg.config.nearest import did_you_mean
from volseg.config.schema import ExperimentConfig
from volseg.data.groups import GroupProposal
from volseg.errors import ConfigError
from volseg.files import replacing, require_new
from volseg.planning.fingerprint import Fingerprint
from volseg.planning.geometry import PRESETS, Geometry, Like, plan_geometry, plan_geometry_like, plan_low_resolution
from volseg.planning.settings import Setting, list_settings
from volseg.version import __version__

CASCADE = "cascade"
"""The preset that writes two configs."""

DEFAULT_MEMORY = 8.0
"""GiB of GPU memory to plan for by default: nnU-Net's number, so that plans can be compared."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Settings for the training of a task."""

    fingerprint: Fingerprint
    preset: str
    gpu_memory: float
    """Memory of one GPU (GiB)."""
    geometry: Geometry
    settings: tuple[Setting, ...]
    patients: GroupProposal | None = None
    """Groups of the cases by patient; None if each case counts as a patient."""
    like: Like | None = None
    """The trained network that determines grid, patch and network."""
    first_stage: "Plan | None" = None
    """For a cascade, the plan of the low-resolution network."""

    def values(self) -> dict[str, Any]:
        """Return the settings as nested values of a config file."""
        values: dict[str, Any] = {}
        for setting in self.settings:
            section, _, key = setting.key.rpartition(".")
            if key.isdigit():
                values.setdefault(section, []).append(setting.value)
            elif key:
                (values.setdefault(section, {}) if section else values)[key] = setting.value
        return values

    def config(self) -> ExperimentConfig:
        """Return the config of the plan."""
        return validated(ExperimentConfig, self.values(), f"the plan of {self.fingerprint.task}")


def plan(
    fingerprint: Fingerprint,
    preset: str = "unet",
    gpu_memory: float = DEFAULT_MEMORY,
    *,
    root: str | Path | None = None,
    name: str | None = None,
    skip_bad: bool = False,
    given_folds: int = 0,
    patients: GroupProposal | None = None,
    like: Like | None = None,
) -> Plan:
    """Plan the training of a task: every value of its config, by nnU-Net's rules where these exist.

    Parameters
    ----------
    fingerprint : Fingerprint
        Fingerprint of the cases; see `take_fingerprint`.
    preset : str
        Network and patches: ``unet``, ``resenc``, ``vnet`` or ``whole``; or ``cascade``, two plain U-Nets.
    gpu_memory : float
        Memory of one GPU (GiB).
    root : path, optional
        Folder of the data set, for the config; the task's name by default.
    name : str, optional
        Name of the experiment; by default the task's and the preset's, see `choose_name`.
    skip_bad : bool
        Train without the bad cases, which the fingerprint leaves out.
    given_folds : int
        Number of folds that the data set defines (`Task.splits`): the plan uses the first. With 0, folds are computed.
    patients : GroupProposal, optional
        Groups of the cases by patient (`propose_groups`), if they are evident.
    like : Like, optional
        A trained network: the plan takes its grid, patch and network, and its weights as initial weights.

    Raises
    ------
    ConfigError
        If ``like`` is combined with a preset, the preset is unknown, there is no case, or the memory is too small.
    """
    if like is not None and preset != "unet":
        raise ConfigError(f"{like.source} and the preset {preset} both determine the network; leave one of them out")
    preset = preset if like is None else like.preset
    if preset not in (*PRESETS, CASCADE):
        raise ConfigError(f"no preset is called {preset!r}; {did_you_mean(preset, [*PRESETS, CASCADE])}")
    if not fingerprint.cases:
        raise ConfigError(f"{fingerprint.task} has no usable case with a label, so no training can be planned")
    if not gpu_memory > 0:
        raise ConfigError(f"the memory of a GPU must be positive, got {gpu_memory} GiB")
    name = choose_name(fingerprint.task, preset) if name is None else name
    is_cascade, preset = preset == CASCADE, "unet" if preset == CASCADE else preset
    geometry = plan_geometry(fingerprint, preset, gpu_memory) if like is None else plan_geometry_like(fingerprint, like)

    def build(geometry: Geometry, name: str, first: Plan | None = None) -> Plan:
        settings = list_settings(
            fingerprint,
            geometry,
            preset,
            root=fingerprint.task if root is None else root,
            name=name,
            skip_bad=skip_bad,
            given_folds=given_folds,
            patients=patients,
            like=like,
            previous_stage=None if first is None else f"runs/{first.values()['name']}",
        )
        return Plan(
            fingerprint=fingerprint,
            preset=preset,
            gpu_memory=gpu_memory,
            geometry=geometry,
            settings=tuple(settings),
            patients=patients,
            like=like,
            first_stage=first,
        )

    if not is_cascade:
        return build(geometry, name)
    return build(geometry, name, build(plan_low_resolution(fingerprint, geometry, gpu_memory), f"{name}_lowres"))


def choose_name(task: str, preset: str) -> str:
    """Return the default name of an experiment.

    >>> choose_name("Task04_Hippocampus", "unet")
    'task04_hippocampus_unet'
    """
    plain = re.sub(r"[^A-Za-z0-9._-]+", "_", task).strip("._-").lower() or "task"
    return f"{plain}_{preset}"


UNITS = {"gib": 2**30, "gb": 10**9, "mib": 2**20, "mb": 10**6}
"""Bytes of each unit of a GPU's memory."""


def parse_memory(text: str) -> float:
    """Return a GPU's memory in GiB.

    Raises
    ------
    ConfigError
        If the text is not a size.

    Examples
    --------
    >>> parse_memory("16GiB"), parse_memory("24"), parse_memory("80 GB"), parse_memory("512MiB")
    (16.0, 24.0, 74.50580596923828, 0.5)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(GiB|GB|MiB|MB)?\s*", text, re.IGNORECASE)
    if found is None or not float(found[1]):
        raise ConfigError(f"the memory of a GPU must be a size such as 16GiB, got {text!r}")
    return float(found[1]) * UNITS[(found[2] or "GiB").lower()] / 2**30


DIRECTIONS = {"R": "right", "L": "left", "A": "front", "P": "back", "S": "head", "I": "feet"}

SOURCES = (
    "Rules: docs/planning.md. Spacing, patch, batch, network and intensities are nnU-Net's (Isensee et al. 2021,",
    "doi:10.1038/s41592-020-01008-z; its residual encoders: Isensee et al. 2024, arXiv:2404.09556).",
)


def name_first_stage(path: str | Path) -> Path:
    """Return the path of the first stage's config, next to the config of a cascade."""
    path = Path(path)
    return path.with_name(f"{path.stem}_lowres{path.suffix}")


def write_config(plan: Plan, path: str | Path, *, overwrite: bool = False) -> Path:
    """Write the config of a plan, whole or not at all; `load_config` reads the same config as `Plan.config`.

    A cascade gets two files; see `name_first_stage`.

    Parameters
    ----------
    plan : Plan
        See `volseg.planning.plan`.
    path : path
        The file.
    overwrite : bool
        Replace an existing file.

    Raises
    ------
    ConfigError
        If the file exists and ``overwrite`` is off.
    """
    path = Path(path)
    require_new(path, overwrite=overwrite)
    if plan.first_stage is not None:
        write_config(plan.first_stage, name_first_stage(path), overwrite=overwrite)
    with replacing(path) as partial:
        partial.write_text("\n".join(_list_lines(plan)) + "\n", encoding="utf-8")
        written = load_config(partial)
        assert written == plan.config(), "the written config differs from the plan"
    return path


def _list_lines(plan: Plan) -> Iterator[str]:
    fingerprint = plan.fingerprint
    yield refer_to_schema()
    network = PRESETS[plan.preset] if plan.like is None else f"the network of {plan.like.source}"
    directions = [DIRECTIONS[letter] for letter in plan.geometry.axcodes]
    yield from comment(
        f"{fingerprint.task}: {network}, for {plan.geometry.num_gpus} GPU(s) of {plan.gpu_memory:g} GiB. "
        f"Planned by volseg {__version__} from {len(fingerprint.cases)} cases with {len(fingerprint.channels)} "
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
        yield from comment(setting.reason, indent)
        if key.isdigit():
            yield f"{indent}- {format_inline(setting.value)}"
        elif key:
            yield f"{indent}{key}: {format_inline(setting.value)}"
