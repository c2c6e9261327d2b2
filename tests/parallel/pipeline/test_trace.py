from volseg.parallel.pipeline.trace import Call, Operation, Trace, list_segments


def forward(*events, outputs=()):
    """Return the trace of a network's call; operations outside layers belong to their callers."""
    trace = Trace(outputs=outputs)
    trace.enter(Call("", 0))
    for event in events:
        add(trace, event, 0)
    trace.leave()
    return trace


def add(trace, event, guard):
    if isinstance(event, Operation):
        trace.add(event, guard)
        return
    path, inside, uses, own, inner = event
    trace.enter(Call(path, 0), uses, own)
    for each in inside:
        add(trace, each, inner)
    trace.leave()


def layer(path, *inside, uses=(), guard=0, inner=None):
    """A call; ``inner`` is the guard of its operations, if that is another one than its own."""
    return path, inside, uses, guard, guard if inner is None else inner


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
        layer("conv", Operation(0)), layer("relu", Operation(1, changed_since=0)), layer("next", Operation(2))
    )
    assert paths(trace) == [["conv", "relu"], ["next"]]


def test_module_that_checkpoints_inside_stays_whole():
    block = layer("block", layer("block.a", Operation(0), guard=1), layer("block.b", Operation(1), guard=1))
    assert paths(forward(block, layer("c", Operation(2)))) == [["block"], ["c"]]
    block = layer("block", Operation(0), Operation(1), inner=1)
    assert paths(forward(block, layer("c", Operation(2)))) == [["block"], ["c"]]


def test_child_that_the_network_checkpoints_stays_whole_and_begins_no_stage_where_it_draws():
    for is_random, expected in ((False, [["first"], ["child"]]), (True, [["first", "child"]])):
        child = layer("child", layer("child.a", Operation(1, is_random=is_random), guard=1), guard=1)
        assert paths(forward(layer("first", Operation(0)), child)) == expected


def test_network_that_is_one_layer_is_one_segment():
    assert paths(forward(Operation(0))) == [[""]]
