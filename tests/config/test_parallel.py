"""The mesh follows from the config and the number of processes; a contradiction gives a remedy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from volseg.config.parallel import MeshPlan, ParallelConfig, choose_num_processes, plan_mesh
from volseg.config.schema import ExperimentConfig
from volseg.errors import ConfigError


def plan(processes, batch=4, fixed_order=False, **parallel):
    made = plan_mesh(ParallelConfig.model_validate(parallel), processes, batch_size=batch, fixed_order=fixed_order)
    assert made.num_processes == processes
    return made.data, made.spatial


@pytest.mark.parametrize(
    ("parallel", "processes", "data", "spatial"),
    [
        ({}, 1, 1, 1),
        ({}, 4, 4, 1),
        ({}, 3, 3, 1),
        ({}, 8, 4, 2),  # five cannot share four samples: the rest cuts
        ({}, 5, 1, 5),
        ({"strategy": "spatial"}, 4, 1, 4),
        ({"strategy": "auto"}, 4, 1, 4),
        ({"strategy": "spatial", "data": 2}, 4, 2, 2),
        ({"data": 2, "spatial": 2}, 4, 2, 2),
        ({"data": 2}, 2, 2, 1),
        ({"data": 2}, 4, 2, 2),
        ({"spatial": 2}, 4, 2, 2),
        ({"spatial": 4}, 4, 1, 4),
        ({"pipeline": 2}, 2, 2, 1),
        ({"pipeline": 2, "data": 2}, 2, 2, 1),
        ({"strategy": "pipeline", "pipeline": 2}, 2, 2, 1),
        ({"strategy": "spatial", "devices": 1}, 2, 1, 2),
        ({"data": 1, "spatial": 1}, 1, 1, 1),
    ],
)
def test_what_is_left_open_is_filled(parallel, processes, data, spatial):
    assert plan(processes, **parallel) == (data, spatial)


def test_activations_are_recomputed_by_the_spatial_strategy_or_where_the_choice_is_open():
    assert plan(1, checkpoint="all", strategy="spatial", devices=1) == (1, 1)
    assert plan(2, checkpoint="all", strategy="spatial", data=2, spatial=1) == (2, 1)
    assert plan(2, checkpoint="all", spatial=2) == (1, 2)
    assert plan(4, checkpoint="all") == (4, 1)


@pytest.mark.parametrize(
    ("parallel", "processes", "spread"),
    [
        ({"data": 4}, 4, (4, 1)),
        ({"data": 4}, 2, (2, 1)),
        ({"data": 4}, 1, (1, 1)),
        ({"data": 3}, 1, (1, 1)),
        ({"data": 2, "spatial": 2}, 2, (1, 2)),
        ({"data": 2, "spatial": 2}, 1, (1, 1)),
        ({"data": 4, "spatial": 3}, 6, (2, 3)),
        ({"data": 4, "spatial": 3}, 2, (2, 1)),
    ],
)
def test_fewer_processes_compute_the_same_in_one_order(parallel, processes, spread):
    made = plan_mesh(ParallelConfig.model_validate(parallel), processes, batch_size=4, fixed_order=True)
    assert (made.data, made.spatial) == (parallel["data"], parallel.get("spatial", 1))
    assert (made.data_processes, made.spatial_processes) == spread
    assert made.is_cut_in_process == (made.spatial > spread[1])
    if processes > 1:
        with pytest.raises(ConfigError, match=r"with training\.deterministic: true, fewer processes may"):
            plan(processes, **parallel, **({} if "spatial" in parallel else {"spatial": 2}))


@pytest.mark.parametrize(
    ("parallel", "processes", "fixed_order", "words"),
    [
        ({"data": 2, "spatial": 2}, 3, False, "needs 4 processes, but there are 3; start as many"),
        ({"data": 2}, 1, False, "start as many with volseg train or torchrun"),
        ({"data": 3}, 2, True, "1, 1/2, 1/4 ... of the replicas"),
        ({"spatial": 2}, 16, False, "8 replicas .* cannot share patch.batch: 4"),
        ({"data": 2, "strategy": "auto"}, 2, False, "auto distributes a single replica, but there are 2"),
        ({"strategy": "pipeline"}, 2, False, r"needs the number of devices per process; set parallel\.pipeline"),
        ({"devices": 2}, 2, False, r"parallel\.devices must be 1 or left out"),
        ({"devices": ("cpu", "cpu")}, 2, False, r"parallel\.devices must be 1 or left out"),
        ({"checkpoint": "all"}, 1, False, r"which does not run here; set parallel\.strategy: spatial"),
        ({"checkpoint": 1, "data": 2}, 2, False, "the spatial strategy, which does not run here"),
    ],
)
def test_what_processes_cannot_do_says_the_way_out(parallel, processes, fixed_order, words):
    with pytest.raises(ConfigError, match=words):
        plan_mesh(ParallelConfig.model_validate(parallel), processes, batch_size=4, fixed_order=fixed_order)


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        ({"pipeline": 2, "spatial": 2}, "a network supports only one of the two"),
        ({"pipeline": 2, "strategy": "spatial"}, "a network supports only one of the two"),
        ({"spatial": 2, "strategy": "pipeline"}, "leave one of them out"),
        ({"data": 2, "devices": 2}, "leave out devices"),
        ({"pipeline": 2, "devices": 2}, "leave out devices"),
        ({"spatial": 2, "split_size": 1}, "split_size belongs to strategy: pipeline"),
        ({"data": 0}, "greater than or equal to 1"),
        ({"timeout": 0}, "greater than 0"),
        ({"replicas": 2}, "Extra inputs"),
    ],
)
def test_contradictions_are_refused(parallel, words):
    with pytest.raises(ValueError, match=words):
        ParallelConfig.model_validate(parallel)


def config(**sections):
    return ExperimentConfig.model_validate(
        {
            "name": "a",
            "data": {"root": "x"},
            "patch": {"size": (8, 8, 8), "batch": 2},
            "network": {"name": "VNet"},
            "optimizer": {"name": "SGD", "lr": 0.1},
            **sections,
        }
    )


KERNELS = r"training\.kernels is {}, but parallel\.strategy: {} supports only {}"


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"parallel": {"data": 3}}, r"parallel\.data is 3, but patch\.batch is 2"),
        *(
            ({"parallel": {"strategy": way}, "training": {"kernels": kernels}}, KERNELS.format(kernels, way, takes))
            for kernels, way, takes in (
                ("torch", "spatial", "auto or fast"),
                ("fast", "pipeline", "auto or torch"),
                ("fast", "auto", "auto"),
            )
        ),
    ],
)
def test_a_batch_and_kernels_that_do_not_suit_the_devices_are_refused(sections, words):
    with pytest.raises(ValueError, match=words):
        config(**sections)


def test_kernels_that_a_cut_does_not_run_are_refused_whoever_cuts():
    with pytest.raises(ValueError, match=r"training\.kernels is torch, but parallel\.strategy: spatial supports"):
        config(parallel={"spatial": 2}, training={"kernels": "torch"})
    filled = config(training={"kernels": "torch"})
    with pytest.raises(ConfigError, match=r"parallel\.spatial: 3, as the processes require"):
        filled.with_mesh(filled.mesh(3))
    assert filled.with_mesh(filled.mesh(2)).parallel.data == 2


def count(num_gpus, visible, fixed_order=False, batch=4, **parallel):
    described = ParallelConfig.model_validate(parallel)
    return choose_num_processes(described, num_gpus, visible, batch_size=batch, fixed_order=fixed_order)


def test_volseg_train_starts_the_processes_of_the_mesh():
    assert count(None, 8) == 1
    assert count(None, 8, data=2, spatial=2) == 4
    assert count(None, 8, data=2, pipeline=2) == 2
    assert count(None, 8, strategy="spatial") == 1
    assert count(4, 8) == 4
    assert count(4, 8, pipeline=2) == 2
    assert count(2, None, data=2) == 2  # on a CPU


@pytest.mark.parametrize(
    ("num_gpus", "parallel", "source"),
    [(1, {}, "--gpus 1"), (2, {}, "--gpus 2"), (None, {"data": 2}, r"mesh \(data: 2, .*\)")],
)
def test_without_gpus_nothing_is_tried_out_on_a_cpu_unless_told(num_gpus, parallel, source):
    with pytest.raises(ConfigError, match=f"{source} needs GPUs, but none is visible; .* by --set device=cpu"):
        count(num_gpus, 0, **parallel)
    assert count(None, 0) == 1
    assert count(None, 0, data=4, spatial=2, fixed_order=True) == 1  # which computes the same bits


def test_too_few_gpus_are_refused_or_compute_the_same_bits():
    with pytest.raises(ConfigError, match=r"--gpus 4 needs 4 GPUs, but only 2 are visible; choose at most 2"):
        count(4, 2)
    with pytest.raises(ConfigError, match=r"mesh \(data: 4, spatial: None, .* 4 GPUs, but only 2 are .* --gpus 2"):
        count(None, 2, data=4)
    assert count(None, 2, data=4, fixed_order=True) == 2
    assert count(None, 3, data=4, fixed_order=True) == 2
    assert count(None, 1, data=3, spatial=2, fixed_order=True) == 1
    with pytest.raises(ConfigError, match=r"--gpus 3 is not a multiple of parallel\.pipeline: 2"):
        count(3, 4, pipeline=2)
    with pytest.raises(ConfigError, match="needs 4 processes, but there are 2"):
        count(2, 4, data=4, spatial=1)


counts = st.none() | st.integers(1, 4)


@given(data=counts, spatial=counts, processes=st.integers(1, 12), batch=st.integers(1, 6), fixed_order=st.booleans())
def test_every_plan_gives_each_process_a_place(data, spatial, processes, batch, fixed_order):
    try:
        made = plan_mesh(
            ParallelConfig(data=data, spatial=spatial), processes, batch_size=batch, fixed_order=fixed_order
        )
    except ConfigError:
        return
    assert isinstance(made, MeshPlan)
    assert made.num_processes == processes
    assert made.data <= batch
    assert made.data % made.data_processes == 0
    assert made.spatial_processes in (1, made.spatial)
    assert data in (None, made.data)
    assert spatial in (None, made.spatial)
