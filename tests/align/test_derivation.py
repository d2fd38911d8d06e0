"""The symmetries of hand-made networks are the expected ones, neither fewer nor more."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from derivation_nets import Net, freedom
from torch import Tensor, nn

from merganser.align import symmetry
from merganser.errors import InputError


def test_mlp_with_batch_norm() -> None:
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6), nn.BatchNorm1d(6), nn.GELU(), nn.Linear(6, 3))
    found = symmetry(net, torch.randn(4, 5))
    assert freedom(found) == {"0": (8,), "2": (6,)}
    assert dict(found.occurrences)["2"] == tuple(
        [("2.weight", 0), ("2.bias", 0)]
        + [(f"3.{name}", 0) for name in ("weight", "bias", "running_mean", "running_var")]
        + [("5.weight", 1)]
    )
    assert found.buffers == {"3.running_mean", "3.running_var", "3.num_batches_tracked"}
    assert net.training


def test_flatten_after_convolution() -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 9, 7), nn.ReLU(), nn.Linear(7, 2)
    )
    found = symmetry(net, torch.randn(2, 3, 8, 8))
    assert freedom(found) == {"0": (8,), "4": (7,)}
    (segment,) = found.axes["4.weight"][1]
    assert [(f.atom, f.size) for f in segment.factors] == [("0", 8), (None, 9)]


def test_residual_stream_is_one_atom() -> None:
    def forward(m: nn.ModuleDict, x: Tensor) -> Tensor:
        x = m["stem"](x)
        x = x + m["b"](F.relu(m["a"](x)))
        return m["head"]((x + m["c"](x)).mean((2, 3)))

    children = {"stem": nn.Conv2d(3, 6, 3), "a": nn.Conv2d(6, 4, 1), "b": nn.Conv2d(4, 6, 1)}
    net = Net(forward, **children, c=nn.Conv2d(6, 6, 1), head=nn.Linear(6, 2))
    assert freedom(symmetry(net, torch.randn(2, 3, 5, 5))) == {"m.stem": (6,), "m.a": (4,)}


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_depthwise_and_transposed_convolutions(rank: int) -> None:
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1]
    back = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[rank - 1]
    net = nn.Sequential(
        conv(2, 6, 1),
        conv(6, 6, 3, groups=6, padding=1),
        nn.ReLU(),
        conv(6, 4, 1),
        back(4, 5, 2),
        nn.Tanh(),
        back(5, 2, 1),
    )
    assert freedom(symmetry(net, torch.randn(2, 2, *[4] * rank))) == {"0": (6,), "3": (4,), "4": (5,)}


def test_grouped_convolution_permutes_groups_and_inside_groups() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 12, 3, groups=4), nn.ReLU(), nn.Conv2d(12, 2, 1))
    found = freedom(symmetry(net, torch.randn(2, 3, 6, 6)))
    # Inputs of a group: one order for all groups, for the weight has them on another axis than the groups.
    assert found == {"0:group": (4,), "0:outer": (2,), "1": (4, 3)}
    net = nn.Sequential(nn.Conv1d(3, 8, 1), nn.ConvTranspose1d(8, 12, 3, groups=4), nn.ReLU(), nn.Conv1d(12, 2, 1))
    assert freedom(symmetry(net, torch.randn(2, 3, 6))) == {"0:group": (4,), "0:inner": (4, 2), "1": (3,)}


def test_depthwise_with_multiplier() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 8, 3, groups=4), nn.ReLU(), nn.Conv2d(8, 2, 1))
    assert freedom(symmetry(net, torch.randn(2, 3, 6, 6))) == {"0": (4,), "1": (4, 2)}


def test_group_norm_nests_channels_in_groups() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 2, 1))
    assert freedom(symmetry(net, torch.randn(2, 3, 6, 6))) == {"0:group": (2,), "0:inner": (2, 4)}


def test_concatenation_has_a_segment_for_each_input() -> None:
    def forward(m: nn.ModuleDict, x: Tensor) -> Tensor:
        a = F.relu(m["a"](x))
        b = F.relu(m["b"](torch.cat([x, a], 1)))
        return m["head"](torch.cat([x, a, b], 1)).mean((2, 3))

    net = Net(forward, a=nn.Conv2d(3, 4, 1), b=nn.Conv2d(7, 5, 1), head=nn.Conv2d(12, 2, 1))
    found = symmetry(net, torch.randn(2, 3, 4, 4))
    assert freedom(found) == {"m.a": (4,), "m.b": (5,)}
    segments = found.axes["m.head.weight"][1]
    assert [[f.atom for f in s.factors] for s in segments] == [[None], ["m.a"], ["m.b"]]
    assert [s.offset for s in segments] == [0, 3, 7]


def test_concatenation_taken_apart_again_and_residual_around_it() -> None:
    def forward(m: nn.ModuleDict, x: Tensor) -> Tensor:
        whole = m["wide"](x)
        left, right = whole.split([4, 6], -1)
        return m["head"](whole + torch.cat([m["l"](left), F.relu(right)], -1))

    net = Net(forward, wide=nn.Linear(3, 10), l=nn.Linear(4, 4), head=nn.Linear(10, 2))
    assert sorted(freedom(symmetry(net, torch.randn(2, 3))).values()) == [(4,), (6,)]


def test_gated_units_are_paired() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 12), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(F.glu(self.up(x)) + self.up(x).chunk(2, -1)[0])

    found = symmetry(Gated(), torch.randn(2, 4))
    assert freedom(found) == {"up": (6,)}
    assert len(found.axes["up.weight"][0]) == 2


def test_tied_weights_are_one_weight() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.mix = nn.Embedding(11, 6), nn.Linear(6, 6)
            self.head = nn.Linear(6, 11, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embedding(tokens)
            return self.head(x + F.relu(self.mix(x)))

    found = symmetry(Tied(), torch.randint(11, (2, 5)))
    assert freedom(found) == {"embedding": (6,)}
    assert found.axes["head.weight"] == found.axes["embedding.weight"]
    assert found.aliases == {"head.weight": "embedding.weight"}
    assert "head.weight" not in found.objective


def test_memory_seen_in_two_ways_is_pinned() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 6)
            self.down = nn.Linear(6, 4)
            self.down.weight = nn.Parameter(self.up.weight.detach().T)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(F.relu(self.up(x)))

    assert freedom(symmetry(Shared(), torch.randn(2, 4), self_test=False)) == {}


def test_rms_norm_written_out() -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(6))

        def forward(self, x: Tensor) -> Tensor:
            wide = x.to(torch.float32)
            return self.gain * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    net = nn.Sequential(nn.Linear(4, 6), Norm(), nn.RMSNorm(6), nn.LayerNorm(6), nn.Linear(6, 2))
    assert freedom(symmetry(net, torch.randn(3, 4))) == {"0": (6,)}


def test_shortcut_by_padding_channels() -> None:
    """The parameter-free shortcut of CIFAR ResNets: subsample, pad channels with zeros."""

    def forward(m: nn.ModuleDict, x: Tensor) -> Tensor:
        x = F.relu(m["stem"](x))
        return m["head"]((F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 1, 1)) + m["down"](x)).mean((2, 3)))

    net = Net(forward, stem=nn.Conv2d(3, 4, 1), down=nn.Conv2d(4, 6, 1, stride=2), head=nn.Linear(6, 2))
    found = symmetry(net, torch.randn(2, 3, 6, 6))
    assert freedom(found) == {"m.stem": (4,)}
    assert [s.offset for s in found.axes["m.down.weight"][0]] == [0, 1, 5]


def test_channel_shuffle_and_pixel_shuffle_follow_the_units() -> None:
    shuffled = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ChannelShuffle(2), nn.ReLU(), nn.Conv2d(8, 2, 1))
    found = symmetry(shuffled, torch.randn(2, 3, 4, 4))
    assert freedom(found) == {"0:outer": (2,), "0:inner": (2, 4)}
    (segment,) = found.axes["3.weight"][1]
    assert [f.atom for f in segment.factors] == ["0:inner", "0:outer"]
    pixels = nn.Sequential(nn.Conv2d(3, 12, 1), nn.PixelShuffle(2), nn.ReLU(), nn.Conv2d(3, 2, 1))
    assert freedom(symmetry(pixels, torch.randn(2, 3, 4, 4))) == {"0": (3,)}


def test_learned_tokens_may_change_places() -> None:
    class Latents(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.latents = nn.Parameter(torch.randn(7, 4))
            self.k, self.head = nn.Linear(5, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            k = self.k(x)
            return self.head(((self.latents @ k.transpose(1, 2)).softmax(-1) @ k).amax(1))

    assert freedom(symmetry(Latents(), torch.randn(2, 6, 5))) == {"latents:outer": (7,), "latents:outer#2": (4,)}


def test_lookups_in_a_table_keep_the_other_axes() -> None:
    """Swin's relative position bias: a table of positions × heads, indexed by a constant."""

    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(5, 3))
            self.register_buffer("place", torch.arange(9).reshape(3, 3) % 5, persistent=False)
            self.a, self.b = nn.Linear(2, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(F.relu(self.a(x)) * self.table[self.place.view(-1)].view(3, 3, 3).sum((0, 1)))

    assert freedom(symmetry(Biased(), torch.randn(4, 2))) == {"table": (3,)}


def test_unused_weights_are_pinned() -> None:
    net = Net(lambda m, x: m["b"](F.relu(m["a"](x))), a=nn.Linear(3, 4), b=nn.Linear(4, 2), idle=nn.Linear(5, 6))
    assert freedom(symmetry(net, torch.randn(2, 3), allow_unused=True)) == {"m.a": (4,)}


def test_an_unknown_operation_pins_what_it_touches_and_nothing_else() -> None:
    class Spectrum(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.fft.rfft(x).abs()

    net = nn.Sequential(
        nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 8), Spectrum(), nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 2)
    )
    assert freedom(symmetry(net, torch.randn(2, 3))) == {"0": (6,), "4": (7,)}


