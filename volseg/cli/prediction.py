"""Define the verbs that use networks, label maps and runs.

Networks and label maps: predict, postprocess, validate, evaluate, compare. Runs: report, view, status, export.
"""

import json
import os
import webbrowser
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from volseg import experiment
from volseg.cli.options import (
    Checkpoint,
    Components,
    MadeFolder,
    Output,
    Settings,
    Source,
    check_exists,
    source_argument,
    verb,
)
from volseg.config.nearest import suggest_path
from volseg.errors import VolsegError
from volseg.streams import show

prediction_app = typer.Typer()

LABEL_MAPS = check_exists("name a folder with a label map for each case")


@verb(prediction_app, "Use", "volseg predict runs/task04_unet imagesTs/ scan.nrrd dicom_folder/ -o predictions")
def predict(
    source: Source,
    images: Annotated[
        list[Path],
        Argument(
            metavar="IMAGES",
            help="NIfTI, MHA or NRRD files, folders of them, DICOM folders, or tables (CSV).",
            callback=check_exists("name image files, folders of them, DICOM folders, or tables (CSV)"),
        ),
    ],
    output: Annotated[Path | None, Output(help="Folder for the label maps; default SOURCE/predictions.")] = None,
    others: Annotated[
        list[Path] | None, Option("--with", metavar="SOURCE", help="Another SOURCE; the probabilities are averaged.")
    ] = None,
    checkpoint: Checkpoint = "latest",
    settings: Settings = None,
    series: Annotated[list[str] | None, Option(metavar="UID|TEXT", help="DICOM series, by UID or description.")] = None,
    resume: Annotated[bool, Option("--resume", help="Continue an interrupted prediction.")] = False,
    skip_existing: Annotated[bool, Option("--skip-existing", help="Keep all existing label maps.")] = False,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace existing label maps.")] = False,
    strict: Annotated[bool, Option("--strict", help="Read all images first; stop at the first failure.")] = False,
    gpus: Annotated[
        int | None,
        Option(min=1, metavar="N", help="Number of GPUs; if there are fewer cases, each is cut over all GPUs."),
    ] = None,
    postprocessing: Annotated[bool, Option(help="Apply the steps that `volseg postprocess SOURCE` chose.")] = True,
    probabilities: Annotated[bool, Option("--probabilities", help="Also write DIR/probabilities.")] = False,
    uncertainty: Annotated[
        bool, Option("--uncertainty", help="Also write the probabilities' entropy (0 to 1) to DIR/uncertainty.")
    ] = False,
    label_format: Annotated[
        str, Option("--format", help="nifti; for DICOM images also dicom-seg or dicom-rtstruct.")
    ] = "nifti",
    colour_tables: Annotated[bool, Option("--colour-tables", help="Write them for ITK-SNAP and 3D Slicer.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print the result of each case as JSON.")] = False,
    components: Components = None,
) -> None:
    """Write a label map for each image, as NIfTI on the image's grid.

    If a case fails, the error names it and the others continue. Exit status 1 if a case failed.
    """
    predicted = experiment.predict(
        [source, *(others or ())],
        images,
        output,
        checkpoint=checkpoint,
        overrides=settings or (),
        series=series or (),
        resume=resume,
        skip_existing=skip_existing,
        overwrite=overwrite,
        strict=strict,
        gpus=gpus,
        postprocessing=postprocessing,
        probabilities=probabilities,
        uncertainty=uncertainty,
        label_format=label_format,
        colour_tables=colour_tables,
    )
    show(json.dumps(predicted.as_json(), indent=2) if as_json else predicted.table())
    if predicted.failures:
        raise typer.Exit(1)


@prediction_app.command(hidden=True)
def predict_cases(components: Components = None) -> None:
    """Predict the cases that the parent process names; for `volseg predict --gpus`."""
    experiment.serve_predictions()


@verb(prediction_app, "Use", "volseg postprocess runs/task04_unet --apply predictions --output postprocessed")
def postprocess(
    source: MadeFolder,
    apply: Annotated[Path | None, Option(metavar="DIR", help="Apply the measured steps to these label maps.")] = None,
    output: Annotated[Path | None, Output(help="With --apply: folder for the results.")] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="With --apply: replace existing results.")] = False,
    components: Components = None,
) -> None:
    """Try largest components and hole filling on the validation cases; keep the steps that help."""
    if (apply is None) != (output is None):
        raise typer.BadParameter(
            "--apply names the label maps, and --output the folder for the results; use both or neither"
        )
    if apply is None or output is None or not experiment.RunFolder(source).postprocessing_file.exists():
        measured = experiment.determine_postprocessing(source)
        show("\n".join(measured.lines()))
        show(experiment.RunFolder(source).postprocessing_file)
    if apply is not None and output is not None:
        for path in experiment.apply_postprocessing(source, apply, output, overwrite=overwrite):
            show(path)


