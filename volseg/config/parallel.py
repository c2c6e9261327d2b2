"""Configure and plan the processes and devices of a training, from numbers only.

The rest of the config does not depend on the devices: ``patch.batch`` is the batch of one optimizer step on any number
of GPUs. So a run can resume on other devices.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from volseg.config.base import ConfigModel, Count
from volseg.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class MeshPlan:
    """Processes of a training, and their shares of the computation."""

    data: int = 1
    """Replicas of the network; each computes its share of every batch."""
    spatial: int = 1
    """Slabs of each volume."""
    pipeline: int = 1
    """Devices of each process, over which the layers are distributed."""
    data_processes: int = 1
    """Processes along ``data``; fewer than replicas if each process computes several replicas in turn."""
    spatial_processes: int = 1
    """Processes along ``spatial``: one per slab, or one for all slabs."""
    is_open: bool = False
    """Whether the config allows either replicas or slabs, so that samples too large for a GPU may be cut."""

    @property
    def num_processes(self) -> int:
        """Processes of the job."""
        return self.data_processes * self.spatial_processes

    @property
    def is_cut_in_process(self) -> bool:
        """Whether one process holds all slabs of a volume on its device."""
        return self.spatial > self.spatial_processes


class ParallelConfig(ConfigModel):
    """Use of several devices by one training; for one device see ``training.kernels``.

    ``data`` and ``spatial`` count processes with one GPU each, ``pipeline`` counts GPUs per process. The number of
    processes determines the values that are left out.
    """

    # The word auto is accepted in place of keys: a pattern applies to strings only, properties to mappings.
    model_config = ConfigDict(json_schema_extra={"type": ["object", "string"], "pattern": "^(auto)$"})

    data: Count | None = None
    """Replicas of the network; they share the samples of every batch."""
    spatial: Count | None = None
    """Slabs per volume."""
    pipeline: Count | None = None
    """Stages of the network, one GPU each."""
    strategy: Literal["none", "auto", "spatial", "pipeline"] = "none"
    """How to distribute a model if the numbers above leave it open: ``spatial`` cuts volumes over all processes;
    ``auto`` (or ``parallel: auto``) chooses the strategy estimated to be fastest on the GPUs, replicas included."""
    devices: Count | tuple[str, ...] | None = None
    """Number or names of one process's GPUs (``cpu`` may be repeated); null uses all visible GPUs."""
    split_size: Count | Literal["auto"] | None = None
    """Samples per micro-batch of a pipeline."""
    on_unsupported: Literal["raise", "gather"] = "raise"
    """Action at an operator without a sharded form: raise an error, or gather the shards."""
    checkpoint: Literal["all", "tiled"] | Count | None = None
    """Activations of the spatial strategy to recompute instead of storing: all, or a number of finest levels; ``tiled``
    recomputes all, and inputs of large convolutions tile by tile, with the least memory."""
    chosen_for: Count | None = None
    """GPUs that ``parallel: auto`` could choose from; it may use fewer. ``volseg train`` writes the number into the run
    folder, and ``--resume`` on as many GPUs keeps the choice."""
    timeout: Annotated[float, Field(gt=0)] = 600.0
    """Seconds that processes wait for a process that does not respond."""
    on_oom: Literal["raise", "replan"] = "raise"
    """Action when a training step runs out of memory: ``raise`` ends the run and names settings that fit; ``replan``
    continues from the last checkpoint with the next settings that fit the devices, once per run."""

    @property
    def model_strategy(self) -> Literal["none", "auto", "spatial", "pipeline"]:
        """Strategy that distributes one replica of the network."""
        if (self.pipeline or 1) > 1:
            return "pipeline"
        return "spatial" if (self.spatial or 1) > 1 else self.strategy

    @property
    def is_on_one_device(self) -> bool:
        """Whether each process has one device."""
        return self.devices == 1

    @property
    def may_cut(self) -> bool:
        """Whether volumes or the network are cut, or may be after an estimate or for a number of processes."""
        if self.model_strategy == "spatial" and (self.spatial or 1) == 1:
            return not (self.is_on_one_device or self.spatial == 1)
        return self.model_strategy != "none"

    @property
    def only_chooses_kernels(self) -> bool:
        """Whether one process would neither cut nor recompute; ``training.kernels`` covers this case."""
        plain = self.checkpoint is None and self.on_unsupported == "raise"
        return self.strategy == "spatial" and self.num_gpus == 1 and self.is_on_one_device and plain

    @property
    def num_gpus(self) -> int:
        """GPUs of the configured mesh; 1 by default."""
        return (self.data or 1) * (self.spatial or 1) * (self.pipeline or 1)

    @model_validator(mode="before")
    @classmethod
    def _take_auto_for_its_strategy(cls, values: Any) -> Any:
        """Read ``parallel: auto`` as ``strategy: auto`` with defaults."""
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
                f"pipeline: {self.pipeline} distributes layers over devices, but spatial: {self.spatial} (strategy: "
                f"{self.strategy}) cuts volumes; a network supports only one of the two, so leave out the other"
            )
        if cuts and self.strategy == "pipeline":
            raise ValueError(
                f"spatial: {self.spatial} cuts volumes, but strategy: pipeline does not; leave one of them out"
            )
        alone = self.devices in (None, 1)
        if not alone and (self.num_gpus > 1):
            raise ValueError(
                f"devices: {self.devices} applies to a single process, but data: {self.data}, spatial: {self.spatial}, "
                f"pipeline: {self.pipeline} configure a mesh of {self.num_gpus} GPUs; leave out devices"
            )
        return self


