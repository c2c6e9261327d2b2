"""Capture kernels once and replay them together: one CUDA graph around code, or around a function of tensors.

A training step on small volumes is hundreds of kernels of microseconds each; Python takes longer to launch them one by
one than they run. A recorded function must do the same on every call: no branch on a value, no synchronisation, the
same shapes. Its collectives (NCCL) are recorded with it.

Every CUDA graph of volseg is a ``Graph``, recorded inside ``undisturbed``. This module also describes what a recording
depends on besides the state of a network: ``signature`` of its inputs, and the ``modes`` of torch.
"""

import gc
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from volseg.device.gpus import FakeStream, empty_cache, fake_recording, has_values, observer, on_stream
from volseg.device.torch_internals import end_allocations_to_pool, get_version, tree_flatten, tree_map
from volseg.errors import ParallelError

PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)
"""Types of arguments, besides tensors, that are fully described by their value."""


def is_composed(leaf: Any) -> bool:
    """Return whether a tensor is made of others, such as a volume of slabs.

    Its ``arrangement`` must be equal for a recording to apply; ``pieces()`` are the other tensors, and
    ``with_pieces(pieces)`` is a tensor of the same arrangement with others.
    """
    return hasattr(type(leaf), "with_pieces")


def describe_inputs(inputs: Any, with_strides: bool = False) -> tuple[Any, ...] | None:
    """Describe what must be equal for a recording to apply: structure, shapes, types, devices, plain values.

    For a composed tensor the whole shape counts, so that all processes that share it get the same result. None if an
    argument has another type, which may have other contents in the next call.

    Parameters
    ----------
    inputs
        Inputs, nested in any way.
    with_strides
        Whether strides count: for code that gets the tensors themselves, or views of them.
    """
    leaves, structure = tree_flatten(inputs)
    found: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            made: Any = leaf.stride() if with_strides else None
            if is_composed(leaf):
                made = leaf.arrangement  # type: ignore[attr-defined]
            found.append((type(leaf), tuple(leaf.shape), leaf.dtype, leaf.device, leaf.requires_grad, made))
        elif (plain := describe_plain(leaf)) is not None:
            found.append(plain)
        else:
            return None
    return str(structure), *found


def describe_plain(value: Any) -> Hashable | None:
    """Return a value that identifies a plain value, or None if it is not plain, and may change later.

    The member of an enumeration does not determine its contents: a list can be changed. Nor does ``==``, which its
    class may define in any way. So a member is plain if all its contents are, and its name identifies it.
    """
    if isinstance(value, Enum):
        # A member's attributes ``_name_`` and ``__name__`` are Python's own.
        held = [part for name, part in vars(value).items() if not (name.startswith("_") and name.endswith("_"))]
        parts = [describe_plain(part) for part in (value._value_, *held)]
        return None if None in parts else (type(value), value._name_, *parts)
    if type(value) in (tuple, torch.Size):
        parts = [describe_plain(part) for part in value]
        return None if None in parts else (type(value), *parts)
    return (type(value), value) if isinstance(value, PLAIN) else None  # True == 1 == 1.0


def read_modes() -> tuple[Any, ...]:
    """Return the modes of torch under which a function would be recorded."""
    casts = tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cuda", "cpu"))
    return (
        *(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), casts),
        *(torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype(), _read_precision()),
    )


def _read_precision() -> tuple[Any, ...]:
    """Return how exactly float32 is computed; ``allow_tf32`` raises where convolutions and recurrent layers differ."""
    own: Any = torch.backends
    if hasattr(own.cudnn, "conv"):  # torch 2.9
        return tuple(
            part.fp32_precision for part in (own.cudnn.conv, own.cudnn.rnn, own.cuda.matmul, own.mkldnn.matmul)
        )
    return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32


@contextmanager
def without_cached_casts() -> Iterator[None]:
    """Keep autocast enabled, without its cache of casts.

    A cached cast belongs to the graph that made it, or was made before and keeps the old values.
    """
    with ExitStack() as stack:
        for kind in ("cuda", "cpu"):
            if torch.is_autocast_enabled(kind):
                dtype = torch.get_autocast_dtype(kind)
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=False))
        yield


