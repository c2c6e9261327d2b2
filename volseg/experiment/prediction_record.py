"""What a folder of predictions was made with, so that a prediction that was interrupted can go on.

``predicted.jsonl`` lies beside the label maps. Its first line is written before the first of them: checkpoint and
settings. Then a line follows each label map, so that one of an earlier prediction is never taken for one of this.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from volseg.data.cases import Case
from volseg.data.readers import list_files
from volseg.errors import ConfigError
from volseg.experiment.trained import Trained
from volseg.files import digest_file, replacing

__all__ = ["PredictionRecord"]

FILE = "predicted.jsonl"
SETTINGS = ("network", "preprocessing", "inference")
"""Sections of the config that a label map depends on, with the checkpoint."""


class PredictionRecord:
    """The record of the predictions in a folder.

    Parameters
    ----------
    folder : Path
        Of the label maps.
    trained : Trained
        What predicts.
    checkpoint : str
        Name of the checkpoint's file.
    """

    def __init__(self, folder: Path, trained: Trained, checkpoint: str) -> None:
        self._folder = folder
        values = trained.config.model_dump(mode="json")
        self._made_by = {
            "checkpoint": checkpoint,
            "weights": trained.weights,
            "precision": trained.config.training.precision,
            **{name: values[name] for name in SETTINGS},
        }

    def begin(self) -> None:
        """Describe a new prediction: label maps that lie in the folder already count as somebody else's."""
        with replacing(self._folder / FILE) as partial:
            partial.write_text(json.dumps(self._made_by) + "\n", encoding="utf-8")

    def find_done(self, cases: Sequence[Case]) -> dict[str, Path]:
        """Return the label maps of this prediction that are whole and of the same images; none where it never began.

        Raises
        ------
        ConfigError
            Those in the folder were made by another checkpoint or with other settings.
        """
        try:
            lines = (self._folder / FILE).read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            self.begin()
            return {}
        made_by, *entries = [_parse(line) for line in lines] or [{}]
        keys = made_by.keys() | self._made_by.keys()
        if changed := sorted(key for key in keys if made_by.get(key) != self._made_by.get(key)):
            raise ConfigError(
                f"the predictions in {self._folder} were made otherwise ({', '.join(changed)} differ); name another "
                "folder by --output, or leave out --resume to predict all images again"
            )
        known = {entry.get("case"): entry for entry in entries}
        done = {}
        for case in cases:
            entry, path = known.get(case["case"], {}), self.name_label_map(case)
            if entry.get("image") == _identify(case) and path.is_file() and entry.get("label_map") == digest_file(path):
                done[case["case"]] = path
        return done

    def name_label_map(self, case: Case) -> Path:
        """Return the file of a case's label map."""
        return self._folder / f"{case['case']}.nii.gz"

    def add(self, case: Case) -> None:
        """Record that the label map of a case is whole."""
        entry = {"case": case["case"], "image": _identify(case), "label_map": digest_file(self.name_label_map(case))}
        with (self._folder / FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def _parse(line: str) -> Mapping[str, Any]:
    """Return what a line says; nothing for one that was cut off, whose label map is then made again."""
    try:
        entry = json.loads(line)
    except ValueError:
        return {}
    return entry if isinstance(entry, dict) else {}


def _identify(case: Case) -> list[Any]:
    """Return where an image lies, and its bytes: enough to tell it from another of its name."""
    images = list_files(case["image"])
    files = [file for image in images for file in (sorted(image.iterdir()) if image.is_dir() else [image])]
    return [*(str(image.resolve()) for image in images), len(files), sum(file.stat().st_size for file in files)]
