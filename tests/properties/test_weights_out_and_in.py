"""Weights that are exported and loaded again have the bits that ``volseg predict RUN`` uses, for every format.

The networks are random. They have modules that run twice, modules that are registered twice, parameters and buffers of
several names, and buffers that are views of parameters. MONAI's DynUNet names its layers twice.
"""

import random
from collections import Counter
from functools import partial

import pytest
import torch
from monai.networks.nets import DynUNet
from tiny_trainings import DYNUNET, FirstWeights, clone, config_factory, make_training
from torch import nn

import volseg
from volseg.checkpointing.file import LATEST
from volseg.errors import ConfigError
from volseg.exchange.tensors import pack_tensors, unpack_tensors
from volseg.experiment import REGISTRIES, export, train
from volseg.experiment.prediction.sources import load_trained, read_weights
from volseg.models.weights import list_tensors, load_weights, transfer_weights
from volseg.workflow import Hook, load_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")

IDIOMS = ("runs_twice", "registered_twice", "tied", "tied_bias", "shared_buffer", "view", "tied_scalar")


class Block(nn.Module):
    def __init__(self, width, norm, idiom):
        super().__init__()
        self.conv = nn.Conv3d(width, width, 3, padding=1)
        self.norm = {"batch": nn.BatchNorm3d, "instance": nn.InstanceNorm3d}[norm](width, affine=True)
        if idiom == "view":
            self.register_buffer("first", self.conv.weight.data[0])
        if idiom == "shared_buffer":
            self.register_buffer("factor", torch.rand(1) + 0.5)
            self.register_buffer("same", self.factor)
        self.idiom = idiom

    def forward(self, x):
        y = self.norm(self.conv(x)).relu()
        if self.idiom == "shared_buffer":
            return y * self.same
        return x + y


class Drawn(nn.Module):
    """A random network of a few blocks, from a seed."""

    divisors = (1, 1, 1)

    def __init__(self, in_channels, out_channels, seed):
        super().__init__()
        draw = random.Random(seed)
        width, norm = draw.choice([2, 3, 4]), draw.choice(["batch", "instance"])
        idioms = [draw.choice(IDIOMS) for _ in range(draw.randint(2, 4))]
        idioms[-1] = IDIOMS[seed % len(IDIOMS)]  # so that each occurs
        self.stem = nn.Conv3d(in_channels, width, 3, padding=1)
        self.blocks, self.late = nn.ModuleList(), nn.ModuleDict()
        for number, idiom in enumerate(idioms):
            block = Block(width, norm, idiom)
            self.blocks.append(block)
            if idiom == "runs_twice":
                self.blocks.append(block)
            if idiom == "registered_twice":
                self.late[f"block_{number}"] = nn.Sequential(block)
                self.late[f"conv_{number}"] = block.conv
            if idiom == "tied" and number:
                block.conv.weight = self.blocks[0].conv.weight
            if idiom == "tied_bias":
                block.norm.bias = block.conv.bias
        self.head = nn.Conv3d(width, out_channels, 1)
        self.outer = self.head if draw.random() < 0.5 else None
        self.scaled = "tied_scalar" in idioms
        if self.scaled:
            self.register_parameter("scale", nn.Parameter(torch.ones(1)))
            self.late["again"] = nn.Identity()
            self.late["again"].register_parameter("scale", self.scale)

    def forward(self, image):
        x = self.stem(image)
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale if self.scaled else x)


class Truth(Hook):
    """Keep the weights that a training validates with at its end."""

    def on_training_end(self, training):
        self.weights = training.validate(lambda: clone(training.network.state_dict()))


require_bits = partial(torch.testing.assert_close, rtol=0, atol=0)


def build(seed):
    torch.manual_seed(1000 + seed)
    return Drawn(1, 3, seed)


@pytest.mark.parametrize(("decay", "count"), [(0.7, 25), (None, len(IDIOMS))])
def test_checkpoints_give_the_bits_of_the_average(decay, count, tmp_path):
    counts = Counter()
    for seed in range(count):
        network, truth, folder = build(seed), Truth(), tmp_path / str(seed)
        training = make_training(network, folder, 3, truth, decay=decay)
        training.run()
        expected, raw = truth.weights, clone(network.state_dict())
        assert decay is None or any(not torch.equal(raw[name], expected[name]) for name in raw)
        state = load_checkpoint(folder / LATEST)

        loaded = build(seed)
        load_weights(loaded, state.model, state.averaged)
        require_bits(loaded.state_dict(), expected)
        torch.save(training.state_dict(), tmp_path / "dict.pt")
        torch.save(expected, tmp_path / "plain.pt")
        for file in (folder / LATEST, tmp_path / "dict.pt", tmp_path / "plain.pt"):
            weights, begun = read_weights(file), build(seed)
            transfer = transfer_weights(begun, weights.values, weights.average, stems={}, heads={})
            require_bits(begun.state_dict(), expected)
            assert [*transfer.taken] == [*expected]
            counts["begun"] += 1
        packed = unpack_tensors(pack_tensors(loaded.state_dict()), "here")
        load_weights(again := build(seed), packed)
        require_bits(again.state_dict(), expected)
        counts["several names"] += len(expected) > len([*network.parameters(), *network.buffers()])
    assert counts["begun"] == 3 * count
    assert counts["several names"] > count / 2


