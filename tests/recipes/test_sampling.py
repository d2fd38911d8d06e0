"""A sample of the weights tells which models do not belong together, at hand and from afar."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from merganser import recipes
from merganser.checkpoints.opening import open_headers
from merganser.checkpoints.remote import files, models
from merganser.recipes.sampling import sample_models
from support.range_server import RangeServer

NAMES = [f"layers.{i}.weight" for i in range(40)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, two fine-tunes of it, one that was trained far longer, and one of another base; in several dtypes."""
    place = tmp_path_factory.mktemp("models")
    draw = lambda seed: torch.randn(64, 32, generator=torch.Generator().manual_seed(seed))  # noqa: E731
    base = {name: draw(i) for i, name in enumerate(NAMES)}
    for offset, (name, scale, dtype) in enumerate(
        [("base", 0.0, torch.float32), ("math", 0.02, torch.bfloat16), ("code", 0.02, torch.float16),
         ("long", 0.5, torch.float32), ("other", None, torch.float32)], 1,
    ):  # fmt: skip
        moved = {k: draw(100 * offset + i) for i, k in enumerate(NAMES)}
        made = moved if scale is None else {k: base[k] + scale * moved[k] for k in NAMES}
        (place / name).mkdir()
        weights = {k: v.to(dtype) for k, v in made.items()}
        save_file(weights | {"norm": torch.ones(64)}, place / name / "model.safetensors")
    return place


@pytest.fixture
def server(home: Path) -> Iterator[RangeServer]:
    with RangeServer(home) as running:
        yield running
    models.fetch_small_files.cache_clear()
    files._client.cache_clear()


def sampled(place: object, names: list[str], base: str | None = "base", method: str = "ties"):
    document = {"method": method, "models": [f"{place}/{name}" for name in names]}
    document |= {"base": f"{place}/{base}"} if base else {}
    return sample_models(recipes.prepare(recipes.load(document), open_headers))


CASES = [
    (["math", "code"], "base", []),
    (["math", "other"], "base", ["other is not a fine-tune of the base"]),
    (["math", "code", "long"], "base", ["the task vector of {}/long is about 25 times as long"]),
    (["math", "code"], "other", ["math is not a fine-tune of the base", "code is not a fine-tune of the base"]),
    (["math", "other"], None, ["other is not related to"]),
]


@pytest.mark.parametrize(("names", "base", "said"), CASES)
def test_strangers_and_long_task_vectors_are_named(home, server, names, base, said) -> None:
    method = "ties" if base else "linear"
    here, there = (sampled(place, names, base, method) for place in (home, server.url))
    assert len(here.notes) == len(said)
    for note, words in zip(here.notes, said, strict=True):
        assert words.format(home) in note
    assert [note.replace(server.url, str(home)) for note in there.notes] == list(here.notes)
    assert here.nbytes == there.nbytes


def test_little_is_fetched(home: Path, server: RangeServer) -> None:
    merge = recipes.prepare(
        recipes.load({"method": "linear", "models": [f"{server.url}/{name}" for name in ("math", "code")]}),
        open_headers,
    )
    server.requests.clear()
    before = server.sent
    found = sample_models(merge)
    assert found.nbytes == 2 * 16 * 512 * 2
    assert 0 < server.sent - before <= found.nbytes  # what came with the header is not asked for again
    assert 0 < len(server.requests) <= 2 * 16


def test_the_cosine_is_that_of_the_whole(home: Path) -> None:
    (note,) = sampled(home, ["other"]).notes
    one, two = (torch.cat([v.flatten() for k, v in open_headers(str(home / name)).items() if k in NAMES])
                for name in ("base", "other"))  # fmt: skip
    whole = torch.cosine_similarity(one, two, dim=0).item()
    assert abs(float(note.partition("is ")[2].partition("weights is ")[2].split()[0]) - whole) < 0.04


def test_copies_and_few_numbers_are_not_judged(home: Path, tmp_path: Path) -> None:
    stack = [{"path": str(home / name), "layers": [0, 4]} for name in ("base", "other")]
    assert sample_models(recipes.prepare(recipes.load({"method": "passthrough", "slices": stack}))).nbytes == 0
    for seed, name in enumerate("ab"):
        (tmp_path / name).mkdir()
        save_file({"w": torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))},
                  tmp_path / name / "model.safetensors")  # fmt: skip
    assert sampled(tmp_path, ["a", "b"], None, "linear").notes == ()
