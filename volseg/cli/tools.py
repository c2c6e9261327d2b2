"""The verbs that help along: verify, quickstart and components."""

import json
from pathlib import Path
from typing import Annotated

import typer

from volseg.cli.completion import complete_config, complete_kind, complete_network
from volseg.cli.options import Components, Overrides
from volseg.streams import show

__all__ = ["tools_app"]

tools_app = typer.Typer()


@tools_app.command(
    epilog="Example: volseg verify configs/task04_unet.yaml --set data.root=DIR/Task04_Hippocampus --network SegResNet"
)
def verify(
    config: Annotated[
        Path,
        typer.Argument(metavar="CONFIG", help="YAML file of the experiment.", autocompletion=complete_config),
    ],
    overrides: Overrides = None,
    devices: Annotated[
        int, typer.Option(min=2, help="Shards or stages; without as many GPUs, one device stands for all.")
    ] = 4,
    shape: Annotated[
        tuple[int, int, int] | None,
        typer.Option(metavar="D H W", help="Sides in voxels; default small ones that the network takes."),
    ] = None,
    network: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Another network than the config's; parameters by --set network.KEY=VALUE.",
            autocompletion=complete_network,
        ),
    ] = None,
    strategy: Annotated[
        str | None, typer.Option(help="spatial or pipeline; default the config's, spatial where it names none.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything that was compared as JSON.")] = False,
    components: Components = None,
) -> None:
    """Compare the network on several devices with itself on one, in training and evaluation, recomputed and recorded.

    Outputs, gradients, buffers, parameters after a step and after two, in float64. Exit status 1 if anything differs.
    """
    from volseg import experiment  # imports torch: not for --help

    experiment.load_components(components or ())
    named = [f"network={json.dumps({'name': network})}"] if network else []  # a JSON text is a YAML text
    loaded = experiment.load_config(config, [*named, *(overrides or ())])
    report = experiment.verify(loaded, num_devices=devices, shape=shape, strategy=strategy)
    show(json.dumps(report.as_dict(), indent=2) if as_json else str(report))
    if not report.ok:
        raise typer.Exit(1)


@tools_app.command(epilog="Example: volseg quickstart --output first_run")
def quickstart(
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder for data and run; default runs/quickstart, numbered if taken."),
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Make data, train a small network on it, validate and predict: minutes, without data or GPU."""
    from volseg import experiment  # imports torch: not for --help

    show(experiment.quickstart(output, overrides or ()))


@tools_app.command("components", epilog="Example: volseg components network --components components.py")
def list_components(
    kind: Annotated[
        str | None,
        typer.Argument(
            metavar="[KIND]", help="network, loss, transform, ...; default all kinds.", autocompletion=complete_kind
        ),
    ] = None,
    components: Components = None,
) -> None:
    """List what a config may name: built in, of installed packages, and of your own."""
    from volseg import experiment  # imports torch: not for --help

    experiment.load_components(components or ())
    for line in experiment.list_components(kind):
        show(line)
