"""The training loop against the same steps written by hand, and its refusals."""

import math
import signal

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from training_hooks import At, press_ctrl_c

from volseg.errors import ConfigError, NonFiniteLossError
from volseg.workflow import Hook, Named, Patience


class Validated:
    """A validation with given scores."""

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
    torch.testing.assert_close(weights(training), weights(reference), rtol=0, atol=0)


def name_entropy(name):
    return Named(cross_entropy, ["logits", "label"], [name])


def test_weighted_losses_add_up_and_are_recorded_apart(make_training):
    size = Named(lambda logits: logits.square().mean(), ["logits"], ["size"])
    record = make_training(losses=[name_entropy("ce"), size], loss_weights=[2.0, 0.5], epochs=1).run()[0]
    assert set(record.losses) == {"ce", "size", "loss"}
    assert record.losses["loss"] == pytest.approx(2 * record.losses["ce"] + 0.5 * record.losses["size"], rel=1e-5)


@pytest.mark.parametrize(
    ("names", "factors", "message"),
    [
        (["ce", "ce"], None, "losses need different outputs"),
        (["ce", "loss"], None, "losses need different outputs"),
        (["loss"], [0.5], r"has the factor 0\.5 and the output 'loss', .*rename the output, such as output: dice"),
    ],
)
def test_losses_need_names_of_their_own(make_training, names, factors, message):
    with pytest.raises(ConfigError, match=message):
        make_training(losses=list(map(name_entropy, names)), loss_weights=factors)


def test_a_loss_without_a_gradient_is_refused(make_training):
    detached = Named(lambda logits, label: cross_entropy(logits.detach(), label), ["logits", "label"], ["loss"])
    with pytest.raises(ConfigError, match="the loss has no gradient"):
        make_training(losses=[detached]).run()


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


def test_a_training_that_patience_ended_is_not_gone_on_with(make_training):
    options = {"epochs": 9, "hooks": [Patience(2)]}
    training = make_training(validation=Validated(0.5, 0.6, 0.6, 0.1), **options)
    assert len(training.run()) == 4
    assert training.best.epoch == 1
    resumed = make_training(validation=Validated(), **options)
    resumed.load_state_dict(training.state_dict())
    assert len(resumed.run()) == 4


@pytest.mark.parametrize(
    ("every", "given", "scores", "best"),
    [
        (2, (0.1, 0.3, 0.2), [None, 0.1, None, 0.3, 0.2], 3),
        (1, (math.nan, -1.0, -0.5, -0.5, -2.0), [pytest.approx(math.nan, nan_ok=True), -1.0, -0.5, -0.5, -2.0], 2),
    ],
)
def test_validation_is_due_every_so_many_epochs_and_at_the_last(make_training, every, given, scores, best):
    """A score of NaN is never the best."""
    training = make_training(epochs=5, validate_every=every, validation=Validated(*given))
    assert [record.score for record in training.run()] == scores
    assert training.best.epoch == best


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
