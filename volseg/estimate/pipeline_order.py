"""In which order one process asks several devices for memory, and when blocks that two streams use come back.

A step is traced by one thread, and each device's work is done as soon as it is asked for. On GPUs it is not. Of a
pipeline that decides how much is reserved, in two ways:

- a backward pass has a thread for each device. The last stage's has less to start than those before it, and is through
  with all micro-batches while they have the first: the gradients that it sends lie there all at once;
- a copy between devices reads, or writes, a block of another stream than its own. Such a block is handed out again
  only once that stream has come past the copy, and Python is ahead of the devices.

So the requests are put in order by a clock of the host for each thread, and a clock of the device for each stream.
Nothing waits for a step, so Python is further ahead with each: the last one is repeated once before.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from volseg.estimate.trace import (
    Allocate,
    Event,
    Free,
    Issued,
    KernelRun,
    LetGo,
    Mark,
    Ordered,
    Sent,
    StepTrace,
    Used,
)

__all__ = ["Pace", "order_by_threads", "repeat_last_step"]

Stream = tuple[int, int]
"""Device and number."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How long things take, in seconds."""

    kernel: Callable[[KernelRun], float]
    """On the device."""
    message: Callable[[Sent], float]
    """Between devices."""
    host: Callable[[KernelRun | Sent, str], float]
    """Of Python, which starts it, in a part of the step."""


def order_by_threads(issued: Sequence[Issued], num_devices: int, pace: Pace) -> tuple[StepTrace, ...]:
    """Return what each device is asked for, in the order in which its threads come to it.

    Parameters
    ----------
    issued : sequence of Issued
        In the order of a single thread.
    num_devices : int
        Of the process.
    pace : Pace
        By which one is ahead of the other.
    """
    copies = _find_copies(issued)
    asked = _find_host_times(issued, copies, pace)
    devices = _Devices(num_devices, pace)
    for number in sorted(range(len(issued)), key=lambda number: (asked[number], number)):
        devices.ask(issued[number], asked[number], copies.get(number))
    return tuple(StepTrace(tuple(events), index) for index, events in enumerate(devices.events))


@dataclass(slots=True)
class _Copy:
    """A tensor's way to another device: from what is said of its departure to the mark of its arrival."""

    source: int
    sent: Sent
    leaving: int = 0
    """The stream of the source on which it goes."""
    block: int | None = None
    """What is copied."""


def _find_copies(issued: Sequence[Issued]) -> dict[int, _Copy]:
    """Return the copy that each part of one belongs to; see ``copy_between``, which is what asks for them."""
    found: dict[int, _Copy] = {}
    going: _Copy | None = None
    arrived = False
    for number, one in enumerate(issued):
        if isinstance(one.event, Sent) and one.event.kind == "copy":
            going, arrived = _Copy(one.device, one.event), False
        elif going is not None and arrived:
            if isinstance(one.event, Used) and one.device == going.source:
                going.block = one.event.block
                found[number] = going
            going = None
        if going is None:
            continue
        found[number] = going
        if isinstance(one.event, Ordered) and one.event.waits and one.device == going.source:
            going.leaving = one.event.stream
        arrived = isinstance(one.event, Ordered) and not one.event.waits and one.device != going.source
    return found


def _find_host_times(issued: Sequence[Issued], copies: dict[int, _Copy], pace: Pace) -> list[float]:
    """Return when the host comes to each request."""
    times, clock, part, first = [0.0] * len(issued), 0.0, "rest", 0
    taken: dict[int, float] = {}
    while first < len(issued):
        last = first
        while last < len(issued) and issued[last].backward == issued[first].backward:
            last += 1
        takes = []
        for one in issued[first:last]:
            part = one.event.name if isinstance(one.event, Mark) else part
            takes.append(pace.host(one.event, part) if isinstance(one.event, KernelRun | Sent) else 0.0)
        if issued[first].backward:
            clock = _run_backward(issued, range(first, last), copies, takes, clock, times)
        else:
            for number, seconds in zip(range(first, last), takes, strict=True):
                clock += seconds
                times[number] = clock
        first = last
    for number, one in enumerate(issued):
        match one.event:
            case Allocate(block):
                taken[block] = times[number]
            case Free(block) | Used(block):  # never before it is there, whichever thread was said to let it go
                times[number] = max(times[number], taken.get(block, 0.0))
    return times


