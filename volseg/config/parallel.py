"""On how many devices a network trains, and who of them does what: planned here, on numbers alone.

What is trained is said by the rest of the config: ``patch.batch`` is the batch of one optimizer step on however many
GPUs. Hence the same run may go on elsewhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from volseg.config.base import ConfigModel, Count
from volseg.errors import ConfigError

__all__ = ["MeshPlan", "ParallelConfig", "choose_num_processes", "plan_mesh"]


@dataclass(frozen=True, kw_only=True)
class MeshPlan:
    """Which processes a training has, and what each of them computes."""

    data: int = 1
    """Replicas of the network; each computes its share of every batch."""
    spatial: int = 1
    """Slabs of each volume."""
    pipeline: int = 1
    """Devices of each process, over which the layers lie."""
    data_processes: int = 1
    """Processes along ``data``; fewer than replicas where one computes several of them, one after the other."""
    spatial_processes: int = 1
    """Processes along ``spatial``; as many as slabs, or one that holds all of them."""
    is_open: bool = False
    """Whether the config leaves the choice open, so that a sample that fits no GPU is to be cut instead."""

    @property
    def num_processes(self) -> int:
        """Processes of the job."""
        return self.data_processes * self.spatial_processes

    @property
    def is_cut_in_process(self) -> bool:
        """Whether one process holds several slabs of a volume on its device, as others would hold one each."""
        return self.spatial > self.spatial_processes


class ParallelConfig(ConfigModel):
    """How one training uses several devices; of one, ``training.kernels`` says how.

    ``data`` and ``spatial`` count processes, one GPU each, and ``pipeline`` the GPUs of each process. What is left out
    is chosen by the number of processes.
    """

    words: ClassVar[Sequence[str]] = ("auto",)

    data: Count | None = None
    """Replicas of the network, which share the samples of every batch."""
    spatial: Count | None = None
    """Slabs into which every volume is cut."""
    pipeline: Count | None = None
    """Stages of the network, each on a GPU."""
    strategy: Literal["none", "auto", "spatial", "pipeline"] = "none"
    """How a model is laid over devices where the numbers above do not say it: ``spatial`` cuts over all processes;
    ``auto`` (or ``parallel: auto``) takes what is forecast to be fastest on the GPUs, replicas among it."""
    devices: Count | tuple[str, ...] | None = None
    """GPUs of one process, or their names (``cpu`` may be named several times); null takes every visible one."""
    split_size: Count | Literal["auto"] | None = None
    """Samples per micro-batch of a pipeline."""
    on_unsupported: Literal["raise", "gather"] = "raise"
    """What happens at an operator without a sharded form."""
    checkpoint: Literal["all", "tiled"] | Count | None = None
    """Activations of the spatial strategy to recompute instead of keep: all, or those of that many finest levels;
    ``tiled`` recomputes all, and the inputs of large convolutions tile by tile, which takes least memory."""
    chosen_for: Count | None = None
    """GPUs for which ``parallel: auto`` chose the rest, written by ``volseg train`` into the run folder: fewer may be
    the fastest. ``--resume`` on as many goes on as the run was begun."""
    timeout: Annotated[float, Field(gt=0)] = 600.0
    """Seconds after which processes no longer wait for one that does not answer."""
    on_oom: Literal["raise", "replan"] = "raise"
    """What follows a training step that is out of memory: ``raise`` ends the run and says what would fit; ``replan``
    goes on from the last checkpoint in the next way that fits the same devices, once in a run."""

    @property
    def model_strategy(self) -> Literal["none", "auto", "spatial", "pipeline"]:
        """How one replica of the network is laid over devices."""
        if (self.pipeline or 1) > 1:
            return "pipeline"
        return "spatial" if (self.spatial or 1) > 1 else self.strategy

    @property
    def is_on_one_device(self) -> bool:
        """Whether each process has one device."""
        return self.devices == 1

    @property
    def may_cut(self) -> bool:
        """Whether volumes or the network are cut, or may be, by what is found out or by the number of processes."""
        if self.model_strategy == "spatial" and (self.spatial or 1) == 1:
            return not (self.is_on_one_device or self.spatial == 1)
        return self.model_strategy != "none"

    @property
    def only_chooses_kernels(self) -> bool:
        """Whether one process would cut nothing and recompute nothing: what ``training.kernels`` is for."""
        plain = self.checkpoint is None and self.on_unsupported == "raise"
        return self.strategy == "spatial" and self.num_gpus == 1 and self.is_on_one_device and plain

    @property
    def num_gpus(self) -> int:
        """GPUs that the mesh asks for; 1 where it asks for none."""
        return (self.data or 1) * (self.spatial or 1) * (self.pipeline or 1)

    @model_validator(mode="before")
    @classmethod
    def _take_auto_for_its_strategy(cls, values: Any) -> Any:
        """Take ``parallel: auto`` for a section that leaves all else open."""
        return {"strategy": "auto"} if values == "auto" else values

    @model_validator(mode="after")
    def _split_size_belongs_to_a_pipeline(self) -> "ParallelConfig":
        if self.split_size is not None and self.model_strategy in ("none", "spatial"):
            raise ValueError(f"split_size belongs to strategy: pipeline (or auto), got strategy: {self.model_strategy}")
        return self

    @model_validator(mode="after")
    def _says_one_thing(self) -> "ParallelConfig":
        cuts, stages = (self.spatial or 1) > 1, (self.pipeline or 1) > 1
        if stages and (cuts or self.strategy == "spatial"):
            raise ValueError(
                f"pipeline: {self.pipeline} lays layers over devices, and spatial: {self.spatial} (strategy: "
                f"{self.strategy}) cuts volumes: one network takes one of them; leave the other out, both go with data"
            )
        if cuts and self.strategy == "pipeline":
            raise ValueError(
                f"spatial: {self.spatial} cuts volumes, strategy: pipeline does not; leave one of them out"
            )
        alone = self.devices in (None, 1)
        if not alone and (self.num_gpus > 1):
            raise ValueError(
                f"devices: {self.devices} belongs to a single process, and data: {self.data}, spatial: {self.spatial}, "
                f"pipeline: {self.pipeline} say where all of them compute; leave out devices"
            )
        return self


def plan_mesh(
    parallel: ParallelConfig, num_processes: int, *, batch_size: int, fixed_order: bool, fits: bool = True
) -> MeshPlan:
    """Return who does what in a training of ``num_processes``.

    Parameters
    ----------
    parallel : ParallelConfig
        What is asked for.
    num_processes : int
        That were started.
    batch_size : int
        Samples of a batch, which the replicas share.
    fixed_order : bool
        Whether everything is summed in one order (``training.deterministic``); then fewer processes may compute what
        more would, to the same bits.
    fits : bool
        Whether a GPU can train on its samples whole; where the config leaves it open, volumes are cut otherwise.

    Raises
    ------
    ConfigError
        If so many processes cannot do it.
    """
    if num_processes > 1 and parallel.devices not in (None, 1):
        raise ConfigError(
            f"{num_processes} processes were started, which need one device each (leave out parallel.devices, or 1), "
            f"got {parallel.devices}; what a process has several devices for is parallel.pipeline"
        )
    data, spatial, is_open = _fill(parallel, num_processes, batch_size, fits)
    if data > 1 and parallel.model_strategy == "auto":
        raise ConfigError(
            "parallel.strategy: auto chooses for a model of one process, and parallel.data has several; leave out "
            "strategy, or set parallel.spatial or parallel.pipeline"
        )
    if parallel.model_strategy == "pipeline" and num_processes > 1 and parallel.pipeline is None:
        raise ConfigError(
            f"{num_processes} processes were started, and parallel.strategy: pipeline does not say how many devices "
            "each of them has; set parallel.pipeline to that number"
        )
    if data > batch_size:
        raise ConfigError(
            f"{data} replicas (parallel.data) cannot share patch.batch: {batch_size}: each needs a sample; set "
            f"parallel.data to {batch_size} or less, the rest of the processes cuts volumes, or enlarge patch.batch"
        )
    if parallel.checkpoint is not None and parallel.model_strategy == "none" and spatial == 1 and not is_open:
        raise ConfigError(
            f"parallel.checkpoint: {parallel.checkpoint} recomputes what the spatial strategy keeps, and no volume is "
            "run by it here; set parallel.strategy: spatial, with parallel.devices: 1 (one process) or "
            "parallel.spatial: 1 (replicas) where volumes stay whole, or leave out parallel.checkpoint"
        )
    along_data, along_spatial = _spread(data, spatial, num_processes, fixed_order)
    return MeshPlan(
        data=data,
        spatial=spatial,
        pipeline=parallel.pipeline or 1,
        data_processes=along_data,
        spatial_processes=along_spatial,
        is_open=is_open,
    )


def choose_num_processes(
    parallel: ParallelConfig, num_gpus: int | None, visible: int | None, *, batch_size: int, fixed_order: bool
) -> int:
    """Return how many processes ``volseg train`` starts.

    Parameters
    ----------
    parallel : ParallelConfig
        What is asked for.
    num_gpus : int or None
        ``--gpus``: in all, of this machine; None for as many as the mesh has.
    visible : int or None
        GPUs that there are; None where the processes are to share the CPU.
    batch_size, fixed_order
        See `plan_mesh`.

    Raises
    ------
    ConfigError
        If there are fewer.
    """
    wanted, per_process = num_gpus or parallel.num_gpus, parallel.pipeline or 1
    if visible is not None and visible < wanted and (num_gpus is not None or wanted > 1):
        if num_gpus is None and fixed_order:
            counts = (count for count in range(max(visible, 1) // per_process, 0, -1))
            for count in counts:
                if _may_spread(parallel.data or 1, parallel.spatial or 1, count):
                    return count
        asks = f"--gpus {wanted} asks" if num_gpus is not None else f"the config's mesh ({_describe(parallel)}) asks"
        if not visible:
            raise ConfigError(
                f"{asks} for GPUs, and none is visible; leave that out and one process trains on the CPU, or have "
                "processes share the CPU by --set device=cpu, which is for trying things out"
            )
        raise ConfigError(
            f"{asks} for more than the {visible} GPU(s) that are visible; set parallel.data and parallel.spatial to "
            "null and the number of GPUs decides, or with training.deterministic: true fewer compute the same bits"
        )
    if wanted % per_process:
        raise ConfigError(
            f"--gpus {wanted} is no multiple of parallel.pipeline: {per_process}, the GPUs of each process; choose one "
            "that is"
        )
    count = wanted // per_process
    if count > 1 or num_gpus is not None:
        plan_mesh(parallel, count, batch_size=batch_size, fixed_order=fixed_order)
    return count


def _describe(parallel: ParallelConfig) -> str:
    return f"data: {parallel.data}, spatial: {parallel.spatial}, pipeline: {parallel.pipeline}"


def _fill(parallel: ParallelConfig, num_processes: int, batch_size: int, fits: bool) -> tuple[int, int, bool]:
    """Return replicas, slabs, and whether the choice between them was open."""
    data, spatial = parallel.data, parallel.spatial
    if num_processes == 1 or (data is not None and spatial is not None):
        return data or 1, spatial or 1, False
    if data is None and spatial is None:
        if parallel.model_strategy == "pipeline":
            return num_processes, 1, False
        if parallel.model_strategy in ("spatial", "auto"):
            return 1, num_processes, False
        most = max(count for count in range(1, num_processes + 1) if num_processes % count == 0 and count <= batch_size)
        data = most if fits else 1
        return data, num_processes // data, True
    given, filled = ("data", data) if data is not None else ("spatial", spatial)
    assert filled is not None
    if num_processes % filled:
        # A mesh that is computed by fewer processes is given whole.
        return data or 1, spatial or 1, False
    rest = num_processes // filled
    if given == "data":
        return filled, rest if parallel.model_strategy != "pipeline" else 1, False
    return rest, filled, False


def _may_spread(data: int, spatial: int, num_processes: int) -> bool:
    try:
        _spread(data, spatial, num_processes, True)
    except ConfigError:
        return False
    return True


def _spread(data: int, spatial: int, num_processes: int, fixed_order: bool) -> tuple[int, int]:
    """Return the processes along data and along spatial."""
    if data * spatial == num_processes:
        return data, spatial
    if fixed_order:
        for along_spatial in (spatial, 1):
            along_data, left = divmod(num_processes, along_spatial)
            if not left and along_data and _halves_to(data, along_data):
                return along_data, along_spatial
    fewer = (
        "fewer processes may compute that with training.deterministic: true"
        if not fixed_order
        else "in deterministic mode fewer may compute that: of the replicas 1, or a half, a quarter ...; of the slabs 1"
    )
    raise ConfigError(
        f"parallel.data: {data} times parallel.spatial: {spatial} takes {data * spatial} processes, and there are "
        f"{num_processes}; start as many (volseg train does, or torchrun), or set one of the two to null, which takes "
        f"what is left; {fewer}"
    )


def _halves_to(replicas: int, processes: int) -> bool:
    """Tell whether ``processes`` can sum over ``replicas`` as that many would: by one tree."""
    rounds, left = divmod(replicas, processes)
    return processes == 1 or (not left and rounds.bit_count() == 1)