@verb(prediction_app, "Evaluate", "volseg validate runs/task04_unet --set inference.mirror=true")
def validate(
    run: MadeFolder,
    checkpoint: Checkpoint = "latest",
    settings: Settings = None,
    output: Annotated[Path | None, Output(help="Folder for the results; default in RUN.")] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace an existing validation.")] = False,
    components: Components = None,
) -> None:
    """Predict and score the validation cases of a run, or of all finished folds."""
    words = experiment.validate_and_format(
        run, checkpoint=checkpoint, overrides=settings or (), output=output, overwrite=overwrite
    )
    show(words)


@verb(
    prediction_app,
    "Evaluate",
    "volseg evaluate --predictions predictions --labels Task04_Hippocampus/labelsTr --allow-missing",
)
def evaluate(
    predictions: Annotated[Path, Option(metavar="DIR", help="Label maps, from any program.", callback=LABEL_MAPS)],
    labels: Annotated[
        Path, Option(metavar="DIR|TABLE", help="References: folder, data set or table.", callback=LABEL_MAPS)
    ],
    names: Annotated[str | None, Option(help="dataset.json, or 1=liver,2=tumour; default: from the files.")] = None,
    metrics: Annotated[list[str] | None, Option(help="Metric to show: dice, nsd, hd95, assd ...; repeatable.")] = None,
    tolerance: Annotated[float | None, Option(min=0, metavar="MM", help="For NSD; default the public task's.")] = None,
    lesions: Annotated[
        list[str] | None, Option(metavar="LABEL", help="Count this label's lesions; repeatable.")
    ] = None,
    allow_missing: Annotated[bool, Option("--allow-missing", help="Leave out cases without a prediction.")] = False,
    output: Annotated[Path | None, Output(metavar="DIR", help="Default: folder of the predictions.")] = None,
    as_json: Annotated[bool, Option("--json", help="Print summary.json instead of the table.")] = False,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace existing files.")] = False,
) -> None:
    """Score label maps per case and label. Exit status 1 if a case could not be scored."""
    from volseg.evaluation import evaluate_command  # imports torch: not for --help

    evaluated = evaluate_command.score_folders(
        predictions,
        labels,
        names=names,
        metrics=metrics,
        tolerance=tolerance,
        lesions=lesions or (),
        allow_missing=allow_missing,
        output=output or predictions,
        overwrite=overwrite,
    )
    report = evaluate_command.format_json(evaluated) if as_json else evaluate_command.format_report(evaluated, metrics)
    show(report)
    if evaluated.summary is not None and not as_json:
        show(f"every case: summary.json and cases.csv in {output or predictions}")
    if evaluated.faults:
        raise typer.Exit(1)


@verb(prediction_app, "Evaluate", "volseg compare runs/unet runs/resenc -o unet_or_resenc")
def compare(
    methods: Annotated[
        list[Path],
        Argument(
            metavar="RUN",
            help="Runs, cross-validations, or evaluated predictions.",
            callback=check_exists("name runs, cross-validations, or evaluated predictions"),
        ),
    ],
    output: Annotated[Path, Output(metavar="DIR", help="Folder for the results.")] = Path("comparison"),
    overwrite: Annotated[bool, Option("--overwrite", help="Replace existing results.")] = False,
) -> None:
    """Compare methods case by case: mean difference with interval, wins and losses, Wilcoxon's test."""
    from volseg.evaluation.comparing import compare_folders  # imports torch: not for --help

    show(compare_folders(methods, output, overwrite=overwrite))


@verb(prediction_app, "Evaluate", "volseg report runs/task04_unet -o task04.html")
def report(
    run: MadeFolder,
    output: Annotated[Path | None, Output(metavar="FILE", help="Page to write; default RUN/report.html.")] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace FILE if it exists.")] = False,
) -> None:
    """Write the report of a run as one HTML page, also while the run trains or after it failed.

    The page is self-contained: it can be sent and opened anywhere.
    """
    from volseg.files import require_new  # imports no torch, but more than --help needs
    from volseg.reporting import write_report

    if output is not None:
        require_new(output, overwrite=overwrite)
    show(write_report(run, output))


