"""One volume over several devices: each decides a part of it, along the axis in which the volume is streamed.

::

    planes ->   | device 0 decides these      | device 1 decides these      |
                | ---windows--- |     | ---windows--- |
                              | ---windows--- |   both compute the windows that reach across

Each voxel's sum is that of one device, window by window in the same order, so labels do not depend on how many devices
there are, but for what a library's kernels make of the number of windows in a pass. A thread works for each; what they
decide goes into one label map on the CPU.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from monai.data import MetaTensor

from volseg.errors import ConfigError, NonFinitePredictionError
from volseg.inference.decision import Also, Decision
from volseg.inference.prediction import Prediction
from volseg.inference.predictor import Predictor, explain_not_finite

__all__ = ["SharedPredictor"]


@dataclass(frozen=True, slots=True, eq=False)
class SharedPredictor:
    """Predictors that differ in their device, each of which has models of its own there."""

    predictors: Sequence[Predictor]

    def __post_init__(self) -> None:
        if not self.predictors or self.predictors[0].window is None:
            raise ConfigError(
                "a volume is cut over devices along its windows, and inference.window is null; predict it on one "
                "device, or set a window"
            )

    @property
    def device(self) -> torch.device | str | None:
        """Where images are prepared: the first one's."""
        return self.predictors[0].device

    def stream(
        self,
        cases: Iterable[Mapping[str, Any]],
        *,
        batch_size: int = 1,
        field: str = "image",
        also: Collection[Also] = (),
    ) -> Iterator[tuple[Mapping[str, Any], Prediction]]:
        """Yield each case with its prediction, on the CPU, one after the other; see `Predictor.stream`."""
        del batch_size  # a volume that would be one of many is small, and its devices more than it needs
        first, is_warm = self.predictors[0], False
        with ThreadPoolExecutor(len(self.predictors), "share") as threads:
            for case in cases:
                image = case[field]
                if not is_warm:
                    self._warm_up(image)
                    is_warm = True
                volumes = first.begin(image, also)
                parts = [
                    threads.submit(self._predict_part, number, image, also, volumes)
                    for number in range(len(self.predictors))
                ]
                found = [part.result() for part in parts]
                if any(prediction is None for prediction in found) or found[0] is None:
                    raise NonFinitePredictionError(explain_not_finite(case, image, first.autocast))
                yield case, found[0]
                del case, image, volumes, found, parts  # or they live on while the next one is read

    def _warm_up(self, image: MetaTensor) -> None:
        """Let each GPU record its network before there are threads: what one of them does must not end a recording."""
        for predictor in self.predictors:
            device = torch.device(predictor.device or "cpu")
            if device.type == "cuda":
                with torch.cuda.device(device):
                    predictor.warm_up(image)

    def _predict_part(
        self, number: int, image: MetaTensor, also: Collection[Also], volumes: Decision
    ) -> Prediction | None:
        predictor = self.predictors[number]
        device = torch.device(predictor.device or "cpu")
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            return predictor.predict_share(image, (number, len(self.predictors)), also, volumes)
