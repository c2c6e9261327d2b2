"""Define the remaining verbs: verify, quickstart, components, doctor, init and schema."""

import json
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from volseg import experiment
from volseg.cli.options import Components, ConfigFile, Output, Overrides, verb
from volseg.streams import show

start_app, tools_app = typer.Typer(), typer.Typer()


@verb(
    tools_app,
    "Machine",
    "volseg verify configs/task04_unet.yaml --set data.root=DIR/Task04_Hippocampus --network SegResNet",
)
def verify(
    config: ConfigFile,
    overrides: Overrides = None,
    devices: Annotated[int, Option(min=2, help="Number of shards or stages; simulated if there are fewer GPUs.")] = 4,
    shape: Annotated[tuple[int, int, int] | None, Option(metavar="D H W", help="In voxels; default: small.")] = None,
    network: Annotated[
        str | None,
        Option(metavar="NAME", help="Replaces the config's network; set its parameters with --set network.KEY=VALUE."),
    ] = None,
    strategy: Annotated[str | None, Option(help="spatial or pipeline; default the config's, else spatial.")] = None,
    as_json: Annotated[bool, Option("--json", help="Print each comparison as JSON.")] = False,
    components: Components = None,
) -> None:
    """Compare a network on several devices with the same network on one, in all modes.

    Compares outputs, gradients, buffers, and parameters after one and two float64 steps. Exit status 1 if any differ.
    """
    named = [f"network={json.dumps({'name': network})}"] if network else []  # a JSON text is a YAML text
    loaded = experiment.load_config(config, [*named, *(overrides or ())])
    report = experiment.verify(loaded, num_devices=devices, shape=shape, strategy=strategy)
    show(json.dumps(report.as_dict(), indent=2) if as_json else str(report))
    if not report.ok:
        raise typer.Exit(1)


@verb(start_app, "Start", "volseg quickstart --output first_run")
def quickstart(
    output: Annotated[Path | None, Output(help="Folder for data and run; default runs/quickstart.")] = None,
    overrides: Overrides = None,
) -> None:
    """Generate data, train a small network on it, validate and predict: minutes, without a GPU."""
    show(experiment.quickstart(output, overrides or ()))


@verb(start_app, "Start", "volseg components network --components components.py", name="components")
def list_components(
    kind: Annotated[str | None, Argument(metavar="[KIND]", help="Such as network or loss; default: all.")] = None,
    components: Components = None,
) -> None:
    """List the networks, losses and other components that a config can name."""
    for line in experiment.list_components(kind):
        show(line)


@verb(tools_app, "Machine", "volseg doctor --json > doctor.json")
def doctor(
    as_json: Annotated[bool, Option("--json", help="Print findings and facts as JSON.")] = False,
    quick: Annotated[bool, Option("--quick", help="Skip the checks that compute (sums, kernel).")] = False,
    cache: Annotated[Path | None, Option(metavar="FOLDER", help="Default $VOLSEG_CACHE, else ~/.cache/volseg.")] = None,
    runs: Annotated[Path | None, Option(metavar="FOLDER", help="Folder of the runs; default runs.")] = None,
) -> None:
    """Check this machine (GPUs, driver, torch, memory, disks, limits) and report how to fix problems.

    Exit status 1 if anything stops a training.
    """
    from volseg.diagnosis.doctor import diagnose, show_diagnosis  # more than --help needs

    diagnosis = diagnose(quick=quick, cache=cache, runs=runs)
    if as_json:
        show(json.dumps(diagnosis.as_dict(), indent=2))
    else:
        show_diagnosis(diagnosis)
    if not diagnosis.is_sound:
        raise typer.Exit(1)


@verb(start_app, "Start", "volseg init --like task04_unet --data DIR/Task04_Hippocampus -o mine.yaml", name="init")
def init(
    output: Annotated[Path, Output(metavar="FILE", help="Config to write.")] = Path("experiment.yaml"),
    data: Annotated[Path | None, Option(metavar="FOLDER", help="The data set to train on.")] = None,
    like: Annotated[
        str | None, Option(metavar="NAME", help="Start from a config that comes with volseg, such as task04_unet.")
    ] = None,
    minimal: Annotated[bool, Option("--minimal", help="Write only what differs from the defaults.")] = False,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace the file if it exists.")] = False,
) -> None:
    """Write a config with every key explained."""
    from volseg.commands import spell  # these modules import torch: not for --help
    from volseg.experiment.configuring import init_config

    config = init_config(output, data=data, like=like, minimal=minimal, overwrite=overwrite)
    ways = (
        [] if config.data.root.exists() else ["set data.root in this file to your data set, or add --set data.root=DIR"]
    )
    show("\n  ".join([f"{output} is written. Next:", *ways, spell(f"volseg train {output}")]))


@verb(start_app, "Start", "volseg schema > volseg.schema.json", name="schema")
def schema(
    output: Annotated[Path | None, Output(metavar="FILE", help="File to write; default: print.")] = None,
    components: Components = None,
) -> None:
    """Print the JSON schema of configs, for completion and checks in editors."""
    from volseg.experiment.configuring import config_schema, write_schema  # imports torch: not for --help

    if output is not None:
        write_schema(output)
    else:
        show(json.dumps(config_schema(), indent=1))
