"""Rendezvous of a job's processes in a store that may contain keys of an earlier attempt.

A launcher that restarts its processes keeps its store, and with it the addresses of the dead processes. The launcher's
restart count does not separate attempts: a launcher on another machine that rejoins because of this one does not count.
So rank 0 chooses an unused name, the prefix of all keys of the attempt.

Rank 0 must not mistake a dead process for a member. Each other process writes a random *sign*. Rank 0 writes a plan:
the name, with the signs that it sees. Every process whose sign is in the plan confirms the plan. When all signs are
confirmed, the name is final; an unconfirmed sign may belong to a dead process, so rank 0 collects signs again.
"""

import json
import time
import uuid
from collections.abc import Mapping
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
    """Result of a rendezvous."""

    store: Store
    """Store for this attempt only."""
    name: str
    restarts: int
    """Number of earlier attempts."""
    members: tuple[Mapping[str, Any], ...]
    """Description of each process, as passed by that process."""


def join_rendezvous(
    store: Store, launch: Launch, about: Mapping[str, Any], timeout: float, *, first: bool = True
) -> Rendezvous:
    """Wait until every process of this attempt has arrived.

    Parameters
    ----------
    store
        Shared by the processes.
    launch
        Rank and address of this process.
    about
        Plain values that the other processes receive.
    timeout
        Seconds to wait.
    first
        Whether this is the process's first rendezvous; a later one is not a new attempt.

    Raises
    ------
    ParallelError
        Names the missing processes.
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
    """Write plans until every sign in the plan is confirmed."""
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
    """Wait for a plan that contains this process's sign and is final."""
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
    """Raise if the previous attempt failed for a cause that persists: launchers restart regardless."""
    if not store.check(["plan"]):
        return
    cause = f"{json.loads(store.get('plan'))['name']}/cause"
    if store.check([cause]) and (said := json.loads(store.get(cause))).get("lasts"):
        raise ParallelError(f"a new attempt would fail for the same reason as the previous one: {said['message']}")


class _Patience:
    """Poll with growing intervals up to a timeout."""

    def __init__(self, launch: Launch, timeout: float) -> None:
        self.launch, self.timeout, self.pause = launch, timeout, SECONDS_BETWEEN_LOOKS
        self.end = time.monotonic() + timeout

    def for_(self, late: list[int]) -> None:
        """Sleep for one interval; raise after the timeout."""
        if time.monotonic() > self.end:
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
    """Connect to the job's store; rank 0 creates the store if the launcher keeps none.

    Raises
    ------
    ParallelError
        If the store cannot be reached.
    """
    if launch.address is None or launch.port is None:
        raise ParallelError(
            "no rendezvous address is set; torchrun sets MASTER_ADDR and MASTER_PORT, and any other launcher "
            "must set both"
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
            f"process {launch.rank} of {launch.world_size} cannot reach the job's store at "
            f"{launch.address}:{launch.port} within {timeout:g} s: {str(fault).splitlines()[0]}. Start the first "
            "machine too, and open the ports between the machines of the job"
        ) from fault