def test_inputs_by_keyword_and_position() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor, *, scale: Tensor) -> dict[str, Tensor]:
            return {"out": self.b(F.relu(self.a(x) * scale))}

    x, scale = torch.randn(2, 3), torch.tensor(2.0)
    expected = symmetry(Two(), {"x": x, "scale": scale})
    assert expected == symmetry(Two(), (x,), kwargs={"scale": scale})
    assert freedom(expected) == {"a": (4,)}


def test_untraceable_module_says_which_line() -> None:
    class Branching(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.sum() > 0:  # the line in question
                return x
            return -x

    with pytest.raises(InputError, match=re.escape(f"{__file__}:") + r"\d+ \(if x\.sum\(\) > 0:"):
        symmetry(Branching(), torch.randn(3))


def test_an_example_the_module_does_not_run_on_is_said_once(capfd: pytest.CaptureFixture[str]) -> None:
    net = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    with pytest.raises(InputError, match="Sequential does not run on the example inputs: mat1 and mat2") as raised:
        symmetry(net, torch.zeros(1, 7))
    assert "control flow" not in str(raised.value)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("inputs", [None, 3, "x"])
def test_what_is_no_module_or_no_input_is_refused(inputs: object) -> None:
    net = nn.Linear(3, 2)
    with pytest.raises(InputError, match="inputs are a tensor"):
        symmetry(net, inputs)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"derived from an nn\.Module, got OrderedDict"):
        symmetry(net.state_dict(), torch.zeros(1, 3))  # type: ignore[arg-type]


def test_meta_weights_can_be_derived_but_not_tested() -> None:
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        x = torch.empty(2, 3)
    assert freedom(symmetry(net, x, self_test=False)) == {"0": (4,)}
    with pytest.raises(InputError, match="meta device"):
        symmetry(net, x)