def plan_mesh(parallel: ParallelConfig, num_processes: int, *, batch_size: int, fixed_order: bool) -> MeshPlan:
    """Return the mesh of a training on ``num_processes``.

    Parameters
    ----------
    parallel : ParallelConfig
        Configured strategy and numbers.
    num_processes : int
        Number of started processes.
    batch_size : int
        Samples of a batch, shared by the replicas.
    fixed_order : bool
        Whether every sum has a fixed order (``training.deterministic``); then fewer processes can compute the same
        bits.

    Raises
    ------
    ConfigError
        If the configured mesh does not fit the number of processes.
    """
    if num_processes > 1 and parallel.devices not in (None, 1):
        raise ConfigError(
            f"{num_processes} processes were started, so parallel.devices must be 1 or left out, got "
            f"{parallel.devices}; for more than one device per process, set parallel.pipeline"
        )
    data, spatial, is_open = _fill(parallel, num_processes, batch_size)
    if data > 1 and parallel.model_strategy == "auto":
        raise ConfigError(
            f"parallel.strategy: auto distributes a single replica, but there are {data}; leave out strategy, or set "
            "parallel.spatial or parallel.pipeline"
        )
    if parallel.model_strategy == "pipeline" and num_processes > 1 and parallel.pipeline is None:
        raise ConfigError(
            f"{num_processes} processes were started, but parallel.strategy: pipeline also needs the number of devices "
            "per process; set parallel.pipeline to it"
        )
    if data > batch_size:
        raise ConfigError(
            f"{data} replicas (parallel.data) cannot share patch.batch: {batch_size}, since each needs a sample; set "
            f"parallel.data to at most {batch_size}, so that the other processes cut volumes, or increase patch.batch"
        )
    if parallel.checkpoint is not None and parallel.model_strategy == "none" and spatial == 1 and not is_open:
        raise ConfigError(
            f"parallel.checkpoint: {parallel.checkpoint} recomputes activations of the spatial strategy, which does "
            "not run here; set parallel.strategy: spatial, with parallel.devices: 1 (one process) or parallel.spatial: "
            "1 (replicas) if volumes are not cut, or leave out parallel.checkpoint"
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
    """Return the number of processes that ``volseg train`` starts.

    Parameters
    ----------
    parallel : ParallelConfig
        Configured strategy and numbers.
    num_gpus : int or None
        ``--gpus``: total number of this machine's GPUs to use; None: the size of the mesh.
    visible : int or None
        Number of visible GPUs; None if the processes share the CPU.
    batch_size, fixed_order
        See `plan_mesh`.

    Raises
    ------
    ConfigError
        If too few GPUs are visible, or their number does not fit the mesh.
    """
    wanted, per_process = num_gpus or parallel.num_gpus, parallel.pipeline or 1
    if visible is not None and visible < wanted and (num_gpus is not None or wanted > 1):
        if num_gpus is None and fixed_order:
            counts = (count for count in range(max(visible, 1) // per_process, 0, -1))
            for count in counts:
                if _may_spread(parallel.data or 1, parallel.spatial or 1, count):
                    return count
        source = f"--gpus {wanted}" if num_gpus is not None else f"the config's mesh ({_describe(parallel)})"
        if not visible:
            raise ConfigError(
                f"{source} needs GPUs, but none is visible; leave it out to train in one process on the CPU, or let "
                "processes share the CPU by --set device=cpu, which is for trials"
            )
        fewer = f"{source} needs {wanted} GPUs, but only {visible} are visible"
        if num_gpus is not None:
            raise ConfigError(f"{fewer}; choose at most {visible}")
        raise ConfigError(
            f"{fewer}; set parallel.data and parallel.spatial to null and choose --gpus {visible}, or set "
            "training.deterministic: true, with which fewer GPUs may compute the same bits"
        )
    if wanted % per_process:
        raise ConfigError(
            f"--gpus {wanted} is not a multiple of parallel.pipeline: {per_process}, the GPUs of each process; choose "
            "a multiple"
        )
    count = wanted // per_process
    if count > 1 or num_gpus is not None:
        plan_mesh(parallel, count, batch_size=batch_size, fixed_order=fixed_order)
    return count


def _describe(parallel: ParallelConfig) -> str:
    return f"data: {parallel.data}, spatial: {parallel.spatial}, pipeline: {parallel.pipeline}"


def _fill(parallel: ParallelConfig, num_processes: int, batch_size: int) -> tuple[int, int, bool]:
    """Return the numbers of replicas and slabs, and whether the choice between the two was open."""
    data, spatial = parallel.data, parallel.spatial
    if num_processes == 1 or (data is not None and spatial is not None):
        return data or 1, spatial or 1, False
    if data is None and spatial is None:
        if parallel.model_strategy == "pipeline":
            return num_processes, 1, False
        if parallel.model_strategy in ("spatial", "auto"):
            return 1, num_processes, False
        data = max(count for count in range(1, num_processes + 1) if num_processes % count == 0 and count <= batch_size)
        return data, num_processes // data, True
    given, filled = ("data", data) if data is not None else ("spatial", spatial)
    assert filled is not None
    if num_processes % filled:
        # The mesh is complete in the config; fewer processes may compute it.
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
    """Return the numbers of processes along data and along spatial."""
    if data * spatial == num_processes:
        return data, spatial
    if fixed_order:
        for along_spatial in (spatial, 1):
            along_data, left = divmod(num_processes, along_spatial)
            if not left and along_data and _halves_to(data, along_data):
                return along_data, along_spatial
    fewer = (
        "with training.deterministic: true, fewer processes may compute the same"
        if not fixed_order
        else "in deterministic mode, fewer may compute the same: 1, 1/2, 1/4 ... of the replicas, or 1 for all slabs"
    )
    raise ConfigError(
        f"parallel.data: {data} times parallel.spatial: {spatial} needs {data * spatial} processes, but there are "
        f"{num_processes}; start as many with volseg train or torchrun, or set one of the two to null to derive it "
        f"from the number of processes; {fewer}"
    )


def _halves_to(replicas: int, processes: int) -> bool:
    """Return whether ``processes`` can sum over ``replicas`` in the tree order of one process per replica."""
    rounds, left = divmod(replicas, processes)
    return processes == 1 or (not left and rounds.bit_count() == 1)