@contextmanager
def undisturbed() -> Iterator[None]:
    """Record in this block without garbage collection: releasing old graphs and events breaks a recording."""
    gc.collect()
    collects = gc.isenabled()
    gc.disable()
    try:
        with without_cached_casts():
            yield
    finally:
        if collects:
            gc.enable()


class Graph:
    """One CUDA graph: the work that a device receives between ``begin`` and ``end``.

    Memory allocated during a recording belongs to the graph from its first kernel to its last use in a recording, and
    no longer: before, another allocation may use it. So tensors that are filled before a replay must not be allocated
    during the recording.

    Parameters
    ----------
    stream : torch.cuda.Stream
        Stream of the recording. A replay runs on the current stream.
    pool : tuple, optional
        Memory that it shares with other graphs, which must be replayed in the order of recording.
    generators : iterable of torch.Generator
        Generators to draw from, in addition to the device's default one.
    """

    def __init__(self, stream: torch.cuda.Stream, pool: Any = None, generators: Iterable[torch.Generator] = ()) -> None:
        self._stream = stream
        self._pool = torch.cuda.graph_pool_handle() if pool is None else pool
        self._generators = tuple(generators)
        self._graph = _make_cuda_graph(self._generators)
        self._before: tuple[int, torch.cuda.Stream] | None = None

    @property
    def pool(self) -> Any:
        """Its memory pool, for graphs that share it."""
        return self._pool

    def begin(self) -> None:
        """Record on the graph's own stream: ``torch.cuda.graph``'s default one belongs to one device only."""
        self._before = torch.cuda.current_device(), torch.cuda.current_stream(self._stream.device)
        torch.cuda.set_stream(self._stream)
        try:
            # thread_local: backward is recorded from autograd's threads, loaders' threads may allocate meanwhile, and
            # NCCL's watchdog thread asks about its events.
            self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        except BaseException:
            self._go_back()
            raise

    def end(self) -> None:
        """Stop recording; do nothing if ``begin`` failed."""
        if self._before is None:
            return
        try:
            self._graph.capture_end()
        except BaseException:
            end_allocations_to_pool(self._stream.device, self._pool)
            _end_capture_of_generators(self._stream.device, self._generators)
            raise
        finally:
            self._go_back()

    def _go_back(self) -> None:
        """Work where the caller worked."""
        assert self._before is not None
        (device, stream), self._before = self._before, None
        torch.cuda.set_stream(stream)
        torch.cuda.set_device(device)

    def replay(self) -> None:
        """Replay the graph on the device's current stream."""
        self._graph.replay()

    def release(self) -> None:
        """Free the graph; NCCL ends a group only once no graph holds its collectives."""
        self._graph.reset()


def _make_cuda_graph(generators: Iterable[torch.Generator]) -> torch.cuda.CUDAGraph:
    """Return a new graph that knows the generators."""
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    return graph


def _end_capture_of_generators(device: torch.device, generators: Iterable[torch.Generator]) -> None:
    """Capture one kernel after a capture that failed.

    Generators leave the capturing state only at the end of a complete capture, and refuse eager draws until then.
    """
    value = torch.zeros(1, device=device)
    graph = _make_cuda_graph(generators)
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        value.add_(1)
    finally:
        graph.capture_end()
        graph.reset()


class _FakeGraph:
    """A recording on a fake GPU: its memory is noted as its own; a replay needs no memory."""

    def __init__(self, stream: FakeStream, pool: Any = None, *, is_step: bool = True) -> None:
        self._stream, self._pool = stream, pool or f"recording {id(self)}"
        self._is_step = is_step
        self._open = ExitStack()

    @property
    def pool(self) -> Any:
        """The name of its memory."""
        return self._pool

    def begin(self) -> None:
        """Trace the following work as recorded."""
        if self._is_step:
            observer().on_mark("record")
        self._open.enter_context(on_stream(self._stream))
        self._open.enter_context(fake_recording(self._pool))

    def end(self) -> None:
        """Trace the following work as eager again."""
        self._open.close()

    def replay(self) -> None:
        """Trace a replay."""
        if self._is_step:
            observer().on_mark("replay")

    def release(self) -> None:
        """Do nothing: the memory is freed with the tensors."""


