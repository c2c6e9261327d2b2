"""Which cases there are, and which of them train."""

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from volseg.config.base import ConfigModel, NonNegative, Positive, Seed
from volseg.errors import ConfigError

__all__ = ["PREVIOUS_STAGE", "DataConfig", "SplitConfig", "compile_group"]


PREVIOUS_STAGE = "PreviousStage"
"""Component of the preprocessing that joins the label map of a previous stage to the image."""


class DataConfig(ConfigModel):
    """Where the cases are and how they are kept."""

    root: Path
    """Folder of a data set (MSD's, nnU-Net's, pairs of images and labels), or one level above or below it; or a table
    of paths (CSV)."""
    skip_bad: bool = False
    """Leave bad cases out and list them in the report, instead of stopping before the training."""
    keep: Literal["auto", "device", "memory"] = "auto"
    """Where the preprocessed cases lie: ``auto`` puts on the GPU what fits (the smallest cases) and leaves the rest in
    main memory; batches are the same bits whatever lies where."""
    device_limit: Positive | None = None
    """GiB of the GPU that ``keep: auto`` may take for cases, in place of 30 % of what is free."""
    weights: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = Field(default_factory=dict)
    """How often patches of training cases are drawn, in relation to the others' weight of 1:
    ``{pseudo_*: 0.3, case_07: 0}``, by names of cases or patterns of names; the last that fits counts. 0: never. They
    replace the column ``weight`` of a table."""
    previous_stage: Path | None = None
    """A cross-validation of a coarser network, whose label maps are further channels of the images (nnU-Net's cascade);
    ``{name: PreviousStage}`` in ``preprocessing`` joins them."""
    cache: str = "auto"
    """Folder in which preprocessed cases are kept for the next fold, restart or resume, and mapped from. ``auto``:
    ``$VOLSEG_CACHE``, else ``~/.cache/volseg``; ``none``: they are prepared anew and held in memory."""
    cache_limit: Positive = 200.0
    """GiB that the folder may take, of whatever task; what was used longest ago goes first."""


class SplitConfig(ConfigModel):
    """Which cases train and which validate."""

    validation: Literal["fold", "none"] = "fold"
    """``fold``: the cases of one fold. ``none``: train on every case, validate on none."""
    fold: NonNegative = 0
    """Which of the folds validates; the others train."""
    num_folds: Annotated[int, Field(ge=2)] = 5
    """Into how many folds the cases are dealt."""
    seed: Seed = 12345
    """nnU-Net's: KFold(5, shuffle=True, random_state=12345) over the sorted case ids."""
    file: Path | None = None
    """A split file of your own in nnU-Net's form, ``[{"train": [...], "val": [...]}, ...]``; ``fold`` chooses in it.
    Without it, a table's own columns ``fold`` or ``split`` count."""
    group: Annotated[str, Field(min_length=1, max_length=1000)] | None = None
    """How cases are grouped by patient. No patient both trains and validates. A regular expression with one group in
    parentheses, searched in the names of cases, such as ``^(patient\\d+)``; the name of a column of the table; or
    ``PatientID`` of DICOM images. ``none``: each case is of a patient of its own; null: the same, with a warning where
    the data set evidently says otherwise. Given folds are not changed, but checked."""

    @field_validator("group")
    @classmethod
    def _group_is_pattern_or_name(cls, group: str | None) -> str | None:
        if group is not None and "(" in group:
            compile_group(group)
        return group

    @model_validator(mode="after")
    def _fold_exists(self) -> "SplitConfig":
        if self.file is None and self.fold >= self.num_folds:
            raise ValueError(f"fold must be below num_folds={self.num_folds}, got {self.fold}")
        return self


def compile_group(group: str) -> re.Pattern[str]:
    """Return the pattern of names that ``split.group`` is.

    Raises
    ------
    ConfigError
        It is no regular expression, or has another number of groups in parentheses than one.
    """
    try:
        pattern = re.compile(group)
    except (re.error, OverflowError, RecursionError) as fault:
        raise ConfigError(f"{group!r} is no regular expression: {fault}") from fault
    if pattern.groups != 1:
        raise ConfigError(
            f"the pattern {group!r} has {pattern.groups} groups in parentheses; needed: one, which holds the patient. "
            "(?:...) does not count"
        )
    return pattern
