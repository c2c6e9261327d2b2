"""The processes of a job find each other in a store that may hold what an earlier attempt left there.

A launcher that starts its processes again keeps its store, and with it the addresses under which the dead ones could be
reached. Its count of attempts does not tell one from the other: a launcher on another machine, which joins again
because this one did, does not count. So the first process chooses a name that was never used, and all keys of the
attempt are under it.

The first process must not take a dead one for a member. Each of the others leaves a *sign*, chosen at random; the first
one writes the signs that it sees, with the name, and every process whose own sign is among them says so. When all have,
the name holds; as long as one has not, its sign may have been a dead one's, and the first process looks again.
"""

import json
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

# Public names that torch does not list for type checkers.
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from volseg.errors import ParallelError
from volseg.launched import Launch

__all__ = ["PrefixStore", "Rendezvous", "Store", "join_rendezvous", "open_store"]

SECONDS_BETWEEN_LOOKS = 0.02
MOST_SECONDS_BETWEEN_LOOKS = 0.5


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """What the processes agreed on."""

    store: Store
    """For this attempt alone."""
    name: str
    restarts: int
    """How many attempts there were before."""
    members: tuple[Mapping[str, Any], ...]
    """What each process said of itself."""


def join_rendezvous(
    store: Store, launch: Launch, about: Mapping[str, Any], timeout: float, *, first: bool = True
) -> Rendezvous:
    """Wait until every process of this attempt has come.

    Parameters
    ----------
    store
        Which the processes share.
    launch
        The place of this one.
    about
        What the others should know of it: plain values.
    timeout
        Seconds to wait.
    first
        Whether this process meets for the first time; to meet again is no new attempt.

    Raises
    ------
    ParallelError
        Names those that have not come.
    """
    store = PrefixStore(f"volseg/{launch.run}", store)
    wait = _Patience(launch, timeout)
    sign = uuid.uuid4().hex
    mine = {"sign": sign, "restarts": launch.restarts, "about": dict(about)}
    store.set(f"member/{launch.rank}", json.dumps(mine))
    plan = _lead(store, launch, wait, int(first)) if launch.rank == 0 else _follow(store, launch, sign, wait)
    return Rendezvous(
        store=PrefixStore(plan["name"], store),
        name=plan["name"],
        restarts=plan["restarts"],
        members=tuple(member["about"] for member in plan["members"]),
    )


def _lead(store: Store, launch: Launch, wait: "_Patience", attempts: int) -> dict[str, Any]:
    """Write plans until one has the signs of all that live."""
    keys = [f"member/{rank}" for rank in range(launch.world_size)]
    earlier = store.add("attempts", attempts) - 1
    _require_hope(store)
    seen: list[bytes] = []
    while True:
        present = [rank for rank, key in enumerate(keys) if store.check([key])]
        if len(present) < launch.world_size:
            wait.for_(sorted(set(range(launch.world_size)) - set(present)))
            continue
        if (found := store.multi_get(keys)) != seen:
            seen = found
            members = [json.loads(value) for value in seen]
            restarts = max(earlier, *(member["restarts"] for member in members))
            plan = {"name": uuid.uuid4().hex, "restarts": restarts, "members": members}
            store.set("plan", json.dumps(plan))
            store.set(f"{plan['name']}/seen/0", "")
        late = [rank for rank in range(launch.world_size) if not store.check([f"{plan['name']}/seen/{rank}"])]
        if not late:
            store.set(f"{plan['name']}/holds", "")
            return plan
        wait.for_(late)


def _follow(store: Store, launch: Launch, sign: str, wait: "_Patience") -> dict[str, Any]:
    """Wait for a plan that has the own sign, and holds."""
    while True:
        if store.check(["plan"]):
            plan = json.loads(store.get("plan"))
            members = plan["members"]
            if launch.rank < len(members) and members[launch.rank]["sign"] == sign:
                store.set(f"{plan['name']}/seen/{launch.rank}", "")
                if store.check([f"{plan['name']}/holds"]):
                    return plan
            else:
                _require_hope(store)
        wait.for_([0])


def _require_hope(store: Store) -> None:
    """Raise if the attempt before this one ended by what this one would meet again: launchers do not ask."""
    if not store.check(["plan"]):
        return
    cause = f"{json.loads(store.get('plan'))['name']}/cause"
    if store.check([cause]) and (said := json.loads(store.get(cause)))["lasts"]:
        raise ParallelError(f"another attempt would end as the one before: {said['message']}")


class _Patience:
    """Look less and less often, and not for ever."""

    def __init__(self, launch: Launch, timeout: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.launch, self.timeout, self.clock = launch, timeout, clock
        self.end = clock() + timeout
        self.pause = SECONDS_BETWEEN_LOOKS

    def for_(self, late: list[int]) -> None:
        """Sleep a moment, or raise."""
        if self.clock() > self.end:
            launch = self.launch
            whom = f"processes {late}" if launch.rank == 0 else "the others"
            raise ParallelError(
                f"process {launch.rank} of {launch.world_size} waited {self.timeout:g} s for {whom} at "
                f"{launch.address}:{launch.port}; every machine must start its processes within that time "
                "(parallel.timeout), with the same address and port"
            )
        time.sleep(self.pause)
        self.pause = min(1.5 * self.pause, MOST_SECONDS_BETWEEN_LOOKS)


def open_store(launch: Launch, timeout: float, *, serve: bool = False) -> TCPStore:
    """Return a connection to the store of the job, made by this process if it is the one that serves.

    Raises
    ------
    ParallelError
        If it cannot be reached.
    """
    if launch.address is None or launch.port is None:
        raise ParallelError(
            "nothing says where the processes of this job meet; torchrun sets MASTER_ADDR and MASTER_PORT, and so must "
            "whoever starts them otherwise"
        )
    try:
        return TCPStore(
            launch.address,
            launch.port,
            is_master=serve and launch.rank == 0 and not launch.has_store,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
        )
    except RuntimeError as fault:
        raise ParallelError(
            f"process {launch.rank} of {launch.world_size} cannot reach {launch.address}:{launch.port}, where the "
            f"processes of the job meet, within {timeout:g} s: {str(fault).splitlines()[0]}. Start the first machine "
            "too, and let machines of one job reach each other's ports"
        ) from fault
