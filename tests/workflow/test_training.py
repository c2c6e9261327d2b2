"""The loop against the same steps written by hand, and its refusals."""

import copy
import math
import signal

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from training_hooks import At, press_ctrl_c

from volseg.checkpointing.file import restore_random_state
from volseg.errors import ConfigError, NonFiniteLossError
from volseg.workflow import Hook, Named, Patience, Training
from volseg.workflow.checks import stop_if_requested


class Validated:
    """A validation whose scores are given."""

    def __init__(self, *scores):
        self.remaining = list(scores)

    def __call__(self):
        self.score = self.remaining.pop(0)
        self.scores = {"dice/anterior": self.score}
        return self


class Events(Hook):
    def __init__(self):
        self.seen = []

    def __getattribute__(self, name):
        if name.startswith("on_"):
            return lambda training, *rest: self.seen.append(name)
        return super().__getattribute__(name)


def weights(training):
    return {name: p.detach().clone() for name, p in training.network.state_dict().items()}


def test_the_loop_equals_the_steps_written_by_hand(make_training):
    training, reference = make_training(clip=0.5), make_training()
    training.run()

    net, optimizer = reference.network.train(), reference.optimizer
    torch.manual_seed(7)  # as when the training was made: the dropout of both draws the same
    type(net)()
    for epoch in range(3):
        for batch in reference.batches.epoch(epoch):
            optimizer.zero_grad()
            cross_entropy(net(batch["image"]), batch["label"]).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
    torch.manual_seed(0)
    again = make_training(clip=0.5)
    again.run()
    torch.testing.assert_close(weights(training), weights(again), rtol=0, atol=0)
    torch.testing.assert_close(weights(training), weights(reference), rtol=0, atol=0)


def test_accumulated_batches_equal_one_large_batch(make_training):
    """Without batch norm the mean of two gradients is the gradient of the joined batch."""

    class Joined:
        def __len__(self):
            return 3

        def __iter__(self):
            pairs = list(make_training().batches.epoch(0))
            for one, two in zip(pairs[::2], pairs[1::2], strict=True):
                yield {name: torch.cat([one[name], two[name]]) for name in ("image", "label")}

    small, large = (
        make_training(dropout=False, accumulate=2, epochs=1),
        make_training(Joined(), dropout=False, epochs=1),
    )
    for training in (small, large):
        training.network.layers[1] = nn.Identity()
    small.run()
    large.run()
    # float32: the two sums add up in another order.
    torch.testing.assert_close(weights(small), weights(large), rtol=1e-5, atol=1e-6)


def test_weighted_losses_add_up_and_are_recorded_apart(make_training):
    losses = [
        Named(cross_entropy, ["logits", "label"], ["ce"]),
        Named(lambda logits: logits.square().mean(), ["logits"], ["size"]),
    ]
    record = make_training(losses=losses, loss_weights=[2.0, 0.5], epochs=1).run()[0]
    assert set(record.losses) == {"ce", "size", "loss"}
    assert record.losses["loss"] == pytest.approx(2 * record.losses["ce"] + 0.5 * record.losses["size"], rel=1e-5)


@pytest.mark.parametrize("outputs", [("ce", "ce"), ("ce", "loss")])
def test_losses_need_names_of_their_own(make_training, outputs):
    losses = [Named(cross_entropy, ["logits", "label"], [name]) for name in outputs]
    with pytest.raises(ConfigError, match="losses need different names"):
        make_training(losses=losses)


