"""Plan a config from a folder of cases, or for a training that is given only a data set."""

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from volseg.checkpointing.folder import RunFolder
from volseg.commands import spell
from volseg.config.catalogue import shipped_config_path
from volseg.config.describing import KINDS, KINDS_OF_FIELDS, describe_config, refer_to_schema, write_commented
from volseg.config.loading import load_config, require_sound_overrides
from volseg.config.schema import ExperimentConfig
from volseg.data import load_task
from volseg.data.cases import Task
from volseg.data.groups import propose_groups
from volseg.data.layouts.table import TABLES
from volseg.errors import ConfigError
from volseg.experiment.own_components import REGISTRIES
from volseg.experiment.prediction.sources import open_one
from volseg.files import replacing, require_new
from volseg.monitoring.progress import count_up
from volseg.parallel.devices import count_gpus, is_launched
from volseg.planning.fingerprint import Fingerprint, keep_fingerprint, load_fingerprint, take_fingerprint
from volseg.planning.plan import CASCADE, DEFAULT_MEMORY, Plan, choose_name, name_first_stage, plan, write_config

logger = logging.getLogger(__name__)


PLANNED = "planned.yaml"
"""File in the run folder: the planned config of a training that got only a data set."""


def configure(
    folder: str | Path,
    *,
    preset: str = "unet",
    gpu_memory: float = DEFAULT_MEMORY,
    name: str | None = None,
    skip_bad: bool = False,
    like: str | Path | None = None,
) -> Plan:
    """Read every case of a data set, unless a valid fingerprint exists, and plan its training.

    Parameters
    ----------
    folder : path
        Folder of the data set.
    preset, gpu_memory, name
        As for `volseg.planning.plan`.
    skip_bad : bool
        Leave bad cases out of the plan and of the training.
    like : path, optional
        A source of initial weights (see `volseg.experiment.prediction.sources.open_source`): spacing, patch and network
        are taken from it.

    Raises
    ------
    ConfigError
        If nothing fits the memory, or ``like`` has no config of its network.
    DataError
        If there is no data set, or if cases are bad: all of them at once.
    """
    source = None if like is None else open_one(like).as_like()  # before minutes of reading
    task = load_task(folder, require_files=False)
    fingerprint = _find_fingerprint(task, skip_bad)
    root = os.path.abspath(folder)  # not resolved: a link may be pointed to another disk later
    proposed = propose_groups(task)
    if proposed is not None and not proposed.evident:
        logger.warning("%s; if so, set split.group: %s", proposed.reason, proposed.group)
    return plan(
        fingerprint,
        preset,
        gpu_memory,
        root=root,
        name=name,
        skip_bad=skip_bad,
        given_folds=len(task.splits),
        patients=proposed if proposed is not None and proposed.evident else None,
        like=source,
    )


def _find_fingerprint(task: Task, skip_bad: bool) -> Fingerprint:
    taken = load_fingerprint(task, skip_bad=skip_bad)
    if taken is None:
        with count_up(len(task.training), "looking at cases") as count:
            taken = take_fingerprint(task, skip_bad=skip_bad, progress=count)
        keep_fingerprint(taken, task, skip_bad=skip_bad)
    for problem in taken.left_out:
        logger.warning("left out: %s", problem)
    return taken.fingerprint


def format_plan(planned: Plan, path: str | Path, *, trains: bool = False, is_short: bool = False) -> str:
    """Return a summary of a plan in a few lines, and the next command unless the training starts now.

    Without a GPU, the summary offers a small plan, unless the training ``is_short``.
    """
    geometry, fingerprint = planned.geometry, planned.fingerprint
    size = " x ".join(f"{side:g}" for side in geometry.median_shape)
    lines = {
        "cases": f"{len(fingerprint.cases)}, {len(fingerprint.channels)} channel(s), {len(fingerprint.labels)} labels",
        **({} if (told := planned.patients) is None else {"patients": f"{told.num_patients}, by {told.group}"}),
        "spacing": f"{' x '.join(f'{mm:.4g}' for mm in geometry.spacing)} mm",
        "median case": f"{size} voxels at that spacing",
        "patch": f"{' x '.join(map(str, geometry.patch))} voxels, {geometry.batch} per batch",
        "network": planned.values()["network"]["name"],
        **({} if planned.like is None else {"starts from": planned.like.source}),
        "for": f"{geometry.num_gpus} GPU(s) of {planned.gpu_memory:g} GiB",
    }
    small = "try --set training.epochs=5 --set training.iterations=50 first"
    slow = [] if is_short or count_gpus() else [f"this machine has no GPU, so this training takes days; {small}"]
    written = f"written to {path}, with the reason for each value"
    commands = [spell(f"volseg train {quote(str(path))}")]
    if planned.first_stage is not None:
        commands.insert(0, spell(f"volseg cross-validate {quote(str(name_first_stage(path)))}"))
    last = [f"{written}. The training starts."] if trains else [f"{written}. Next:", *(f"  {one}" for one in commands)]
    return "\n".join([*(f"{what:12} {text}" for what, text in lines.items()), *slow, *last])