@dataclass(slots=True)
class _Task:
    """What a thread does in one go."""

    thread: int
    is_copy: bool
    requests: list[int] = field(default_factory=list)
    needs: set[int] = field(default_factory=set)
    """Tasks that must be done before."""


def _list_tasks(issued: Sequence[Issued], numbers: range, copies: dict[int, _Copy]) -> list[_Task]:
    """Divide a backward pass: where it turns to another device, sends a gradient, or waits for one."""
    tasks: list[_Task] = []
    made: dict[int, int] = {}
    recorded: dict[int, int] = {}
    latest: dict[int, int] = {}
    current: object = None
    for number in numbers:
        one, copy = issued[number], copies.get(number)
        event = one.event
        waits_for = recorded.get(event.event) if isinstance(event, Ordered) and event.waits and not copy else None
        thread = one.device if copy is None else copy.source
        if isinstance(event, Free | Mark) and tasks:
            thread = tasks[-1].thread  # whoever runs lets go of it
        key: object = thread if copy is None else id(copy)
        waits_elsewhere = waits_for is not None and tasks[waits_for].thread != thread
        if not tasks or key != current or waits_elsewhere:
            tasks.append(_Task(thread, copy is not None))
            if copy is not None and copy.block in made:
                tasks[-1].needs.add(made[copy.block])
            elif copy is not None and thread in latest:
                tasks[-1].needs.add(latest[thread])
            current = key
        task = len(tasks) - 1
        tasks[task].requests.append(number)
        if waits_for is not None and waits_for != task:
            tasks[task].needs.add(waits_for)
        if copy is None:
            latest[thread] = task
        match event:
            case Allocate(block):
                made[block] = task
            case Ordered(mark, _, False):
                recorded[mark] = task
    return tasks


def _run_backward(
    issued: Sequence[Issued],
    numbers: range,
    copies: dict[int, _Copy],
    takes: Sequence[float],
    begin: float,
    times: list[float],
) -> float:
    """Let a thread for each device work through its tasks; fill in ``times``, and return when all are done.

    Of what is ready a thread takes what comes first, as autograd does: a gradient may set out while the layers before
    it wait for another thread, and layers never pass one another.
    """
    tasks = _list_tasks(issued, numbers, copies)
    queues: dict[int, list[int]] = defaultdict(list)
    for number, task in enumerate(tasks):
        queues[task.thread].append(number)
    clocks: dict[int, float] = dict.fromkeys(queues, begin)
    done: dict[int, float] = {}
    while any(queues.values()):
        start, number = min(
            (max(clocks[thread], *(done[need] for need in tasks[number].needs), begin), number)
            for thread, queue in queues.items()
            for number in _list_ready(queue, tasks, done)
        )
        thread = tasks[number].thread
        for request in tasks[number].requests:
            start += takes[request - numbers.start]
            times[request] = start
        clocks[thread] = done[number] = start
        queues[thread].remove(number)
    return max(clocks.values(), default=begin)


def _list_ready(queue: Sequence[int], tasks: Sequence[_Task], done: dict[int, float]) -> list[int]:
    """Return what a thread could do next: its first task, and copies."""
    ready, has_layers = [], False
    for number in queue:
        task = tasks[number]
        if (task.is_copy or not has_layers) and all(need in done for need in task.needs):
            ready.append(number)
        has_layers = has_layers or not task.is_copy
    return ready