def make_graph(
    stream: Any, pool: Any = None, generators: Iterable[torch.Generator] = (), *, is_step: bool = True
) -> Graph | _FakeGraph:
    """Return a graph to record on a stream of a real or fake GPU; see ``Graph``.

    A trace notes where a whole step (``is_step``) is recorded and replayed.
    """
    if isinstance(stream, FakeStream):
        return _FakeGraph(stream, pool, is_step=is_step)
    return Graph(stream, pool, generators)


def make_pool(device: torch.device, name: str) -> Any:
    """Return a memory pool for graphs to share, on a real or fake GPU."""
    return torch.cuda.graph_pool_handle() if has_values(device) else name


class RecordedFunction:
    """A function whose kernels were recorded.

    First call the function itself some times on ``stream``: at the first use libraries allocate memory and choose
    kernels, which cannot be recorded. Recording does not run the function.

    Parameters
    ----------
    function : callable
        Takes the inputs by keyword and returns tensors; it may change other tensors in place (weights).
    inputs : mapping
        Tensors on a GPU by name, nested in any way; only their signature matters.
    generators : iterable of torch.Generator
        Generators that the function draws from, besides the device's default one. Each replay continues from their
        states, so seeding a generator before a call takes effect.
    stream : torch.cuda.Stream, optional
        Stream of the recording.
    shares : RecordedFunction, optional
        A recording whose memory this one uses too: the results of each hold until the next call of either.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        inputs: Mapping[str, Any],
        *,
        generators: Iterable[torch.Generator] = (),
        stream: torch.cuda.Stream | None = None,
        shares: "RecordedFunction | None" = None,
    ) -> None:
        self.signature = describe_inputs(inputs)
        if any(tensor.requires_grad for tensor in _list_tensors(dict(inputs))):
            raise ParallelError("an input needs a gradient, but a replay computes none; pass input.detach()")
        self._inputs = tree_map(_clone, dict(inputs))
        versions = _read_versions(self._inputs)
        stream = torch.cuda.Stream() if stream is None else stream
        pool = None if shares is None else shares._graph.pool
        self._graph: Graph | _FakeGraph = make_graph(stream, pool, generators)
        with undisturbed():
            # A recording has its own memory, and needs what earlier calls have cached.
            empty_cache(stream.device)
            self._graph.begin()
            try:
                self._outputs = function(**self._inputs)
            finally:
                self._graph.end()
        if _read_versions(self._inputs) != versions:
            self.release()
            raise ParallelError(
                "the function changes its input in place, but a replay would change its own copy; pass a clone, or let "
                "the first layer work out of place (inplace=False)"
            )

    def __call__(self, inputs: Mapping[str, Any]) -> Any:
        """Run on new inputs of the recorded signature; the next call overwrites the returned tensors."""
        for recorded, given in zip(_list_tensors(self._inputs), _list_tensors(dict(inputs)), strict=True):
            recorded.copy_(given, non_blocking=True)
        self._graph.replay()
        return self._outputs

    def release(self) -> None:
        """Free the recording."""
        self._graph.release()
        self._inputs, self._outputs = {}, None


def _list_tensors(inputs: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for leaf in tree_flatten(inputs)[0]:
        found += leaf.pieces() if is_composed(leaf) else [leaf] if isinstance(leaf, Tensor) else []
    return found


def _read_versions(inputs: Any) -> list[int]:
    return [get_version(tensor) for tensor in _list_tensors(inputs) if not tensor.is_inference()]


def _clone(leaf: Any) -> Any:
    if is_composed(leaf):
        return leaf.with_pieces([piece.clone() for piece in leaf.pieces()])
    return leaf.clone() if isinstance(leaf, Tensor) else leaf