def is_data_set(path: str | Path) -> bool:
    """Return whether a path given instead of a config is a data set: a folder, or a table of paths.

    Raises
    ------
    ConfigError
        For the folder of a run.
    """
    path = Path(path)
    if RunFolder(path).exists:
        words = spell(f"volseg train {quote(str(RunFolder(path).config_file))} -o {quote(str(path))} --resume")
        raise ConfigError(f"{path} is a run folder, not a config or a data set; continue the run with {words}")
    return path.is_dir() or path.suffix.casefold() in TABLES


def plan_run(
    folder: str | Path,
    *,
    preset: str = "unet",
    gpu_memory: float = DEFAULT_MEMORY,
    overrides: Sequence[str] = (),
    resume: bool = False,
) -> Path:
    """Return the planned config of a training that gets a data set, written into its run folder.

    A resumed run keeps its plan, even if cases have been added since.

    Parameters
    ----------
    folder : path
        Folder of the data set.
    preset, gpu_memory
        As for `volseg.planning.plan`.
    overrides : sequence of str
        Such as ``training.epochs=5``; ``name``, ``output`` and ``data.skip_bad`` have an effect here.
    resume : bool
        Whether to resume a run.

    Raises
    ------
    ConfigError
        If the folder has a run and ``resume`` is off, if the run was planned differently, or if no config takes an
        override.
    DataError
        As `configure`.
    """
    chosen = require_sound_overrides(overrides)  # before minutes of reading
    if preset == CASCADE:
        raise ConfigError(
            f"a cascade is two trainings; volseg configure {quote(str(folder))} --preset cascade plans both"
        )
    name = choose_name(load_task(folder, require_files=False).name, preset)
    values = {"name": name, **chosen}
    run = RunFolder(Path(values.get("output") or Path("runs") / values["name"]))
    file = run.path / PLANNED
    if resume and file.is_file():
        if load_config(file).name != name:
            raise ConfigError(f"{file} plans {load_config(file).name}, not {name}; choose another --output")
        logger.info("continuing as planned in %s", file)
        return file
    if resume and run.exists:
        raise ConfigError(f"{run.path} was not planned from a data set; continue it with the config it started with")
    if is_launched():
        raise ConfigError(
            f"{folder} is a data set, and every process of this job would plan for it; run "
            f"volseg configure {quote(str(folder))} -o my_task.yaml first, and train with that config"
        )
    run.require_free()
    data = values.get("data")
    skip_bad = bool(data.get("skip_bad")) if isinstance(data, dict) else False
    planned = configure(folder, preset=preset, gpu_memory=gpu_memory, skip_bad=skip_bad)
    write_config(planned, file, overwrite=True)
    is_short = {"epochs", "iterations"} & {*(values.get("training") or ())} != set()
    logger.info("%s", format_plan(planned, file, trains=True, is_short=is_short))
    return file


# A config to start with, written out with all comments; and the schema with every component's name.


PLAIN: dict[str, Any] = {
    "name": "my_training",
    "data": {"root": "DATA"},
    "patch": {"size": (96, 96, 96)},
    "network": {"name": "DynUNet", "deep_supervision": True},
    "optimizer": {"name": "AdamW", "lr": 3e-3, "weight_decay": 1e-2},
}
"""Values without a default."""


def init_config(
    output: str | Path,
    *,
    data: str | Path | None = None,
    like: str | None = None,
    minimal: bool = False,
    overwrite: bool = False,
) -> ExperimentConfig:
    """Write a config to start with: every value, its meaning, and a reference to the schema for editors.

    Parameters
    ----------
    output
        Path of the file.
    data
        Folder of the data set; a placeholder by default.
    like
        Name of a config shipped with volseg, to copy values from.
    minimal
        Write only values that differ from the defaults.
    overwrite
        Replace an existing file.

    Raises
    ------
    ConfigError
        If the file exists and ``overwrite`` is off, or no config is called ``like``.
    """
    output = Path(output)
    require_new(output, overwrite=overwrite)
    config = load_config(shipped_config_path(like)) if like is not None else ExperimentConfig.model_validate(PLAIN)
    if data is not None:
        config = config.with_values(data={"root": Path(data)})
    head = [
        refer_to_schema(),
        f"# volseg train {output}",
        "# A value is the default unless its comment names another one; defaults may be left out. `volseg configure",
        "# DATA -o FILE` plans the values from the images of a data set, and gives the reason for each.",
    ]
    write_commented(config, output, head=head, minimal=minimal)
    return config


def config_schema() -> dict[str, Any]:
    """Return the JSON schema of a config, with the names of all components that this process knows."""
    return describe_config(_list_components())


def _list_components() -> dict[str, list[str]]:
    return {kind: list(REGISTRIES[kind]) for kind in (*KINDS.values(), *KINDS_OF_FIELDS.values())}


def write_schema(output: str | Path) -> None:
    """Write the schema, whole or not at all; replace an existing file."""
    with replacing(output) as partial:
        partial.write_text(json.dumps(config_schema(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
