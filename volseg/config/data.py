"""Config sections of the data set and of its split into training and validation cases."""

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from volseg.config.base import ConfigModel, NonNegative, Positive, Seed
from volseg.errors import ConfigError

PREVIOUS_STAGE = "PreviousStage"
"""Preprocessing component that adds a previous stage's label map to the image as channels."""


class DataConfig(ConfigModel):
    """Location and storage of the cases."""

    root: Path
    """Folder of a data set (MSD, nnU-Net, pairs of images and labels), its parent or its image folder; or a table
    of paths (CSV)."""
    skip_bad: bool = False
    """Leave out bad cases and list them in the report, instead of an error before the training."""
    keep: Literal["auto", "device", "memory"] = "auto"
    """Where preprocessed cases are kept: ``auto`` keeps as many as fit, smallest first, on the GPU, and the rest in
    main memory. Batches are bit-identical either way."""
    device_limit: Positive | None = None
    """GiB of GPU memory that ``keep: auto`` may use for cases; null means 30 % of the free memory."""
    weights: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = Field(default_factory=dict)
    """How often patches of a training case are drawn, relative to the default of 1, by case names or patterns:
    ``{pseudo_*: 0.3, case_07: 0}``. The last match counts; 0 means never. Replaces the column ``weight`` of a table."""
    previous_stage: Path | None = None
    """Cross-validation folder of a coarser network, whose label maps become further channels of the images (nnU-Net's
    cascade) by ``{name: PreviousStage}`` in ``preprocessing``."""
    cache: str = "auto"
    """Folder that keeps preprocessed cases, memory-mapped, for the next fold, restart or resume. ``auto``:
    ``$VOLSEG_CACHE``, else ``~/.cache/volseg``; ``none``: each run preprocesses the cases into memory."""
    cache_limit: Positive = 200.0
    """Size limit of the folder in GiB, all tasks included; the least recently used cases are removed first."""


class SplitConfig(ConfigModel):
    """Split of the cases into training and validation."""

    validation: Literal["fold", "none"] = "fold"
    """``fold``: validate on the cases of one fold. ``none``: train on every case, validate on none."""
    fold: NonNegative = 0
    """Index of the validation fold, from 0; the other folds train."""
    num_folds: Annotated[int, Field(ge=2)] = 5
    """Number of folds."""
    seed: Seed = 12345
    """Seed of the folds; the default is nnU-Net's KFold(5, shuffle=True, random_state=12345) over sorted case ids."""
    file: Path | None = None
    """Split file in nnU-Net's format, ``[{"train": [...], "val": [...]}, ...]``; ``fold`` is an index into it. Without
    a file, the columns ``fold`` or ``split`` of a table count."""
    group: Annotated[str, Field(min_length=1, max_length=1000)] | None = None
    """How cases are grouped by patient; no patient both trains and validates. A regular expression with one group in
    parentheses, searched in case names, such as ``^(patient\\d+)``; a column name of the table; or ``PatientID`` of
    DICOM images. ``none``: one patient per case; null: the same, with a warning if the data set suggests otherwise.
    Given folds are checked, not changed."""

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
    """Return ``split.group`` as a compiled pattern.

    Raises
    ------
    ConfigError
        If ``group`` is no regular expression, or does not have exactly one group in parentheses.
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
