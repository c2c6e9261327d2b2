import torch

from volseg import ModelParallel, Training
from volseg.monitoring import stage_times
from volseg.monitoring.loggers import Logger
from volseg.monitoring.stage_times import StageTimes, draw_intervals
from volseg.monitoring.training_log import TrainingLog
from volseg.parallel import Pipeline
from volseg.parallel.timeline import Interval


class Heard(Logger):
    def __init__(self):
        self.values, self.pictures, self.texts = [], {}, {}

    def scalars(self, values, step):
        self.values.append(values)

    def images(self, pictures, step):
        self.pictures |= pictures

    def text(self, name, text):
        self.texts[name] = text


def train(network):
    heard = Heard()
    log = TrainingLog([heard])
    batches = [{"image": torch.ones(2, 1, 4, 4, 4), "label": torch.zeros(2, 4, 4, 4).long()}] * 4
    optimizer, loss = torch.optim.SGD(network.parameters(), lr=0.1), torch.nn.functional.cross_entropy
    Training(network, loss, optimizer, batches, epochs=2, hooks=[StageTimes(log), log]).run()
    return heard


def make_network():
    return torch.nn.Sequential(torch.nn.Conv3d(1, 4, 3, padding=1), torch.nn.Conv3d(4, 2, 1))


def train_pipeline():
    return train(ModelParallel(make_network(), strategy=Pipeline(split_size=1, cuts=["1"]), devices=["cpu", "cpu"]))


def test_a_pipeline_shows_when_each_stage_works():
    heard = train_pipeline()
    for values in heard.values:
        assert 0 < values["gpu/0/idle_share"] < 1
        assert 0 < values["gpu/1/idle_share"] < 1
    picture = heard.pictures["timeline"]
    assert (picture.dtype, picture.shape[0]) == (torch.uint8, 3)


def test_forward_and_backward_have_colours_of_their_own():
    """A box of a step that was held up may be thinner than its outline."""
    picture = draw_intervals(
        [
            Interval(stage=0, device="cpu", what=what, micro_batch=0, begin=begin, end=begin + 1.0)
            for begin, what in enumerate(("forward", "backward"))
        ]
    )
    colours = {tuple(colour.tolist()) for colour in picture.flatten(1).T.unique(dim=0)}
    assert {(70, 130, 190), (215, 120, 60)} <= colours


def test_a_timeline_that_cannot_be_drawn_ends_no_training(monkeypatch, caplog):
    monkeypatch.setitem(stage_times.COLOURS, "forward", "no colour")
    heard = train_pipeline()
    assert len(heard.values) == 2
    assert (heard.pictures.keys(), heard.texts) == ({"train/patches"}, {})
    assert "no timeline of the pipeline (ValueError: unknown color" in caplog.text


def test_of_one_device_there_is_none():
    heard = train(make_network())
    assert heard.pictures.keys() == {"train/patches"}
    assert not any("idle_share" in tag for tag in heard.values[0])