@pytest.fixture(scope="module")
def config_of(tmp_path_factory):
    volseg.register("network", "Drawn")(Drawn)
    yield config_factory(tmp_path_factory.mktemp("weights"))
    REGISTRIES["network"].forget("Drawn")


def run_of(config_of, folder, *network):
    truth = Truth()
    train(config_of(folder / "run", *network), hooks=[truth])
    return folder / "run", truth.weights


STRATEGIES = {
    "spatial": ["parallel={strategy: spatial, devices: [cpu, cpu]}"],
    "pipeline": ["parallel={strategy: pipeline, devices: [cpu, cpu]}"],
    "replicas": ["parallel={data: 2}", "training.deterministic=true"],
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_on_several_devices_gives_the_bits_that_it_predicts_with(strategy, config_of, tmp_path):
    network = [DYNUNET, *STRATEGIES[strategy]]
    run, expected = run_of(config_of, tmp_path, *network)
    require_bits(load_trained(run, overrides=["parallel={}"]).models[0].state_dict(), expected)
    require_bits(load_trained(export(run, tmp_path / "model.zip")).models[0].state_dict(), expected)
    begun = FirstWeights()
    train(config_of(tmp_path / "begun", f"training.start_from={run}", *network), hooks=[begun])
    require_bits(begun.weights, expected)


@pytest.mark.parametrize(("seed", "ema"), [*((seed, "0.7") for seed in range(len(IDIOMS))), (0, "null"), (3, "null")])
def test_every_format_gives_the_bits_of_the_run(seed, ema, config_of, tmp_path):
    network = [f"network={{name: Drawn, seed: {seed}}}", f"training.ema={ema}"]
    run, expected = run_of(config_of, tmp_path, *network)
    require_every_format(run, expected, network, config_of, tmp_path, every_source=seed == 0)


def test_every_format_gives_the_bits_of_monais_dynunet(config_of, tmp_path):
    """47 of 49 parameters of an exported or fine-tuned DynUNet were raw, and not averaged."""
    network = [DYNUNET]
    run, expected = run_of(config_of, tmp_path, *network)
    assert len(expected) > 1.5 * len([*load_trained(run).models[0].parameters()])
    require_every_format(run, expected, network, config_of, tmp_path, every_source=True)
    bundle = export(run, tmp_path / "bundle", to="monai-bundle")
    plain = DynUNet(3, 1, 3, [3, 3, 3], [1, 2, 2], [2, 2], filters=[4, 8, 8])
    plain.load_state_dict(torch.load(bundle / "models" / "model.pt", weights_only=True))
    require_bits(plain.state_dict(), expected)


def shares_within_a_module(network):
    """Return whether a module has two names for one tensor, which TorchScript refuses."""
    for module in network.modules():
        named = module.named_parameters, module.named_buffers
        own = [id(value) for each in named for _, value in each(recurse=False, remove_duplicate=False)]
        if len({*own}) < len(own):
            return True
    return False


def require_every_format(run, expected, network, config_of, folder, *, every_source):
    require_bits(load_trained(run).models[0].state_dict(), expected)
    archive = export(run, folder / "model.zip")
    require_bits(load_trained(archive).models[0].state_dict(), expected)
    if shares_within_a_module(load_trained(run).models[0]):
        with pytest.raises(ConfigError, match="don't support parameter sharing between modules"):
            export(run, folder / "model.ts", to="torchscript")
    else:
        script = torch.jit.load(export(run, folder / "model.ts", to="torchscript")).state_dict()
        assert len(script) > 3
        require_bits(script, {name: expected[name.removeprefix("model.")] for name in script})
    torch.save(expected, folder / "plain.pt")
    torch.save({"state_dict": {f"module.model.{n}": v for n, v in expected.items()}}, folder / "wrapped.pt")
    unique = {}  # as safetensors writes them: a tensor under one of its names
    for one in list_tensors(load_trained(run).models[0]):
        unique[one.names[-1]] = expected[one.names[-1]]
    torch.save(unique, folder / "unique.pt")
    sources = [archive, folder / "unique.pt"]
    if every_source:  # which go one way into a network, see `test_checkpoints_give_the_bits_of_the_average`
        sources += [run, run / "checkpoints" / "latest.pt", folder / "plain.pt", folder / "wrapped.pt"]
    for number, source in enumerate(sources):
        begun = FirstWeights()
        train(config_of(folder / f"begun_{number}", f"training.start_from={source}", *network), hooks=[begun])
        require_bits(begun.weights, expected)
