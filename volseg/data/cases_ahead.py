"""Cases prepared by a copy of this process, while this one imports, builds and asks its devices.

To prepare a small case is Python for the greater part, and so is all that a training does before its first batch:
threads would wait for each other. The copy begins with the first case. Who wants the cases stops it, takes what it has
made, and prepares the others. Voxels lie in memory that both have mapped; nothing of them is sent.

Nothing depends on the copy: a case that it did not bring, whatever kept it, is prepared by who wanted it, who then
meets what the copy met.
"""

import io
import logging
import mmap
import multiprocessing
import os
import pickle
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Self

import torch
from monai.data import MetaTensor
from torch import Tensor

from volseg.data.cases import Case, Task
from volseg.data.shared_memory import SharedTensors, can_share, map_tensors, take
from volseg.data.told_cases import ReadCase
from volseg.device.gpus import uses_gpus
from volseg.lifetime import bind_copy
from volseg.parallel.devices import has_process_group, is_launched
from volseg.parallel.forking import holding_signals_back
from volseg.parallel.progress import report_progress
from volseg.transforms.preprocessing import Preprocessing

__all__ = ["CasesAhead", "can_prepare_ahead"]

logger = logging.getLogger(__name__)

PATIENCE_S = 300.0
"""A copy that is at one case for so long when everything else is there is ended, and what it has is prepared anew."""

Wanted = tuple[Sequence[tuple[Case, bool]], Task, Preprocessing]
"""Each case with whether it validates, their task, and how they are prepared."""


def can_prepare_ahead() -> bool:
    """Tell whether a copy of this process could prepare cases, and has a core to do it on."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    is_alone = not (uses_gpus() or has_process_group() or is_launched())
    return sys.platform.startswith("linux") and can_share() and cores > 1 and is_alone


class CasesAhead:
    """A copy of this process that prepares cases, one after the other.

    For a process of one thread, which has not begun to use CUDA: see `can_prepare_ahead`.

    Parameters
    ----------
    wanted : tuple
        Which cases.
    read : callable
        From the number of a case to what became of it; runs in the copy.
    """

    def __init__(self, wanted: Wanted, read: Callable[[int], ReadCase]) -> None:
        self._wanted = wanted
        sides, _, _ = wanted
        # Two: cases that train are let go of once a GPU has them, those that validate stay to the end.
        self._stores = {False: SharedTensors(), True: SharedTensors()}
        self._signs = mmap.mmap(-1, mmap.PAGESIZE)  # shared with the copy: how many cases it has begun; whether to stop
        context = multiprocessing.get_context("fork")
        self._receiver, sender = context.Pipe(duplex=False)
        arguments = (read, [validates for _, validates in sides], sender, os.getpid())
        process = context.Process(target=self._be_copy, args=arguments, name="cases")
        self._process: multiprocessing.process.BaseProcess | None = process
        with sender, holding_signals_back(), warnings.catch_warnings():
            # Python warns of threads, which a copy lacks; those are of libraries, and a copy that uses one thread needs
            # none of them.
            warnings.filterwarnings("ignore", ".*fork.*", DeprecationWarning)
            process.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *fault: object) -> None:
        self.close()

    def serves(self, sides: Sequence[tuple[Case, bool]], task: Task, preprocessing: Callable[[Case], Case]) -> bool:
        """Tell whether these are the cases, and prepared so."""
        own_sides, own_task, own_preprocessing = self._wanted
        components = preprocessing.components if isinstance(preprocessing, Preprocessing) else None
        return (
            self._process is not None
            and components is not None
            and (list(sides), task, components) == (list(own_sides), own_task, own_preprocessing.components)
        )

    def stop(self) -> int:
        """Let the copy end behind the case that it is at; return how many it has begun, from the first on."""
        self._signs[8] = 1
        return int.from_bytes(self._signs[:8], "little")

    def collect(self) -> Iterator[tuple[int, ReadCase]]:
        """Yield what the stopped copy has brought, by the number of the case; wait for the one that it is at."""
        mapped: dict[bool, mmap.mmap | None] = {}
        sides, _, _ = self._wanted
        while (told := self._hear()) is not None:
            if not mapped:  # now it has written all
                mapped = {validates: map_tensors(store.address) for validates, store in self._stores.items()}
            number, content = told
            yield number, _Unpickler(io.BytesIO(content), mapped[sides[number][1]]).load()
        self.close()

    def _hear(self) -> tuple[int, bytes] | None:
        """Return what the copy says next; None where it has said all, was killed, or says nothing for too long."""
        assert self._process is not None, "collected twice"
        end = time.monotonic() + PATIENCE_S
        while not self._receiver.poll(0.2):
            report_progress("read")
            if not self._process.is_alive() and not self._receiver.poll():
                return None
            if time.monotonic() > end:
                logger.warning(
                    "the process that prepares cases beside the start has said nothing for %.0f s; it is ended, and "
                    "its cases are prepared here",
                    PATIENCE_S,
                )
                return None
        try:
            told: tuple[int, bytes] | None = self._receiver.recv()
        except EOFError:
            return None
        return told

    def close(self) -> None:
        """End the copy; what was taken of it stays."""
        if self._process is None:
            return
        process, self._process = self._process, None
        process.kill()
        process.join()
        self._receiver.close()
        for store in self._stores.values():
            store.close()

    def _be_copy(self, read: Callable[[int], ReadCase], sides: Sequence[bool], sender: Connection, parent: int) -> None:
        """Prepare until all are there or nobody waits any more, then say what became of them."""
        bind_copy(parent)
        torch.set_num_threads(1)
        brought: list[tuple[int, bytes]] = []
        for number, validates in enumerate(sides):
            self._signs[:8] = (number + 1).to_bytes(8, "little")
            if self._signs[8]:
                break
            # Whatever it is, the process that wants the case meets it as well, and tells.
            with suppress(Exception):
                attempt = read(number)
                if attempt.fault is None:
                    content = io.BytesIO()
                    _Pickler(content, self._stores[validates]).dump(attempt)
                    brought.append((number, content.getvalue()))
        with suppress(BrokenPipeError):
            for told in [*brought, None]:
                sender.send(told)


class _Pickler(pickle.Pickler):
    """Writes what became of a case, its voxels into shared memory."""

    def __init__(self, file: io.BytesIO, store: SharedTensors) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._store = store

    def persistent_id(self, obj: Any) -> Any:
        """Return where a tensor lies, and what it knows besides; None for anything else."""
        if not isinstance(obj, Tensor):
            return None
        plain = obj.as_subclass(Tensor)
        if type(obj) not in (Tensor, MetaTensor) or plain.device.type != "cpu" or plain.requires_grad:
            raise pickle.PicklingError(f"a {type(obj).__name__} on {plain.device} is not shared")
        order = sorted(range(plain.ndim), key=plain.stride, reverse=True)  # strides stay as they are
        known = vars(obj) if type(obj) is MetaTensor else None
        return self._store.add(plain.permute(order)), order, known


class _Unpickler(pickle.Unpickler):
    """Reads what `_Pickler` wrote."""

    def __init__(self, file: io.BytesIO, mapped: mmap.mmap | None) -> None:
        super().__init__(file)
        self._mapped = mapped

    def persistent_load(self, pid: Any) -> Tensor:
        """Return the tensor that lies there."""
        place, order, known = pid
        assert self._mapped is not None, "a tensor was written"
        plain = take(self._mapped, place).permute([order.index(dim) for dim in range(len(order))])
        if known is None:
            return plain
        volume = plain.as_subclass(MetaTensor)
        vars(volume).update(known)
        return volume