class _Devices:
    """The devices' streams, and their blocks that come back late."""

    def __init__(self, num_devices: int, pace: Pace) -> None:
        self.events: list[list[Event]] = [[] for _ in range(num_devices)]
        self._pace = pace
        self._ready: dict[Stream, float] = defaultdict(float)
        """When each stream is done with what it has been given."""
        self._recorded: dict[int, float] = {}
        self._home: dict[int, int] = {}
        self._uses: dict[int, set[int]] = defaultdict(set)
        self._left: list[dict[int, float]] = [{} for _ in range(num_devices)]
        """Of each device: blocks that nobody holds, and when no stream works on them any more."""

    def ask(self, one: Issued, asked: float, copy: _Copy | None) -> None:
        """Do one request, to which the host comes at a time."""
        device, event = one.device, one.event
        match event:
            case KernelRun(stream=stream):
                self._run(device, event, stream, asked, copy)
            case Ordered(mark, stream, waits):
                if waits:
                    self._ready[device, stream] = max(self._ready[device, stream], self._recorded.get(mark, 0.0))
                else:
                    self._recorded[mark] = self._ready[device, stream]
                return
            case Used(block, stream):
                if stream != self._home.get(block):
                    self._uses[block].add(stream)
                return
            case Allocate(block, _, stream):
                self._home[block] = stream
                self._take_back(device, asked)
            case Free(block) if block in self._uses:
                self._left[device][block] = max(self._ready[device, stream] for stream in self._uses.pop(block))
                event = LetGo(block)
            case Mark("empty_cache"):
                self._take_back(device, float("inf"))
        self.events[device].append(event)

    def _run(self, device: int, run: KernelRun, stream: int, now: float, copy: _Copy | None) -> None:
        if copy is None or device == copy.source:
            self._ready[device, stream] = max(self._ready[device, stream], now) + self._pace.kernel(run)
            return
        leaving, entering = (copy.source, copy.leaving), (device, stream)
        end = max(self._ready[leaving], self._ready[entering], now) + self._pace.message(copy.sent)
        self._ready[leaving] = self._ready[entering] = end

    def _take_back(self, device: int, now: float) -> None:
        """Give back what is done with: the allocator looks whenever it is asked."""
        for block, end in list(self._left[device].items()):
            if end <= now:
                del self._left[device][block]
                self.events[device].append(Free(block))


def repeat_last_step(issued: Sequence[Issued]) -> Sequence[Issued]:
    """Return what several devices were asked for, with the last step once more.

    The further step gives back of the one before what that gives back of the one before it (gradients, mostly). Where
    these cannot be told from their sizes and order, nothing is repeated.
    """
    marks = {one.event.name: number for number, one in enumerate(issued) if isinstance(one.event, Mark)}
    begin, end = marks.get("step", 0), marks.get("end", -1)
    if end < begin:
        return issued
    while begin and issued[begin - 1].event == Mark("step"):  # each device has its own
        begin -= 1
    step = issued[begin : end + 1]
    taken = {one.event.block: (one.device, one.event) for one in issued if isinstance(one.event, Allocate)}
    own = [one.event.block for one in step if isinstance(one.event, Allocate)]
    given_back = {one.event.block for one in step if isinstance(one.event, Free)}
    left = [block for block in own if block not in given_back]
    earlier = sorted(given_back - set(own))  # numbers rise as blocks are taken

    def describe(block: int) -> tuple[int, Allocate]:
        device, event = taken[block]
        return device, replace(event, block=0)

    if [*map(describe, earlier)] != [*map(describe, left)]:
        return issued
    first = max(taken, default=0) + 1
    numbers = {block: first + place for place, block in enumerate(own)}
    before = dict(zip(earlier, left, strict=True))
    behind = [_rename(one, numbers) for one in issued[end + 1 :]]
    return [*issued[: end + 1], *(_rename(one, {**before, **numbers}) for one in step), *behind]


def _rename(one: Issued, numbers: dict[int, int]) -> Issued:
    """Give a block its number; events of streams keep theirs, which are those of the latest."""
    event = one.event
    if isinstance(event, Allocate | Free | LetGo | Used) and event.block in numbers:
        return replace(one, event=replace(event, block=numbers[event.block]))
    return one
