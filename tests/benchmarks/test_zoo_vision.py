"""Training of the image zoo on a synthetic set: cards, weights, resuming, skipping."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from benchmarks.zoo import cifar10, vision
from benchmarks.zoo.cards import data_file, read_card
from benchmarks.zoo.drift import drift
from benchmarks.zoo.images import MARGIN, Split, load_images, lossless_file, training_batches
from benchmarks.zoo.training import triangle
from merganser.errors import InputError

SCHEDULE = vision.Schedule(3, rate=0.02, batch=16, augment=False)


@pytest.fixture(scope="module")
def squares() -> Split:
    """Class c has a bright square at column 2c: a set any classifier learns."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 10, (160,), generator=generator)
    images = torch.randint(0, 60, (160, 28, 28, 1), generator=generator, dtype=torch.uint8)
    for image, label in zip(images, labels.tolist(), strict=True):
        image[4:20, 2 * label + 3 : 2 * label + 6] = 255
    return Split(images, labels, torch.tensor([0.2]), torch.tensor([0.3]))


def run(cache: Path, squares: Split, schedule: vision.Schedule = SCHEDULE, seed: int = 0):
    return vision.train("mlp", "squares", seed, squares, squares, schedule, cache)


def test_card_and_weights_are_written_and_a_finished_model_is_skipped(
    tmp_path: Path, squares: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = vision.Schedule(12, rate=0.05, batch=16, augment=False)
    card = run(tmp_path, squares, schedule)
    directory = vision.model_directory(tmp_path, "mlp", "squares", 0)
    assert sorted(p.name for p in directory.iterdir()) == ["card.json", "model.safetensors"]
    stored = json.loads((directory / "card.json").read_text())
    assert {"command", "seed", "data", "epochs", "steps", "scores", "seconds", "guards", "machine"} <= set(stored)
    assert card.steps == 12 * 160 // 16
    assert stored["scores"]["test_accuracy"] == card.scores["test_accuracy"] > 0.8
    model = vision.load_model("mlp", "squares", 0, tmp_path)
    assert vision.evaluate(model, squares)[0] == card.scores["test_accuracy"]

    monkeypatch.setattr(vision, "train_epoch", lambda *_: pytest.fail("trained again"))
    assert run(tmp_path, squares, schedule).scores == card.scores


def test_an_interrupted_run_ends_like_a_whole_one(
    tmp_path: Path, squares: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path / "whole", squares)
    epoch = vision.train_epoch

    def interrupted(*arguments):
        if arguments[4] == 2:
            raise KeyboardInterrupt
        return epoch(*arguments)

    monkeypatch.setattr(vision, "train_epoch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts", squares)
    directory = vision.model_directory(tmp_path / "parts", "mlp", "squares", 0)
    assert (directory / "checkpoint.pt").exists()
    assert read_card(directory) is None
    monkeypatch.setattr(vision, "train_epoch", epoch)
    card = run(tmp_path / "parts", squares)
    assert len(card.history) == 3
    whole, parts = (
        load_file(vision.model_directory(tmp_path / name, "mlp", "squares", 0) / "model.safetensors")
        for name in ("whole", "parts")
    )
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value, rtol=0, atol=0)


def test_seeds_give_different_models(tmp_path: Path, squares: Split) -> None:
    for seed in (0, 1):
        run(tmp_path, squares, seed=seed)
    a, b = (vision.load_model("mlp", "squares", seed, tmp_path).head.weight for seed in (0, 1))
    assert not torch.equal(a, b)


def test_augmented_batches_are_crops_or_mirrored_crops(squares: Split) -> None:
    images, _ = next(training_batches(squares, 16, torch.Generator().manual_seed(3), augment=True))
    assert images.shape == (16, 1, 28, 28)
    order = torch.randperm(len(squares), generator=torch.Generator().manual_seed(3))
    source = torch.nn.functional.pad(squares.images[order[0]], (0, 0, *[MARGIN] * 4))[None]
    crops = [source[:, t : t + 28, left : left + 28] for t in range(2 * MARGIN + 1) for left in range(2 * MARGIN + 1)]
    candidates = torch.cat([squares.normalise(x) for crop in crops for x in (crop, crop.flip(2))])
    assert (candidates == images[0]).flatten(1).all(1).any()


def test_every_image_is_seen_once(squares: Split) -> None:
    batches = list(training_batches(squares, 40, torch.Generator().manual_seed(0), augment=False))
    seen = torch.cat([labels for _, labels in batches])
    assert torch.equal(seen.sort().values, squares.labels.sort().values)


