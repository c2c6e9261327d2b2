"""The choice of a convolution's kernel, tested on tensors without memory."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from volseg.device import fusions, gpus, triton_tiles
from volseg.device.convolution import choice, depth_chunks, forms, many_taps
from volseg.device.convolution.choice import TABLES, ConvolutionCall
from volseg.device.convolution.forms import Direction, Groups, ZeroChannels
from volseg.device.convolution.settings import Settings

HALF = torch.bfloat16

DIRECTIONS: tuple[Direction, ...] = ("forward", "input gradient", "weight gradient")


@pytest.fixture(autouse=True)
def gpu_without_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let tensors be on a GPU that need not be there, and Triton be installed."""
    monkeypatch.setattr(triton_tiles, "INSTALLED", True)
    monkeypatch.setattr(gpus, "get_capability", lambda device: (9, 0))
    with FakeTensorMode():
        yield


def volume(*shape: int, dtype: torch.dtype = HALF, last: bool = True, device: str = "cuda") -> Tensor:
    layout = torch.channels_last_3d if last and len(shape) == 5 else torch.contiguous_format
    return torch.empty(shape, dtype=dtype, device=device, memory_format=layout)


def chosen(slab: Tensor, weight: Tensor, bias: Tensor | None, settings: Settings) -> list[str | None]:
    """Return the names of the kernels of the output and of the weight's gradient, None where torch computes."""
    sides = zip(slab.shape[2:], weight.shape[2:], settings.padding, strict=True)
    output = [side + 2 * padding - kernel + 1 for side, kernel, padding in sides]
    dtype, device = slab.dtype, slab.device.type
    gradient = volume(slab.shape[0], weight.shape[0], *output, dtype=dtype, device=device)
    return [
        find_name(direction, ConvolutionCall(slab, weight, bias, settings, given))
        for direction, given in (("forward", None), ("weight gradient", gradient))
    ]


def find_name(direction: Direction, call: ConvolutionCall) -> str | None:
    found = choice.choose(direction, call)
    return None if found is None else found.name


