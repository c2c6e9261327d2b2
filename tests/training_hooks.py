"""Hooks that act at one point of a training."""

import os
import signal

from volseg.workflow import Hook


class At(Hook):
    """Call something once so many batches of an epoch are done."""

    def __init__(self, epoch, position, act):
        self.at, self.act = (epoch, position), act

    def on_batch_end(self, training, fields):
        if (training.epoch, training.position) == self.at:
            self.act()


class StopAfter(Hook):
    """Stop a training once so many epochs are done."""

    def __init__(self, epochs):
        self.epochs = epochs

    def on_epoch_end(self, training, record):
        if training.epoch == self.epochs:
            training.stop("the test has seen enough")


def press_ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)


def raising(fault):
    """Return a function that raises what it is given."""

    def act():
        raise fault

    return act
