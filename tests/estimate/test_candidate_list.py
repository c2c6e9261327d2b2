"""Which candidates there are."""

import pytest

from volseg.estimate.candidate import Candidate, Freedom, list_candidates, name_candidate, relieve


def names(*arguments, **freedom):
    return [name_candidate(each) for each in list_candidates(*arguments, Freedom(**freedom))]


def test_one_gpu_leaves_its_kernels_open():
    found = list_candidates(1, 2, (64, 64, 64), Freedom(kernels=("fast", "torch")))
    assert [(each.num_gpus, each.kernels) for each in found] == [(1, "fast")]


def test_four_gpus_deal_samples_cut_volumes_and_lay_out_layers():
    assert names(4, 8, (64, 64, 64)) == [
        "one GPU",
        "data: 4",
        "data: 2, spatial: 2",
        "spatial: 4",
        "data: 2, pipeline: 2, split_size: 1",
        "data: 2, pipeline: 2, split_size: 2",
        "pipeline: 4, split_size: 1",
        "pipeline: 4, split_size: 2",
        "pipeline: 4, split_size: 4",
    ]


@pytest.mark.parametrize(
    ("num_gpus", "batch", "freedom", "expected"),
    [
        # Three samples keep three of four GPUs busy.
        (4, 3, {"pipeline": 1}, ["data: 3", "data: 2, spatial: 2", "spatial: 4"]),
        (4, 1, {"pipeline": 1}, ["spatial: 4"]),
        (2, 4, {"spatial": 2}, ["spatial: 2"]),
        (4, 4, {"data": 2, "pipeline": 2}, ["data: 2, pipeline: 2, split_size: 1"]),
        (2, 4, {"pipeline": 2, "split_size": 3}, ["pipeline: 2, split_size: 3"]),
        (2, 4, {"spatial": 1, "data": 1, "split_size": 64}, ["pipeline: 2, split_size: 4"]),
        (2, 8, {"one_process": True, "pipeline": 1}, ["spatial: 2"]),
        # Replicas of a pipeline have two samples each, or their stages wait for each other, unless that is asked for.
        (4, 3, {"spatial": 1, "data": 2}, []),
        (4, 2, {"data": 2, "pipeline": 2}, ["data: 2, pipeline: 2, split_size: 1"]),
        (8, 8, {"spatial": 1, "data": 4}, ["data: 4, pipeline: 2, split_size: 1"]),
    ],
)
def test_what_was_decided_stays(num_gpus, batch, freedom, expected):
    found = list_candidates(num_gpus, batch, (64, 64, 64), Freedom(**freedom))
    assert [name_candidate(each) for each in found if each.num_gpus > 1] == expected


def test_no_candidate_takes_more_than_there_is():
    assert "spatial: 8" not in names(8, 1, (4, 4, 4)), "a volume has no more slabs than planes"
    for num_gpus in range(1, 9):
        for batch in range(1, 9):
            found = list_candidates(num_gpus, batch, (64, 64, 64), Freedom())
            assert all(each.num_gpus <= num_gpus for each in found)
            assert all(each.data <= batch for each in found)
            assert len(set(found)) == len(found)


def test_one_process_records_no_step_over_several_of_its_gpus():
    found = list_candidates(2, 2, (64, 64, 64), Freedom(one_process=True))
    recorded = {name_candidate(each): each.recorded for each in found}
    assert recorded == {"one GPU": True, "spatial: 2": False, "pipeline: 2, split_size: 1": True}


def test_relief_recomputes_more_and_more():
    relieved = relieve(Candidate(spatial=2), Freedom())
    assert [each.checkpoint for each in relieved] == [1, 2, 3, "all", "tiled"]
    assert {(each.spatial, each.kernels) for each in relieved} == {(2, "fast")}


@pytest.mark.parametrize("candidate", [Candidate(pipeline=2), Candidate(checkpoint="all")])
def test_what_cannot_recompute_is_not_relieved(candidate):
    assert relieve(candidate, Freedom()) == []


def test_names_are_a_configs_words():
    candidate = Candidate(data=2, spatial=2, checkpoint="all", kernels="torch")
    assert name_candidate(candidate, kernels=True) == "data: 2, spatial: 2, checkpoint: all, torch kernels"