def test_the_guard_is_the_cosine_with_the_weights_that_the_seed_gives(tmp_path: Path, squares: Split) -> None:
    card = run(tmp_path, squares, seed=3)
    initial, trained = vision.initial_model("mlp", 3), vision.load_model("mlp", "squares", 3, tmp_path)
    a, b = (model.head.weight.detach().flatten().double() for model in (initial, trained))
    assert card.guards["cosines"]["head.weight"] == pytest.approx(float(a @ b / a.norm() / b.norm()), abs=1e-4)
    assert "head.bias" not in card.guards["cosines"]
    assert card.guards["left_initialisation"] == (card.guards["median_cosine"] <= 0.6)


def test_an_untrained_network_has_not_left_its_initialisation() -> None:
    found = drift(vision.initial_model("cnn", 0), vision.initial_model("cnn", 0))
    assert found["median_cosine"] == 1
    assert not found["left_initialisation"]
    assert drift(vision.initial_model("cnn", 0), vision.initial_model("cnn", 1))["left_initialisation"]


def test_all_networks_of_cifar_take_the_same_number_of_steps() -> None:
    convolutional = [name for name in vision.SCHEDULES if name not in ("mlp", "cnn")]
    assert len({(vision.SCHEDULES[name].epochs, vision.SCHEDULES[name].batch) for name in convolutional}) == 1


def test_sets_are_shuffled_and_normalised_by_the_training_images(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (50, 28, 28), dtype=np.uint8)
    labels = np.repeat(np.arange(10), 5)
    np.savez(tmp_path / "mnist.npz", train_x=images, train_y=labels, test_x=images[:9], test_y=labels[:9])
    train, test = load_images("mnist", tmp_path, tmp_path)
    assert train.labels.tolist() != labels.tolist()
    assert len(test) == 9
    np.testing.assert_allclose(train.mean.numpy(), images.mean() / 255, rtol=1e-6)
    np.testing.assert_allclose(train.std.numpy(), images.std() / 255, rtol=1e-5)
    row = int(np.flatnonzero((images == train.images[0, :, :, 0].numpy()).all((1, 2)))[0])
    assert labels[row] == train.labels[0]


def test_cifar_is_decoded_once(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    files = []
    for level in (0, 120, 250):
        buffer = io.BytesIO()
        image.new("RGB", (32, 32), (level, level, 0)).save(buffer, "JPEG")
        files.append(buffer.getvalue())
    blob = np.frombuffer(b"".join(files), dtype=np.uint8)
    ends = np.cumsum([len(file) for file in files])
    parts = {
        f"{p}_{key}": value
        for p in ("train", "test")
        for key, value in (("jpeg", blob), ("end", ends), ("y", np.arange(3)))
    }
    np.savez(tmp_path / "cifar10_jpeg.npz", **parts)
    train, _ = load_images("cifar10", tmp_path, tmp_path)
    assert (tmp_path / "data" / "cifar10_train.npy").exists()
    levels = train.images[train.labels.argsort(), 5, 5, 0].int()
    assert (levels - torch.tensor([0, 120, 250])).abs().max() < 8


def test_lossless_cifar_is_preferred(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    package, cache = tmp_path / "package", tmp_path / "cache"
    package.mkdir()
    sheets = {}
    for name in (*cifar10.SHEETS["train"], *cifar10.SHEETS["test"]):
        sheets[name] = rng.integers(0, 256, (2, 1024, 3), dtype=np.uint8)
        image.fromarray(sheets[name]).save(package / name)
    (package / "train_lables.json").write_text(json.dumps(list(range(10))))
    (package / "test_lables.json").write_text(json.dumps([4, 2]))
    assert cifar10.store(package, cache) == lossless_file(cache)
    _, test = load_images("cifar10", tmp_path, cache)
    place = test.labels.tolist().index(2)
    np.testing.assert_array_equal(test.images[place].reshape(1024, 3), sheets["test_batch.png"][1])


def test_cards_of_another_version_are_refused(tmp_path: Path) -> None:
    (tmp_path / "card.json").write_text('{"model": "mlp", "sides": [16]}')
    with pytest.raises(InputError, match="another version.*sides.*remove"):
        read_card(tmp_path)


def test_missing_data_says_how_to_give_it(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--data"):
        data_file(tmp_path, "mnist.npz")


def test_triangle_peaks_at_the_end_of_the_warmup() -> None:
    assert triangle(0.0, 0.25) == 0
    assert triangle(0.25, 0.25) == pytest.approx(1)
    assert triangle(1.0, 0.25) == pytest.approx(0)
