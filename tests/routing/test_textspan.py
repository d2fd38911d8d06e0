"""TextSpan on constructed embeddings: planted directions come out by name, the strongest first."""

import json

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from merganser.cli import decode as cli
from merganser.errors import InputError
from merganser.routing import decode
from merganser.routing.textspan import textspan
from support.expert_nets import encoder, library_of

WORDS = ("car", "texture", "digit", "field", "cat")


@pytest.fixture
def embeddings():
    return torch.linalg.qr(torch.randn(12, 5, generator=torch.Generator().manual_seed(0))).Q.T


def test_planted_directions_are_named_in_order(embeddings):
    weights = torch.tensor([3.0, 0.0, 1.0, 2.0, 0.0])
    found = textspan(torch.diag(weights)[[0, 2, 3]] @ embeddings, WORDS, embeddings, count=5)
    assert [concept.text for concept in found] == ["car", "field", "digit"]
    np.testing.assert_allclose([concept.share for concept in found], np.array([9, 4, 1]) / 14, atol=1e-6)
    assert found[-1].cumulative == pytest.approx(1)


def test_it_is_the_greedy_choice_done_by_hand():
    rng = np.random.default_rng(1)
    a, t = rng.standard_normal((4, 9)), rng.standard_normal((30, 9))
    found = textspan(torch.from_numpy(a), [str(i) for i in range(30)], torch.from_numpy(t), count=3)
    t = t / np.linalg.norm(t, axis=1, keepdims=True)
    t = t @ np.linalg.pinv(a) @ a
    expected = []
    for _ in range(3):
        best = int(np.argmax([np.sum((a @ row) ** 2) for row in t]))
        expected.append(str(best))
        unit = t[best] / np.linalg.norm(t[best])
        a, t = a - np.outer(a @ unit, unit), t - np.outer(t @ unit, unit)
    assert [concept.text for concept in found] == expected
    shares = [concept.share for concept in found]
    assert all(share >= 0 for share in shares)
    assert sum(shares) <= 1 + 1e-9


def test_a_long_text_outside_the_span_is_not_chosen(embeddings):
    scaled = embeddings * torch.tensor([1.0, 100.0, 1.0, 1.0, 1.0])[:, None]
    assert textspan(embeddings[:1], WORDS, scaled, 1)[0].text == "car"


def test_errors_say_what_does_not_fit(embeddings):
    for directions, texts, table, message in (
        (embeddings, WORDS[:2], embeddings, "2 texts"),
        (embeddings[:, :4], WORDS, embeddings, "share a space"),
        (torch.zeros(2, 12), WORDS, embeddings, "all directions are zero"),
    ):
        with pytest.raises(InputError, match=message):
            textspan(directions, texts, table)


@pytest.fixture
def planted(tmp_path):
    """An encoder of width 16 whose expert reads 'digit' and, less, 'cat', through a projection to width 12."""
    base = encoder()
    base.register_buffer("projection", torch.linalg.qr(torch.randn(16, 12)).Q.T)
    words = torch.linalg.qr(torch.randn(12, 5)).Q.T
    state = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    left = torch.linalg.qr(torch.randn(32, 2)).Q
    state["blocks.1.up.bias"] += 1
    state["blocks.1.up.weight"] += left @ torch.diag(torch.tensor([2.0, 1.0])) @ words[[2, 4]] @ base.projection
    return library_of(tmp_path, base, {"e": state}, rank_fraction=0.25), words


def test_an_expert_is_decoded_through_the_projection(planted):
    library, words = planted
    for projection in ("projection", library.base.read("projection").T):
        found = decode(library, "e", "blocks.1.up.weight", WORDS, words, projection=projection)
        assert [concept.text for concept in found[:2]] == ["digit", "cat"]
        assert found[0].share == pytest.approx(0.8, abs=1e-3)
    assert len(decode(library, "e", "blocks.1.up.weight", WORDS, words, projection="projection", rank=1)) == 1
    with pytest.raises(InputError, match="did not change"):
        decode(library, "e", "blocks.0.up.weight", WORDS, words)
    with pytest.raises(InputError, match="must be 12×16"):
        decode(library, "e", "blocks.1.up.weight", WORDS, words, projection=torch.zeros(3, 3))
    with pytest.raises(InputError, match="unknown side 'lefft'; did you mean 'left'"):
        decode(library, "e", "blocks.1.up.weight", WORDS, words, side="lefft")
    for rank in (0, -1):
        with pytest.raises(InputError, match="at least one singular vector"):
            decode(library, "e", "blocks.1.up.weight", WORDS, words, rank=rank)
    with pytest.raises(InputError, match="has no tensor 'blocks.1.up.wieght'; did you mean 'blocks.1.up.weight'"):
        decode(library, "e", "blocks.1.up.wieght", WORDS, words)
    with pytest.raises(InputError, match="NaN or infinite"):
        decode(library, "e", "blocks.1.up.weight", WORDS, torch.full((5, 16), float("nan")))


def test_the_command(planted, tmp_path):
    library, words = planted
    (tmp_path / "texts").write_text("\n".join(WORDS))
    np.save(tmp_path / "words.npy", words.numpy())
    app = typer.Typer()
    app.command()(cli.command)
    arguments = [str(library.path), "e", "blocks.1.up.weight", "--projection", "projection"]
    arguments += ["--texts", str(tmp_path / "texts"), "--embeddings", str(tmp_path / "words.npy"), "--json"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    assert [text["text"] for text in json.loads(result.stdout)["texts"][:2]] == ["digit", "cat"]
    shown = CliRunner().invoke(app, arguments[:-1], catch_exceptions=False).stdout.splitlines()
    assert shown[0] == "e  blocks.1.up.weight"
    assert [line.split("%")[1].strip() for line in shown[1:3]] == ["digit", "cat"]
    with pytest.raises(InputError, match="no such file"):
        CliRunner().invoke(app, [*arguments, "--texts", "absent"], catch_exceptions=False)
    with pytest.raises(InputError, match=r"'blocks.1.up.bias', float32\[32\], is not a changed matrix"):
        CliRunner().invoke(app, [arguments[0], "e", "blocks.1.up.bias", *arguments[3:]], catch_exceptions=False)
    np.save(tmp_path / "strings.npy", np.array(WORDS))
    (tmp_path / "none.npy").write_text("not an array")
    (tmp_path / "empty.npy").touch()
    np.savez(tmp_path / "several.npz", a=words.numpy())
    (tmp_path / "several.npz").rename(tmp_path / "several.npy")
    for name, message in (
        ("strings", "expected an array of numbers"),
        ("none", "not a numpy file"),
        ("empty", "not a numpy file"),
        ("several", "contains several arrays; expected one array with a row per text"),
    ):
        with pytest.raises(InputError, match=rf"{name}\.npy: {message}"):
            CliRunner().invoke(app, [*arguments, "--embeddings", str(tmp_path / f"{name}.npy")], catch_exceptions=False)
    (tmp_path / "latin").write_bytes("Grüße".encode("latin-1"))
    with pytest.raises(InputError, match="latin: not a text in UTF-8"):
        CliRunner().invoke(app, [*arguments, "--texts", str(tmp_path / "latin")], catch_exceptions=False)
