# ruff: noqa: N803  (upper case: what Triton is compiled for)
# mypy: disable-error-code="no-untyped-def"
"""Exchange halo planes between the GPUs of a host: one kernel writes them to the neighbours' memory, one reads them.

As in ``values``, 32 bits of data and the number of the call are one word of 64 bits, which arrives whole: no fence is
needed. Planes are sent from their place and received at their place. Small planes use the computing stream: NCCL needs
a stream of its own, events around it, and, while a CUDA graph is recorded, copies on both sides, which takes longer
than the planes travel. Larger ones also use a separate stream, during the inner planes' work, but without the copies.
The largest stay with NCCL, since a word of data takes two words on the way. ::

    box   | from the shard before: words of even calls, of odd calls | from the shard behind: even, odd |

In every call each process sends to both neighbours and waits for both, one empty word if there are no planes. So two
sets of words are enough: a process that sends call ``n + 2`` to a neighbour has received the neighbour's words of call
``n + 1``, which were sent after the neighbour had read call ``n``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from volseg.device.gpus import current_gpu_stream, get_address, is_gpu, is_recording, make_stream, observer, on_stream
from volseg.device.peer.mailbox import PATIENCE, Mailbox
from volseg.device.peer.values import count
from volseg.device.triton_kernels import kernel, tl, triton
from volseg.errors import ParallelError

LIMIT = 2**22
"""Limit of bytes of planes in one direction: a plane of 256 x 256 voxels, 32 channels, 16 bits. With 6.5e6 bytes, of
320 x 320, a step of 160 x 320 x 320 voxels per GPU took 107 ms instead of 100."""

EAGER_LIMIT = 2**19
"""The same limit without a recorded graph: then NCCL copies nothing, and takes no more of Python's time."""

ASIDE = 2**18
"""Bytes in one direction from which planes travel during the inner planes' work: 5 us to travel, 3 to start."""

WORDS = LIMIT // 4

PROGRAMS = 64
"""Limit of programs per direction: they wait, and other streams' kernels need multiprocessors meanwhile."""

BLOCK = 2048

NOT_A_NUMBER = 0x7FFF7FFF
"""NaN as one float of 32 bits, as two of 16 bits, and twice in a row as one of 64 bits."""

SIDES = "before", "behind"


class Planes(NamedTuple):
    """Kernel arguments for the planes that travel to, or come from, one side.

    Addresses are in bytes, everything else counts words of 32 bits. Where ``_locate`` finds the planes: they are runs
    of ``run`` words that lie ``inner_stride`` apart, ``inner`` of them in a sample; samples are ``outer_stride`` apart.
    """

    box: int
    """Address of the words on the way."""
    travelling: int
    """Words on the way: at least one with a neighbour, none at the volume's border."""
    start: int
    """Address of the planes."""
    words: int
    """Number of words of the planes."""
    run: int
    inner: int
    outer_stride: int
    inner_stride: int
    kept: int
    """Address of a dense copy of the received planes."""


ARGUMENTS = [f"{side}_{name}" for side in SIDES for name in Planes._fields]
"""Arguments of the kernel, in order: the planes before, and the planes behind."""