def test_a_single_loss_with_a_factor_is_told_to_take_a_name(make_training):
    ce = Named(cross_entropy, ["logits", "label"], ["loss"])
    needs = r"the loss cross_entropy has the factor 0\.5 and gives 'loss', .*name its output, such as output: dice"
    with pytest.raises(ConfigError, match=needs):
        make_training(losses=ce, loss_weights=[0.5])
    named = Named(cross_entropy, ["logits", "label"], ["ce"])
    record = make_training(losses=named, loss_weights=[0.5], epochs=1).run()[0]
    assert record.losses["loss"] == pytest.approx(0.5 * record.losses["ce"], rel=1e-5)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loss_that_is_not_finite_names_epoch_batch_and_cases_and_spares_the_weights(make_training, accumulate):
    class Poisoned:
        def __len__(self):
            return 4

        def epoch(self, number, start=0):
            for position, batch in enumerate(make_training().batches.epoch(number)):
                if number == 1 and position == 2:
                    batch["image"][0, 0, 0, 0, 0] = math.nan
                yield batch

    training = make_training(Poisoned(), accumulate=accumulate)
    with pytest.raises(NonFiniteLossError, match=r"epoch 2, batch 3: .*cases: case_1_2_0, case_1_2_1"):
        training.run()
    assert all(p.isfinite().all() for p in training.network.parameters())


def test_events_come_in_order_and_best_before_the_end_of_its_epoch(make_training):
    events = Events()
    make_training(epochs=2, validation=Validated(0.5, 0.4), hooks=[events]).run()
    batch = ["on_batch_begin", "on_batch_end"]
    assert events.seen == [
        "on_training_begin",
        *["on_epoch_begin", *6 * batch, "on_validation_begin", "on_best", "on_epoch_end"],
        *["on_epoch_begin", *6 * batch, "on_validation_begin", "on_epoch_end"],
        "on_training_end",
    ]


def test_patience_stops_after_validations_without_a_better_score(make_training):
    training = make_training(epochs=9, validation=Validated(0.5, 0.6, 0.6, 0.1, 0.9), hooks=[Patience(2)])
    history = training.run()
    assert [record.score for record in history] == [0.5, 0.6, 0.6, 0.1]
    assert training.best.epoch == 1


def test_validation_is_due_every_so_many_epochs_and_at_the_last(make_training):
    history = make_training(epochs=5, validate_every=2, validation=Validated(0.1, 0.2, 0.3)).run()
    assert [record.score for record in history] == [None, 0.1, None, 0.2, 0.3]


def test_validation_sees_the_averaged_weights_and_training_goes_on_with_its_own(make_training):
    training = make_training(average_decay=0.5, epochs=1)
    seen = {}

    def validate():
        seen.update(weights(training))
        return Validated(0.5)()

    training.validation = validate
    expected, updates, decay = None, 0, 0.5

    class Follow(Hook):
        def on_batch_end(self, training, fields):
            nonlocal expected, updates
            now = {name: p.detach().clone() for name, p in training.network.named_parameters()}
            share = min(decay, (1 + updates) / (10 + updates))
            start = initial if expected is None else expected
            expected = {name: share * start[name] + (1 - share) * p for name, p in now.items()}
            updates += 1

    initial = {name: p.detach().clone() for name, p in training.network.named_parameters()}
    training.hooks.append(Follow())
    training.run()
    trained = dict(training.network.named_parameters())
    for name, average in expected.items():
        torch.testing.assert_close(seen[name], average)  # float32, the same recurrence
    assert any(not torch.equal(trained[name], average) for name, average in expected.items())


def test_ctrl_c_ends_after_the_batch_with_the_hooks_told(make_training):
    class Saved(Hook):
        at = None

        def on_interrupt(self, training):
            self.at = (training.epoch, training.position)

    hook = Saved()
    before = signal.getsignal(signal.SIGINT)  # a job in the background may have been started with Ctrl-C ignored
    with pytest.raises(KeyboardInterrupt):
        make_training(hooks=[hook, At(1, 3, press_ctrl_c)]).run()
    assert hook.at == (1, 3)
    assert signal.getsignal(signal.SIGINT) is before


class InterruptedValidation:
    """A validation of five cases, during the second of which Ctrl-C comes."""

    def __init__(self):
        self.judged = 0

    def __call__(self):
        for case in range(5):
            stop_if_requested()
            self.judged += 1
            if case == 1:
                press_ctrl_c()
        raise AssertionError("went on after Ctrl-C")


