from volseg.parallel.pipeline.observe.trace import Call, Enter, Leave, Operation, Trace, list_segments


def forward(*events, outputs=()):
    """The events of a network's call, around ``events``."""
    flat = [Enter(Call("", 0))]
    for event in events:
        flat += event if isinstance(event, list) else [event]
    return Trace((*flat, Leave()), outputs)


def layer(path, *operations, index=0, uses=(), guard=0):
    return [Enter(Call(path, index), uses, guard), *operations, Leave()]


def paths(trace):
    return [[call.path for call in segment.calls] for segment in list_segments(trace)]


def test_every_leaf_may_begin_a_stage_and_functions_belong_to_the_leaf_before():
    trace = forward(
        layer("a", Operation(0)), Operation(1, uses=(0,)), layer("b", Operation(2, uses=(1,)), uses=(1,)), outputs=(2,)
    )
    first, second = list_segments(trace)
    assert (first.operations, second.operations) == (range(2), range(2, 3))
    assert first.sends == (1,)
    assert second.sends == (2,)


def test_states_belong_to_the_first_segment_that_reads_them():
    trace = forward(layer("a", Operation(0, states=("w",))), layer("b", Operation(1, states=("w", "v"))))
    assert [segment.states for segment in list_segments(trace)] == [("w",), ("v",)]


def test_no_cut_between_making_memory_and_changing_it():
    trace = forward(
        layer("conv", Operation(0)),
        layer("relu", Operation(1, changed_since=0)),
        layer("next", Operation(2)),
    )
    assert paths(trace) == [["conv", "relu"], ["next"]]


def test_module_that_checkpoints_inside_stays_whole():
    block = [
        Enter(Call("block", 0)),
        *layer("block.a", Operation(0, guard=1), guard=1),
        *layer("block.b", Operation(1, guard=1), guard=1),
        Leave(),
    ]
    assert paths(forward(block, layer("c", Operation(2)))) == [["block"], ["c"]]


def test_child_that_the_network_checkpoints_stays_whole():
    child = [Enter(Call("child", 0), guard=1), *layer("child.a", Operation(1, guard=1), guard=1), Leave()]
    assert paths(forward(layer("first", Operation(0)), child)) == [["first"], ["child"]]


def test_no_cut_just_before_a_checkpointed_child_that_draws():
    child = [
        Enter(Call("child", 0), guard=1),
        *layer("child.a", Operation(1, is_random=True, guard=1), guard=1),
        Leave(),
    ]
    assert paths(forward(layer("first", Operation(0)), child)) == [["first", "child"]]


def test_network_that_is_one_layer_is_one_segment():
    assert paths(Trace((Enter(Call("", 0)), Operation(0), Leave()))) == [[""]]