def test_each_kernel_has_its_convolutions(settings: Callable[..., Settings]) -> None:
    cases = [
        ((1, 1, 8, 8, 8), (32, 1, 3, 3, 3), (1, 1, 1), ["few taps", "few taps"]),
        ((1, 1, 8, 8, 8), (16, 1, 5, 5, 5), (2, 2, 2), ["few channels in", "few channels in"]),
        ((1, 4, 8, 8, 8), (32, 4, 3, 3, 3), (1, 1, 1), ["few channels in", "few channels in"]),
        ((1, 32, 8, 8, 8), (3, 32, 5, 5, 5), (2, 2, 2), ["few channels out", "few channels out"]),
        ((1, 32, 8, 8, 8), (3, 32, 5, 5, 5), (2, 2, 1), [None, "few channels out"]),
        ((1, 32, 8, 8, 8), (3, 32, 1, 1, 1), (0, 0, 0), ["one voxel", None]),  # whose backward pass is one kernel
        ((1, 128, 4, 4, 4), (128, 128, 5, 5, 5), (2, 2, 2), [None, "many taps"]),
        ((1, 128, 16, 16, 16), (128, 128, 5, 5, 5), (2, 2, 2), ["many taps", "many taps"]),
        ((1, 32, 8, 8, 8), (32, 1, 3, 3, 3), (1, 1, 1), ["depthwise", "depthwise"]),
        ((1, 32, 8, 8, 8), (32, 32, 3, 3, 3), (1, 1, 1), [None, None]),
        ((1, 3, 8, 8, 8), (3, 3, 3, 3, 3), (1, 1, 1), ["few channels", None]),
        ((1, 16, 64, 64, 64), (16, 16, 3, 3, 3), (1, 1, 1), ["pairs", "pairs"]),
        ((1, 32, 64, 64, 64), (32, 32, 3, 3, 3), (1, 1, 1), [None, "pairs"]),
        ((1, 48, 64, 64, 64), (48, 48, 3, 3, 3), (1, 1, 1), ["zero channels", "zero channels"]),
        ((1, 48, 16, 32, 32), (48, 48, 3, 3, 3), (1, 1, 1), [None, None]),
        ((1, 96, 64, 64, 64), (48, 96, 3, 3, 3), (1, 1, 1), ["zero channels", None]),
    ]
    for shape, kernel, padding, expected in cases:
        told = settings(padding, groups=shape[1] // kernel[1])
        assert chosen(volume(*shape), volume(*kernel), None, told) == expected, (shape, kernel)
    named = {name for *_, names in cases for name in names if name is not None}
    ours = {kernel.name for direction in ("forward", "weight gradient") for kernel in TABLES[direction]}
    assert named == {*ours, "pairs", "zero channels"}


CONVOLUTIONS = [
    ((1, 1, 8, 8, 8), (32, 1, 3, 3, 3), 1),
    ((1, 2, 8, 8, 8), (32, 2, 5, 5, 5), 2),
    ((1, 32, 8, 8, 8), (3, 32, 5, 5, 5), 2),
    ((1, 32, 8, 8, 8), (3, 32, 1, 1, 1), 0),
    ((1, 128, 16, 16, 16), (128, 128, 5, 5, 5), 2),
    ((1, 3, 8, 8, 8), (3, 3, 3, 3, 3), 1),
    ((1, 16, 64, 64, 64), (16, 16, 3, 3, 3), 1),
    ((1, 48, 64, 64, 64), (48, 48, 3, 3, 3), 1),
]
"""Each of another kernel or form."""


@pytest.mark.parametrize(("shape", "kernel", "side"), CONVOLUTIONS)
def test_the_rest_is_left_to_torch(shape, kernel, side, settings):
    padding = (side,) * 3
    slab, weight, plain = volume(*shape), volume(*kernel), settings(padding)
    assert chosen(slab, weight, None, plain) != [None, None]
    for dtypes in ((torch.float32,) * 2, (torch.float64,) * 2, (HALF, torch.float32)):
        wide = [volume(*sizes, dtype=dtype) for sizes, dtype in zip((shape, kernel), dtypes, strict=True)]
        assert chosen(*wide, None, plain) == [None, None], dtypes
    strided = [{"stride": (2, 2, 2)}] if shape[1] != 1 else []  # a first convolution may have strides
    for changed in (*strided, {"groups": 2}, {"transposed": True}):
        assert chosen(slab, weight, None, settings(padding, **changed)) == [None, None], changed
    assert chosen(volume(*shape, device="cpu"), volume(*kernel, device="cpu"), None, plain) == [None, None]
    empty = volume(0, *shape[1:])
    assert chosen(empty, weight, None, plain) == [None, None]
    assert not choice.is_one_voxel(empty, weight, plain)
    image = [volume(*sizes[:2], *sizes[3:]) for sizes in (shape, kernel)]
    flat = Settings((1, 1), padding[1:], (1, 1), False, (0, 0), 1)
    assert chosen(*image, None, flat) == [None, None]


def test_which_depthwise_convolutions_are_ours(settings: Callable[..., Settings]) -> None:
    def ours(weight: Tensor, slab: Tensor | None = None, **told: Any) -> bool:
        given = volume(2, 8, 6, 5, 4) if slab is None else slab
        taken = choice.is_depthwise(given, weight, settings(**{"groups": 8, **told}))
        call = ConvolutionCall(given, weight, volume(8), settings(**{"groups": 8, **told}))
        for direction in TABLES:
            own = call if direction == "forward" else call._replace(gradient=given)
            assert (find_name(direction, own) == "depthwise") == taken
        return taken

    plain = volume(8, 1, 3, 3, 3)
    assert ours(plain)
    assert ours(plain, stride=(2, 4, 1), padding=(1, 1, 9))
    assert ours(plain, transposed=True, stride=(2, 2, 2), output_padding=(1, 0, 1))
    assert ours(plain, dilation=(2, 4, 1), stride=(1, 1, 2))
    assert ours(volume(8, 1, 7, 1, 2))
    assert ours(plain, volume(2, 8, 6, 5, 4, last=False))
    for told in ({"dilation": (2, 1, 1), "stride": (2, 1, 1)}, {"dilation": (1, 5, 1)}, {"stride": (1, 1, 5)}):
        assert not ours(plain, **told), told
    assert not ours(volume(8, 1, 1, 1, 8))
    assert not ours(volume(8, 2, 3, 3, 3), groups=4)
    assert not ours(volume(16, 1, 3, 3, 3))  # two channels out for each
    assert not ours(volume(1, 1, 3, 3, 3), volume(1, 1, 6, 5, 4), groups=1)
    assert not ours(plain, volume(0, 8, 6, 5, 4))
    assert not ours(plain, volume(2, 8, 6, 5, 4, device="cpu"))
    assert not ours(plain, volume(2, 8, 6, 5, 4, dtype=torch.float32))
    assert not ours(volume(8, 1, 3, 3, 3, dtype=torch.float32), volume(2, 8, 6, 5, 4, dtype=torch.float32))
    with fusions.without("depthwise"):
        assert not ours(plain)


def test_limits_of_each_kernel(settings: Callable[..., Settings]) -> None:
    def names(shape: tuple[int, ...], kernel: tuple[int, ...], padding: int | tuple[int, ...], **more: Any) -> list:
        around = (padding,) * 3 if isinstance(padding, int) else padding
        slab = volume(*shape, last=more.pop("last", True))
        return chosen(slab, volume(*kernel), more.pop("bias", None), settings(around, **more))

    one, eight, wide = (1, 1, 8, 8, 8), (1, 8, 8, 8, 8), (1, 128, 16, 16, 16)
    assert names(one, (32, 1, 3, 3, 3), 1, bias=volume(32)) == ["few taps", "few taps"]
    assert names((1, 32, 8, 8, 8), (17, 32, 1, 1, 1), 0, bias=volume(17)) == ["one voxel", "few taps"]
    assert names(one, (32, 1, 3, 3, 3), 1, stride=(2, 2, 2)) == ["few taps", "few taps"]
    assert names(one, (32, 1, 3, 3, 3), 1, stride=(2, 2, 2), groups=2) == [None, None]
    with fusions.without("few channels"):
        assert names(one, (32, 1, 3, 3, 3), 1, bias=volume(32)) == [None, "few taps"]
        assert names(one, (32, 1, 3, 3, 3), 1, stride=(2, 2, 2)) == [None, None]
    assert names(one, (32, 1, 3, 3, 3), 1, dilation=(2, 2, 2)) == [None, None]
    assert names(eight, (32, 8, 3, 3, 3), 1) == names(one, (65, 1, 3, 3, 3), 1) == names(one, (8, 1, 3, 3, 3), 1)
    assert names(eight, (32, 8, 3, 3, 3), 1) == [None, None]
    head = (1, 32, 8, 8, 8)
    few = "few channels out"
    assert names(head, (6, 32, 5, 5, 5), 2) == names(head, (3, 32, 3, 3, 3), 1, bias=volume(3)) == [few, few]
    assert names(head, (3, 32, 5, 5, 5), (5, 2, 2)) == [few, None]  # padded by more than the kernel reaches
    assert names(head, (3, 32, 5, 5, 5), (2, 2, 0)) == names((1, 24, 8, 8, 8), (3, 24, 5, 5, 5), 2) == [None, few]
    assert names(head, (7, 32, 5, 5, 5), 2) == names(head, (3, 32, 3, 3, 2), 0) == [None, None]
    assert names(head, (3, 32, 5, 5, 5), 2, last=False) == [None, None]
    assert names((1, 72, 8, 8, 8), (3, 72, 5, 5, 5), 2) == names((1, 200, 8, 8, 8), (3, 200, 3, 3, 3), 1) == [None, few]
    assert names((1, 7, 8, 8, 8), (32, 7, 5, 5, 5), 2) == names(one, (65, 1, 5, 5, 5), 2) == [None, None]
    assert names((1, 4, 8, 8, 8), (16, 4, 5, 5, 5), 2, last=False) == [None, None]  # of one channel all layouts are one
    assert names(one, (16, 1, 5, 5, 5), 7, last=False) == ["few channels in", "few channels in"]
    # Lines of so many taps of all channels do not fit into a tile's columns, nor into shared memory.
    long = (1, 32, 8, 8, 32)
    assert names(long, (2, 32, 3, 3, 15), (1, 1, 7)) == [few, few]
    assert names(long, (3, 32, 3, 3, 15), (1, 1, 7)) == names(one, (32, 1, 3, 3, 65), 32) == [None, None]
    with fusions.without("few channels"):
        assert names(head, (3, 32, 5, 5, 5), 2) == [None, None]
    many = (1, 200, 8, 8, 8)  # classes in eights are cuDNN's; of others the gradient alone
    assert names(many, (17, 200, 1, 1, 1), 0) == names(head, (117, 32, 1, 1, 1), 0) == ["one voxel", None]
    assert names(many, (24, 200, 1, 1, 1), 0) == names(many, (1025, 200, 1, 1, 1), 0) == [None, None]
    assert names(head, (17, 32, 1, 1, 1), 0) == ["few taps", "few taps"]  # 32 taps of one voxel
    assert names(head, (24, 32, 1, 1, 1), 0) == names((1, 16, 8, 8, 8), (32, 16, 2, 2, 2), 0, stride=(2, 2, 2))
    assert names(head, (24, 32, 1, 1, 1), 0) == [None, None]
    assert names(head, (3, 32, 1, 1, 1), (1, 0, 0)) == [None, None]
    assert names((1, 257, 8, 8, 8), (3, 257, 1, 1, 1), 0) == [None, None]
    assert names(head, (3, 32, 1, 1, 1), 0, dilation=(2, 2, 2), bias=volume(3)) == ["one voxel", None]
    assert names(wide, (64, 128, 5, 5, 5), 2) == names(wide, (128, 128, 3, 3, 3), 1) == [None, None]
    assert names(wide, (128, 128, 5, 5, 5), (5, 2, 2)) == [None, None]
    assert names(wide, (128, 128, 5, 5, 5), 2, last=False) == [None, None]
    assert names(wide, (128, 128, 5, 5, 5), 2, bias=volume(128)) == ["many taps", "many taps"]
    assert many_taps.FEWEST_VOXELS == 16**3
    assert names((1, 256, 4, 4, 4), (256, 256, 5, 5, 5), 2) == ["many taps", "many taps"]
    assert names((1, 256, 4, 4, 4), (255, 256, 5, 5, 5), 2) == [None, "many taps"]
    assert names((1, 128, 16, 16, 15), (128, 128, 5, 5, 5), 2) == [None, "many taps"]
    # 2**31 elements: cuDNN's kernels, a stack of planes at a time.
    assert depth_chunks.LIMIT == 2**31 - 1
    assert names((1, 128, 256, 256, 256), (128, 128, 5, 5, 5), 2) == [None, None]


def test_outputs_that_32_bits_do_not_count_are_left_to_torch(settings: Callable[..., Settings]) -> None:
    """Padding makes five planes of one, and more than 2**31 voxels of 2**29."""
    for shape, kernel in (
        ((1, 1), (16, 1, 5, 5, 5)),
        ((1, 1), (32, 1, 5, 3, 3)),
        ((1, 32), (3, 32, 5, 5, 5)),
        ((1, 2), (3, 2, 5, 3, 3)),
    ):
        padding = (4, kernel[3] // 2, kernel[4] // 2)
        for side, ours in ((2**6, True), (2**14, False)):
            call = ConvolutionCall(volume(*shape, 1, side, 2 * side), volume(*kernel), None, settings(padding))
            assert (find_name("forward", call) is not None) == ours, (shape, kernel, side)


def test_gradients_of_the_input_of_few_channels(settings: Callable[..., Settings]) -> None:
    def name(channels: tuple[int, int], padding: int = 1, kernel: int = 3, **changed: Any) -> str | None:
        gradient, weight = volume(1, channels[0], 8, 8, 8), volume(*channels, *(kernel,) * 3)
        call = ConvolutionCall(
            volume(1, channels[1], 8, 8, 8), weight, None, settings((padding,) * 3, **changed), gradient
        )
        return find_name("input gradient", call)

    assert name((3, 3)) == name((4, 4), 0) == name((1, 2)) == "few channels"
    assert name((3, 5)) is name((5, 3)) is name((3, 3), 3) is name((3, 3), 0, 1) is name((3, 3), 2, 5) is None
    assert name((3, 3), stride=(2, 2, 2)) is name((3, 3), dilation=(2, 2, 2)) is None
    assert name((3, 32)) == name((6, 64), 2, 5) == name((1, 24), 0, 5) == "few channels out"
    assert name((3, 8)) is name((7, 32)) is name((3, 32), 3) is name((3, 32), 0, 2) is None
    with fusions.without("few channels"):
        assert name((3, 3)) is name((3, 32)) is None


def choose_form(
    direction: Direction,
    case: tuple[int, ...],
    settings: Callable[..., Settings],
    sides: tuple[int, ...],
    **changed: Any,
) -> choice.Chosen | None:
    """Return the kernel of a convolution, by default with the padding of its reach."""
    inputs, outputs, side, dilation = case
    last, samples = changed.pop("last", True), changed.pop("samples", 1)
    taps, device = changed.pop("taps", (side,) * 3), changed.pop("device", "cuda")
    told = settings(**{"padding": ((side - 1) // 2 * dilation,) * 3, "dilation": (dilation,) * 3, **changed})
    slab = volume(samples, inputs, *sides, last=last, device=device)
    gradient = volume(samples, outputs, *sides, last=last, device=device)
    weight = volume(outputs, inputs, *taps, device=device)
    call = ConvolutionCall(slab, weight, None, told, None if direction == "forward" else gradient)
    return choice.choose(direction, call)


def name_by_rule(*told: Any, **changed: Any) -> str | None:
    """Return the name of a convolution's kernel: see ``choose_form``."""
    found = choose_form(*told, **changed)
    return None if found is None else found.name


CASES = [(8, 8, 3, 1), (16, 16, 3, 1), (20, 40, 3, 1), (24, 80, 3, 1), (48, 48, 3, 1), (64, 16, 3, 1), (32, 32, 5, 1)]
"""Of which some direction is faster in another form."""


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_forms_are_ranked_by_the_measured_times(direction: Direction) -> None:
    chosen, voxels = set(), 128**3
    for (taps, dilation), times in forms.load_table().items():
        for given, out in times[direction]:
            ranked = forms.rank_forms(
                direction, torch.Size((out, given, *taps)), dilation, voxels, torch.device("cuda")
            )
            convolved = forms.ConvolutionShape(direction, given, out, taps, dilation, voxels)
            plain = forms.estimate_time(None, convolved) or 0
            estimated = [forms.estimate_time(form, convolved) or 0 for form in ranked]
            assert all(0 < time <= 0.9 * plain for time in estimated), (taps, given, out)
            assert estimated == sorted(estimated)
            chosen |= {type(form) for form in ranked[:1]}
    assert chosen == {Groups, ZeroChannels}


def test_a_slow_kernel_of_torchs_is_replaced(settings: Callable[..., Settings]) -> None:
    """The weight's gradient of 64 channels to 16 takes 290 ms for 128^3 voxels, and less than 1 over pairs."""
    shape = forms.ConvolutionShape("weight gradient", 64, 16, (3, 3, 3), (1, 1, 1), 128**3)
    plain, pairs = (forms.estimate_time(form, shape) or 0 for form in (None, Groups(2)))
    assert plain > 0.1e12 > 100 * pairs > 0
    for sides in ((128, 128, 128), (64, 64, 64), (64, 64, 65)):
        assert choose_form("weight gradient", (64, 16, 3, 1), settings, sides) is not None, sides


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("case", CASES)
def test_forms_are_taken_where_they_can_be(case, direction, settings, monkeypatch):
    def name(sides: tuple[int, ...] = (64, 64, 64), **changed: Any) -> str | None:
        return name_by_rule(direction, case, settings, sides, **changed)

    def takes_groups(sides: tuple[int, ...] = (64, 64, 64), **changed: Any) -> bool:
        found = choose_form(direction, case, settings, sides, **changed)
        return found is not None and found.name == "pairs"

    torchs = name()
    padding = case[2] // 2
    assert name((16, 16, 16)) in (None, "many taps"), "too small"
    assert not takes_groups((64, 64, 63)), "odd rows"
    assert not takes_groups(last=False)
    assert not takes_groups(padding=(padding, padding, padding + 1))
    assert name(padding=(0, padding, padding)) == torchs, "planes of a halo"
    assert name((32, 64, 64), samples=2) == torchs, "voxels of all samples"
    for changed in ({"stride": (2, 1, 1)}, {"groups": 2}, {"device": "cpu"}, {"taps": (case[2], case[2], 1)}):
        assert name(**changed) is None, changed
    assert name(dilation=(4, 4, 4), padding=(4 * padding,) * 3) is None, "not measured"
    with torch.backends.cudnn.flags(enabled=False):
        assert name() in (None, "many taps")
    with fusions.without("pairs", "zero channels"):
        assert name() in (None, "many taps")
    for capability in ((8, 0), (10, 0), (7, 0)):
        monkeypatch.setattr(gpus, "get_capability", lambda device, told=capability: told)
        assert name() is None, "not measured"


def test_weights_gradients_over_groups_of_voxels(settings, monkeypatch):
    def name(
        channels: int, sides: tuple[int, ...] = (32, 32, 32), outputs: int | None = None, **more: Any
    ) -> str | None:
        case = (channels, outputs or channels, 5, 1)
        return name_by_rule("weight gradient", case, settings, sides, **more)

    assert name(32) == name(64) == name(32, (16, 32, 32), samples=2) == name(64, (2**14, 1, 2)) == "many taps"
    assert name(32, padding=(0, 1, 3)) == "many taps", "as much as the kernel reaches, or less"
    assert name(32, (32, 32, 31)) is name(64, (32, 32, 31)) is name(32, (32, 64, 18)) is None, "groups divide rows"
    assert name(64, (32, 64, 18)) == "many taps"
    assert name(32, (31, 32, 32)) is name(48) is name(16) is name(32, outputs=64) is None, "not measured"
    assert name(32, taps=(5, 5, 3)) is name(32, taps=(7, 5, 5)) is name(32, device="cpu") is None
    assert name(32, last=False) is name(32, stride=(1, 1, 2)) is None

    def of_slab(
        sides: tuple[int, ...], strides: tuple[int, ...], outputs: tuple[int, ...] = (32, 32, 32)
    ) -> str | None:
        slab = torch.empty_strided((1, 32, *sides), strides, dtype=HALF, device="cuda")
        given = slab, volume(32, 32, 5, 5, 5), None, settings((2, 2, 2)), volume(1, 32, *outputs)
        return find_name("weight gradient", ConvolutionCall(*given))

    assert of_slab((32, 32, 32), (2**20, 1, 2**15, 1024, 32)) == "many taps"
    assert of_slab((32, 32, 32), (2**22, 1, 2**15, 1024, 32)) == "many taps", "planes of a slab"
    assert of_slab((32, 32, 32), (2**21, 1, 2**16, 2048, 64)) is None, "channels of a join"
    assert of_slab((32, 32, 32), (2**40, 1, 2**27, 1024, 32)) is None, "32 bits do not count its places"
    # Planes so far apart that places before the first one, and the reach that is added, need more bits.
    assert of_slab((2, 32, 512), (2**31, 1, 2**29, 2**14, 32), (2, 32, 512)) is None
    assert of_slab((2, 32, 512), (2**31, 1, 2**26, 2**14, 32), (2, 32, 512)) == "many taps"
    assert (name(128, (2, 2896, 2896)), name(128, (3, 2364, 2364)), name(32, (3, 4728, 4728))) == (None, None, "pairs")
    assert name(128, (4, 2048, 2047)) is None
    monkeypatch.setattr(gpus, "get_capability", lambda device: (8, 6))
    assert (name(32), name(128)) == (None, "many taps"), "groups were measured on others"


def test_torch_adds_the_bias_of_pairs_in_a_pass_of_its_own(settings: Callable[..., Settings]) -> None:
    """So a bias waits for the norm behind the convolution, as behind torch's own."""
    slab, weight, padded = volume(1, 16, 64, 64, 64), volume(16, 16, 3, 3, 3), settings((1, 1, 1))
    assert chosen(slab, weight, volume(16), padded)[0] == "pairs"
    assert not choice.adds_bias(slab, weight, padded, channels_last=True)
    few = volume(1, 3, 64, 64, 64), volume(3, 3, 3, 3, 3)
    assert choice.adds_bias(*few, padded, channels_last=True)


def test_gradients_lie_with_channels_last_but_for_heads(settings: Callable[..., Settings]) -> None:
    gradient, weight = volume(1, 3, 8, 8, 8, last=False), volume(3, 32, 3, 3, 3)
    assert choice.lay_out_gradient(gradient, weight, settings(), channels_last=False) is gradient
    head = volume(3, 32, 1, 1, 1)
    assert choice.lay_out_gradient(gradient, head, settings(), channels_last=True) is gradient
    on_cpu = volume(1, 3, 8, 8, 8, last=False, device="cpu")
    laid_out = choice.lay_out_gradient(on_cpu, weight, settings(), channels_last=True)
    assert laid_out.is_contiguous(memory_format=torch.channels_last_3d)