@triton.jit
def _locate(i, start, run, inner, outer_stride, inner_stride, WHOLE: tl.constexpr):
    """Return the addresses of the words ``i`` of planes: one run of words, or evenly spaced runs within each sample."""
    first = start.to(tl.int64).to(tl.pointer_type(tl.int32))
    if WHOLE:
        return first + i
    number = i // run
    offset = (number // inner).to(tl.int64) * outer_stride + (number % inner).to(tl.int64) * inner_stride
    return first + offset + i % run


@kernel(do_not_specialize=[*ARGUMENTS, "patience"])
def _exchange_planes_kernel(
    calls, patience,
    before_box, before_travelling, before_start, before_words, before_run, before_inner, before_outer_stride,
    before_inner_stride, before_kept,
    behind_box, behind_travelling, behind_start, behind_words, behind_run, behind_inner, behind_outer_stride,
    behind_inner_stride, behind_kept,
    RECEIVE: tl.constexpr, KEEP: tl.constexpr, NAN: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Send planes to both sides, or receive them from both: every other program works for the side before."""
    call = (tl.load(calls) + 1).to(tl.int64)
    first = tl.program_id(0) % 2 == 0
    box = tl.where(first, before_box, behind_box)
    travelling = tl.where(first, before_travelling, behind_travelling)
    start = tl.where(first, before_start, behind_start)
    words = tl.where(first, before_words, behind_words)
    run = tl.where(first, before_run, behind_run)
    inner = tl.where(first, before_inner, behind_inner)
    outer_stride = tl.where(first, before_outer_stride, behind_outer_stride)
    inner_stride = tl.where(first, before_inner_stride, behind_inner_stride)
    slot = box.to(tl.int64).to(tl.pointer_type(tl.int64)) + (call & 1) * WORDS
    if RECEIVE:
        if KEEP:
            kept = tl.where(first, before_kept, behind_kept).to(tl.int64).to(tl.pointer_type(tl.int32))
        looks = 0  # over all blocks: wait for a missing process only once
        blocks = tl.cdiv(tl.maximum(travelling, words), BLOCK)
        for block in range(tl.program_id(0) // 2, blocks, tl.num_programs(0) // 2):
            i = block * BLOCK + tl.arange(0, BLOCK)
            awaited = i < travelling
            word = tl.load(slot + i, mask=awaited, other=0, volatile=True)
            missing = tl.max(((word >> 32 != call) & awaited).to(tl.int32), 0)
            while (missing != 0) & (looks < patience):
                word = tl.load(slot + i, mask=awaited, other=0, volatile=True)
                missing = tl.max(((word >> 32 != call) & awaited).to(tl.int32), 0)
                looks += 1
            # For the whole block: half of a 64-bit NaN would be a valid number. Zeros at the volume's border.
            data = tl.where(awaited, tl.where(missing != 0, NAN, word.to(tl.int32)), 0)
            place = _locate(i, start, run, inner, outer_stride, inner_stride, WHOLE)
            tl.store(place, data, mask=i < words)
            if KEEP:
                tl.store(kept + i, data, mask=i < words)
        count(calls, call)
    else:
        for block in range(tl.program_id(0) // 2, tl.cdiv(travelling, BLOCK), tl.num_programs(0) // 2):
            i = block * BLOCK + tl.arange(0, BLOCK)
            place = _locate(i, start, run, inner, outer_stride, inner_stride, WHOLE)
            data = tl.load(place, mask=i < words, other=0)
            tl.store(slot + i, (call << 32) | (data.to(tl.int64) & 0xFFFFFFFF), mask=i < travelling)


def small_enough(width: int, values: int, dtype: torch.dtype, limit: int = LIMIT) -> bool:
    """Return whether halos fit this exchange: ``width`` planes, on any side of any shard, of ``values`` each."""
    size = values * dtype.itemsize
    return dtype.is_floating_point and size > 0 and size % 4 == 0 and width * size <= limit


@lru_cache(maxsize=4096)  # the same few halos in every step
def _find_runs(shape: torch.Size, stride: tuple[int, ...], itemsize: int) -> tuple[int, int, int, int] | None:
    """Return the words of a run, the runs of a sample, and the strides of samples and runs; None for other layouts."""
    run, dim = 1, len(shape)
    while dim > 0 and (shape[dim - 1] == 1 or stride[dim - 1] == run):
        dim -= 1
        run *= shape[dim]
    rest = [(n, step) for n, step in zip(shape[:dim], stride[:dim], strict=True) if n > 1]
    if len(rest) > 2 or any(size * itemsize % 4 for size in (run, *(step for _, step in rest))):
        return None
    (_, outer), (runs, inner) = [(1, 0), (1, 0), *rest][-2:]
    return run * itemsize // 4, runs, outer * itemsize // 4, inner * itemsize // 4


def _describe(planes: Tensor | None, box: int, there: bool, kept: Tensor | None = None) -> Planes | None:
    """Return the kernel arguments of planes, in the order of travel; None if the planes must be packed.

    Every address is set, even without planes: Triton compiles separately for integers of 32 and of 64 bits.
    """
    address = box if kept is None else get_address(kept)
    if planes is None or planes.numel() == 0:
        return Planes(box, int(there), box, 0, 1, 1, 0, 0, address)
    runs = _find_runs(planes.shape, planes.stride(), planes.element_size())
    if runs is None or get_address(planes) % 4:
        return None
    words = planes.numel() * planes.element_size() // 4
    return Planes(box, words if there else 0, get_address(planes), words, *runs, address)


class PlaneMailbox(Mailbox):
    """One process's side of the exchange of planes; see ``Mailbox``. The group is in the order of the cut."""

    CARRIES = "planes"

    def __init__(
        self, boxes: Sequence[int], rank: int, device: torch.device, patience: int = PATIENCE, memory: Any = None
    ) -> None:
        super().__init__(boxes, rank, device, patience, memory)
        side, last = PlaneMailbox.size() // 2, len(boxes) - 1
        self.neighbours = rank > 0, rank < last
        # The shard before finds its planes in its area for planes from behind, and vice versa.
        self.outboxes = boxes[max(0, rank - 1)] + side, boxes[min(last, rank + 1)]
        self.inboxes = boxes[rank], boxes[rank] + side
        self.stream = make_stream(device) if is_gpu(device) else None
        self._open: _Exchange | None = None

    @staticmethod
    def size(shards: int = 2) -> int:
        """Return the bytes of a box for any number of shards: it has words from two."""
        del shards
        return 2 * 2 * WORDS * 8

    def probe(self) -> bool:
        """Exchange ranks with the neighbours; return whether both arrived, and zeros without a neighbour."""
        own = torch.full((2,), float(self.rank), device=self.calls.device)
        before, behind = torch.full_like(own, -1), torch.full_like(own, -1)
        self.start((own, own), (before, behind))()
        ranks = self.rank - 1, self.rank + 1
        wanted = [float(rank) if there else 0.0 for rank, there in zip(ranks, self.neighbours, strict=True)]
        return [before[1].item(), behind[1].item()] == wanted

    def start(
        self,
        sends: Sequence[Tensor | None],
        receives: Sequence[Tensor | None],
        keep: Sequence[Tensor | None] | None = None,
    ) -> Callable[[], None]:
        """Send planes; the returned function waits for the neighbours' and writes them.

        Parameters
        ----------
        sends, receives
            Planes for and from the shard before and the shard behind, in the order of voxels in which they travel.
            Received planes become zeros at the volume's border, and NaN if they do not arrive.
        keep
            Dense memory for a copy of the received planes.
        """
        recording = is_recording(self.calls.device)
        self._complete(recording)
        with_planes = [planes if there else None for planes, there in zip(sends, self.neighbours, strict=True)]
        packed = [_pack(planes) for planes in with_planes]
        targets = [_pack(planes, copy=False) for planes in receives]
        size = max(0 if planes is None else planes.numel() * planes.element_size() for planes in (*packed, *targets))
        stream = self.stream if recording and size >= ASIDE else None
        self._open = exchange = _Exchange(self, receives, targets, packed, keep, recording, stream)
        if stream is None:
            self._send(packed)
            return exchange
        stream.wait_stream(current_gpu_stream(self.calls.device))
        with on_stream(stream):
            self._send(packed)
            self._receive(exchange)
        return exchange

    def settle(self) -> None:
        """Receive planes that were sent and not yet waited for, or drop them if their recording failed.

        Call this before a recording begins: the planes of a failed recording were never sent.
        """
        self._complete(recording=False)

    def _complete(self, recording: bool) -> None:
        """Receive planes that were sent and not yet waited for: the box holds one call."""
        if self._open is None:
            return
        if self._open.recorded and not recording:
            self._open = None  # of a recording that failed: never sent
        elif recording and not self._open.recorded:
            raise ParallelError(
                "planes of a halo were sent before the recording of a CUDA graph began and are still awaited; record "
                "whole steps"
            )
        else:
            self._open()

    def receive(self, exchange: "_Exchange") -> None:
        """Wait for planes, unless this was done before."""
        if self._open is not exchange:
            return
        self._open = None
        if exchange.stream is not None:
            current_gpu_stream(self.calls.device).wait_stream(exchange.stream)
        else:
            self._receive(exchange)
        for planes, arrived in zip(exchange.receives, exchange.targets, strict=True):
            if planes is not None and arrived is not None and arrived is not planes:
                planes.copy_(arrived)
        exchange.receives = exchange.targets = exchange.sent = ()
        exchange.kept = None

    def _send(self, packed: Sequence[Tensor | None]) -> None:
        observer().on_sent(self.calls.device, "halo", sum(planes.nbytes for planes in packed if planes is not None))
        self._run(self.outboxes, packed, (None, None), RECEIVE=False, KEEP=False)

    def _receive(self, exchange: "_Exchange") -> None:
        keep = exchange.kept is not None
        self._run(self.inboxes, exchange.targets, exchange.kept or (None, None), RECEIVE=True, KEEP=keep)

    def _run(
        self, boxes: Sequence[int], both: Sequence[Tensor | None], kept: Sequence[Tensor | None], **variant: bool
    ) -> None:
        """Run the kernel for the planes ``both`` before and behind; they must need no packing."""
        before, behind = (_describe(*side) for side in zip(both, boxes, self.neighbours, kept, strict=True))
        assert before is not None
        assert behind is not None
        whole = all(side.words <= side.run for side in (before, behind))
        programs = 2 * min(PROGRAMS, -(-max(1, before.words, behind.words) // BLOCK))
        _exchange_planes_kernel[(programs,)](
            self.calls, self.patience, *before, *behind, **variant,
            NAN=NOT_A_NUMBER, WORDS=WORDS, BLOCK=BLOCK, WHOLE=whole, num_warps=8,
        )  # fmt: skip


@dataclass(eq=False, slots=True)
class _Exchange:
    """Planes on their way; a call waits for them. Not a closure, which would hold itself and the planes.

    ``targets`` are the received planes, or their packed memory; ``sent`` is held as long as the other ``stream`` may
    read it.
    """

    box: PlaneMailbox
    receives: Sequence[Tensor | None]
    targets: Sequence[Tensor | None]
    sent: Sequence[Tensor | None]
    kept: Sequence[Tensor | None] | None
    recorded: bool
    stream: Any

    def __call__(self) -> None:
        self.box.receive(self)


def _pack(planes: Tensor | None, copy: bool = True) -> Tensor | None:
    """Return planes in a form that can travel: themselves, or dense memory for them, with a copy of them."""
    if _describe(planes, 0, there=True) is not None:
        return planes
    assert planes is not None
    packed = torch.empty(planes.shape, dtype=planes.dtype, device=planes.device)
    return packed.copy_(planes) if copy else packed