@verb(prediction_app, "Evaluate", "volseg view runs/task04_unet")
def view(
    source: Annotated[
        Path,
        source_argument(
            "RUN|FOLDER|IMAGE",
            "A run or a cross-validation (its validation cases), a folder of predictions, a data set, or images.",
            "name a run, a folder of predictions or images, a data set, or an image",
        ),
    ],
    labels: Annotated[
        list[Path] | None,
        Argument(
            metavar="LABELS",
            callback=check_exists("name a label map, or a folder with one for each case"),
            help="Label maps to show side by side: files, or folders with CASE.nii.gz.",
        ),
    ] = None,
    cases: Annotated[list[str] | None, Option("--case", metavar="ID", help="Only this case; repeatable.")] = None,
    channel: Annotated[
        int | None, Option(min=0, metavar="N", help="Channel to show; default: logging.channel of the run, else 0.")
    ] = None,
    settings: Settings = None,
    output: Annotated[Path | None, Output(metavar="FILE", help="Page to write; default in RUN or predictions.")] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace FILE if it exists.")] = False,
    no_open: Annotated[bool, Option("--no-open", help="Only write the page.")] = False,
) -> None:
    """Show slices with label maps in a browser, on one self-contained HTML page.

    The page of a run shows predictions next to references. Large volumes are subsampled; the page states the spacing.
    """
    page = experiment.view(
        source,
        labels or (),
        cases=cases or (),
        channel=channel,
        overrides=settings or (),
        output=output,
        overwrite=overwrite,
    )
    show(page)
    # Without a screen, a text browser would take over the terminal.
    if not no_open and os.environ.keys() & {"DISPLAY", "WAYLAND_DISPLAY"}:
        webbrowser.open(page.absolute().as_uri())


STALE, NO_RUN = 1, 2
"""Exit statuses in addition to 0 for success."""


@verb(prediction_app, "Evaluate", "volseg status runs/task04_unet --max-age 10m")
def status(
    run: Annotated[Path, Argument(metavar="RUN|CV", help="Folder of a training or a cross-validation.")],
    as_json: Annotated[bool, Option("--json", help="Print everything as JSON.")] = False,
    max_age: Annotated[
        str | None,
        Option(metavar="AGE", help="Exit status 1 after a failure, or if the last heartbeat is older than AGE (10m)."),
    ] = None,
) -> None:
    """Show the state, epoch, score, remaining time and last heartbeat of a training.

    Works on any machine that sees the folder. Exit status 0; with --max-age 1 if the training hangs or has failed; 2 if
    there is no run.
    """
    from volseg.monitoring.run_files import list_run_folders, look_at, parse_age  # imports pydantic: not for --help

    try:
        oldest = None if max_age is None else parse_age(max_age)
    except VolsegError as refused:  # not 1, which means that the training hangs
        raise typer.BadParameter(str(refused)) from refused
    looks = [look_at(folder) for folder in list_run_folders(run)]
    faults = {} if oldest is None else {look.folder: fault for look in looks if (fault := look.find_fault(oldest))}
    if as_json:
        show(json.dumps({"runs": [look.as_json() for look in looks], "faults": [*faults.values()]}, indent=2))
    else:
        show("\n".join(line for look in looks for line in look.lines()) or f"{run} contains no run{suggest_path(run)}")
        for folder, fault in faults.items():
            show(f"volseg: {folder}: {fault}", err=True)
    if not looks or faults:
        raise typer.Exit(STALE if looks else NO_RUN)


@verb(prediction_app, "Use", "volseg export runs/task04_unet -o model.zip --licence CC-BY-4.0")
def export(
    source: Source,
    output: Annotated[Path, Output(metavar="FILE", help="File, such as model.zip; a new folder for monai-bundle.")],
    to: Annotated[
        str, Option("--to", metavar="FORMAT", help="archive (for volseg predict), torchscript, onnx or monai-bundle.")
    ] = "archive",
    checkpoint: Checkpoint = "latest",
    licence: Annotated[str, Option(help="Licence of the weights, such as CC-BY-4.0.")] = "not stated",
    overwrite: Annotated[bool, Option("--overwrite", help="Replace an existing file.")] = False,
    components: Components = None,
) -> None:
    """Write a trained network as one file: a volseg archive, TorchScript, ONNX or a MONAI bundle.

    An archive needs the folder of a training or a cross-validation. A file of another format is kept only if its output
    agrees with the network's.
    """
    show(experiment.export(source, output, to=to, checkpoint=checkpoint, licence=licence, overwrite=overwrite))