def test_ctrl_c_in_a_validation_leaves_it_at_once_and_nothing_is_lost(make_training):
    class Save(Hook):
        def on_interrupt(self, training):
            self.state = copy.deepcopy(training.state_dict())

    hook, validation = Save(), InterruptedValidation()
    with pytest.raises(KeyboardInterrupt):
        make_training(validation=validation, validate_every=2, average_decay=0.5, hooks=[hook]).run()
    assert validation.judged == 2
    assert (hook.state["epoch"], hook.state["position"]) == (1, 6)
    assert hook.state["seconds"][0] > 0

    options = {"validate_every": 2, "average_decay": 0.5}
    resumed = make_training(validation=Validated(0.5, 0.6), **options)
    resumed.load_state_dict(hook.state)
    whole = make_training(validation=Validated(0.5, 0.6), **options)
    whole.run()
    # Dropout has drawn from torch's generator for both by now: set it as the interrupted training left it.
    restore_random_state(hook.state["random"])
    resumed.run()
    assert [(r.losses, r.score) for r in resumed.history] == [(r.losses, r.score) for r in whole.history]
    torch.testing.assert_close(weights(resumed), weights(whole), rtol=0, atol=0)
    assert resumed.history[1].seconds >= hook.state["seconds"][0]


def test_nothing_stops_where_no_training_listens():
    stop_if_requested()


def test_a_plain_data_loader_serves(make_training):
    cases = [{"image": torch.randn(1, 4, 4, 4), "label": torch.zeros(4, 4, 4).long()} for _ in range(5)]
    loader = torch.utils.data.DataLoader(cases, batch_size=2)
    assert [record.epoch for record in make_training(loader, epochs=2).run()] == [0, 1]


def test_a_module_without_parameters_or_state_is_refused():
    with pytest.raises(ConfigError, match=r"Training needs a Named nn\.Module, got a Named <lambda>"):
        Training(Named(lambda x: x, ["image"], ["logits"]), Named(cross_entropy, ["a"], ["loss"]), None, [], epochs=1)


def test_a_score_of_nan_is_never_the_best(make_training):
    training = make_training(validation=Validated(float("nan"), -1.0, -0.5), epochs=3)
    training.run()
    assert training.best.score == -0.5


def test_a_training_that_patience_ended_is_not_gone_on_with(make_training):
    options = {"epochs": 9, "hooks": [Patience(2)]}
    training = make_training(validation=Validated(0.5, 0.4, 0.3), **options)
    assert len(training.run()) == 3
    resumed = make_training(validation=Validated(), **options)
    resumed.load_state_dict(training.state_dict())
    assert len(resumed.run()) == 3


def test_a_short_last_group_of_batches_is_averaged_over_its_own_number(make_training):
    """Six batches in groups of four: the step on the last two is that of one batch twice as large."""
    image = torch.cat([part["image"] for part in list(make_training().batches)[4:]])
    small = make_training(accumulate=4, epochs=1, dropout=False)
    weights, gradients = [], []
    step = small.optimizer.step

    def recorded(*args, **kwargs):
        gradients.append([p.grad.clone() for p in small.network.parameters()])
        weights.append({name: value.clone() for name, value in small.network.state_dict().items()})
        return step(*args, **kwargs)

    small.network.layers[1] = nn.Identity()  # batch statistics differ between two batches and one
    small.optimizer.step = recorded
    small.run()
    assert len(gradients) == 2
    reference = make_training(epochs=1, dropout=False)
    reference.network.layers[1] = nn.Identity()
    reference.network.load_state_dict(weights[1])
    cross_entropy(reference.network(image), (image[:, 0] > 0).long()).backward()
    for got, parameter in zip(gradients[1], reference.network.parameters(), strict=True):
        torch.testing.assert_close(got, parameter.grad)
