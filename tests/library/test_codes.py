"""Codes of one tensor's difference: against plain numpy, to the bit, whatever is damaged."""

import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from merganser.errors import CheckpointError, InputError
from merganser.library.codes.blobs import BlobReader, BlobWriter
from merganser.library.codes.catalogue import CODES, candidates, check_codes, describe, parse
from merganser.library.codes.coding import Delta, Triple, decode, dense, encode, read_head
from merganser.library.codes.levels import Levels
from merganser.library.codes.mixed_factors import MixedFactors
from merganser.library.codes.signs import Signs

ALL = [Signs("tensor"), Signs("rows"), Signs("columns"), Levels(0.06), Levels(1.0), Levels(1.4, "rows"), Levels(4.0)]


def low_rank(d=48, m=32, seed=0):
    rng = torch.Generator().manual_seed(seed)
    u, v = (torch.linalg.qr(torch.randn(n, m, generator=rng)).Q for n in (d, m))
    return (u * torch.logspace(0, -3, m)) @ v.T


def rebuilt(blob, shape):
    return dense(decode(blob, shape, "blob")).reshape(shape)


@pytest.mark.parametrize("code", [*ALL, MixedFactors(8)], ids=describe)
@pytest.mark.parametrize("shape", [(48, 32), (6, 5, 3, 3), (1, 7)])
def test_round_trip_and_error(code, shape):
    delta = low_rank(*(48, 32))[: shape[0]] if shape == (48, 32) else torch.randn(shape)
    change = Delta(delta)
    coded = encode(change, code)
    found = rebuilt(coded.blob, shape)
    np.testing.assert_allclose(float((delta - found).double().square().sum()), coded.error, rtol=1e-4, atol=1e-9)
    assert coded.error <= change.energy
    assert torch.equal(found, rebuilt(encode(change, code).blob, shape))
    head = read_head(coded.blob, "blob")
    assert (head.shape, head.error, head.energy) == (shape, coded.error, change.energy)


@pytest.mark.parametrize("shape", [(), (1,), (17,)])
@pytest.mark.parametrize("code", ALL, ids=describe)
def test_vectors_and_numbers(shape, code):
    delta = torch.full(shape, -2.0)
    found = rebuilt(encode(Delta(delta), code).blob, shape)
    assert found.shape == shape
    if not isinstance(code, Levels) or code.step < 1.5:  # one standard deviation is more than is pruned
        np.testing.assert_allclose(found, delta, rtol=0.05)


def test_signs_are_bitdelta():
    delta = torch.randn(20, 30)
    for axis, along in (("tensor", None), ("rows", 1), ("columns", 0)):
        expected = np.sign(delta.numpy()) * np.abs(delta.numpy()).mean(axis=along, keepdims=along is not None)
        np.testing.assert_allclose(rebuilt(encode(Delta(delta), Signs(axis)).blob, (20, 30)), expected, rtol=1e-3)


def test_calibrated_signs_are_the_least_squares_of_outputs():
    delta, inputs = torch.randn(6, 10, dtype=torch.float64), torch.randn(50, 10, dtype=torch.float64)
    inputs[:, 0] *= 9
    change = Delta(delta, inputs.T @ inputs)
    coded = encode(change, Signs("rows"))
    found = rebuilt(coded.blob, (6, 10)).double()
    for row in range(6):
        x, y = inputs @ delta[row].sign(), inputs @ delta[row]
        alpha = float(found[row, 0] * delta[row, 0].sign())
        assert alpha == pytest.approx(float(x @ y / (x @ x)), rel=2e-3)
    plain = np.sign(delta.numpy()) * np.abs(delta.numpy()).mean(1, keepdims=True)
    assert coded.error < change.error(torch.from_numpy(plain))


def test_levels_against_numpy():
    delta = torch.randn(40, 50)
    found = rebuilt(encode(Delta(delta), Levels(1.0)).blob, (40, 50)).numpy()
    x = delta.numpy() / np.sqrt(np.mean(delta.numpy().astype(np.float64) ** 2))
    q = np.sign(x) * np.minimum(np.floor(np.abs(x) + 0.4), 7)
    expected = np.zeros_like(x)
    for level in range(1, 8):
        if (at := np.abs(q) == level).any():
            expected[at] = np.sign(x[at]) * np.abs(x[at]).mean()
    np.testing.assert_allclose(found, expected * np.sqrt(np.mean(delta.numpy() ** 2)), rtol=2e-3)


def test_factors_beat_plain_rounding_at_their_bytes():
    change = Delta(low_rank(128, 96))
    coded = encode(change, MixedFactors(24))
    s = torch.linalg.svdvals(change.matrix.double())
    discarded = float((s[24:] ** 2).sum())
    assert discarded < coded.error < 3 * discarded
    eight_bits = 24 * (128 + 96)
    assert coded.nbytes < 0.6 * eight_bits
    found = decode(coded.blob, (128, 96), "blob")
    assert isinstance(found, Triple)
    assert found.u.dtype == found.v.dtype == torch.int8
    widths = found.u.abs().amax(0).tolist()
    assert widths[0] > 7 >= widths[-1]  # fewer levels for smaller components


def test_a_spectrum_that_ends_is_followed_to_its_end():
    delta = Delta(torch.randn(60, 5) @ torch.randn(5, 40) + 1e-6 * torch.randn(60, 40))
    best = min((encode(delta, code) for code in candidates(delta, ["factors"])), key=lambda coded: coded.error)
    assert best.error < 2e-4 * delta.energy
    assert {code.rank for code in candidates(delta, ["factors"]) if code.step < 1} == {5}


def test_weighted_factors_have_the_smaller_weighted_error():
    delta, inputs = torch.randn(30, 40), torch.randn(200, 40) * torch.logspace(0, -2, 40)
    weighted = Delta(delta, inputs.T @ inputs)
    plain = rebuilt(encode(Delta(delta), MixedFactors(6)).blob, (30, 40))
    assert encode(weighted, MixedFactors(6)).error < 0.5 * weighted.error(plain)


@pytest.mark.parametrize("code", [Signs("rows"), Levels(1.0), MixedFactors(3)], ids=describe)
def test_rows_that_did_not_change_come_back_exactly(code):
    delta = torch.zeros(500, 16)
    delta[::25] = torch.randn(20, 16)
    coded = encode(Delta(delta), code)
    found = rebuilt(coded.blob, (500, 16))
    assert not found[delta.eq(0).all(1)].any()
    assert coded.nbytes < 20 * 16 + 200
    assert torch.equal(rebuilt(encode(Delta(torch.zeros(5, 4)), code).blob, (5, 4)), torch.zeros(5, 4))


@given(st.sampled_from([1, 3, 7, 127]), st.integers(0, 2**32 - 1), st.integers(0, 300))
def test_symbols_come_back(levels, seed, count):
    values = np.random.default_rng(seed).integers(-levels, levels + 1, count)
    out = BlobWriter()
    out.symbols(values, levels)
    source = BlobReader(out.content(), "x")
    np.testing.assert_array_equal(source.symbols(levels, count), values)
    source.done()


def test_symbols_take_little_more_than_their_entropy():
    values = np.random.default_rng(0).choice([-1, 0, 1], 100_000, p=[0.05, 0.9, 0.05])
    out = BlobWriter()
    out.symbols(values, 1)
    entropy = -(0.9 * np.log2(0.9) + 0.1 * np.log2(0.05)) * 100_000 / 8
    assert len(out.content()) < 1.03 * entropy


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damage_is_named_or_harmless(data):
    code = data.draw(st.sampled_from([Signs("rows"), Levels(1.0, "rows"), MixedFactors(4)]))
    delta = low_rank(16, 8)
    delta[3] = 0
    blob = bytearray(encode(Delta(delta), code).blob)
    for _ in range(data.draw(st.integers(1, 3))):
        blob[data.draw(st.integers(0, len(blob) - 1))] = data.draw(st.integers(0, 255))
    blob = blob[: data.draw(st.integers(0, len(blob)))] if data.draw(st.booleans()) else blob
    try:
        assert dense(decode(bytes(blob), (16, 8), "blob")).shape == (16, 8)
    except CheckpointError as error:
        assert str(error).startswith("blob: damaged: ")


def test_a_bomb_is_not_unpacked():
    bomb = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    content = bomb.compress(bytes(1 << 26)) + bomb.flush()
    out = BlobWriter()
    out.numbers("BI", 1, len(content))
    with pytest.raises(CheckpointError, match="another length"):
        BlobReader(out.content() + content, "x").array("u1", 100)


def test_names_and_settings():
    for code in candidates(Delta(torch.randn(40, 30))):
        assert parse(describe(code)) == code
    assert {code.name for code in candidates(Delta(torch.randn(8, 8)), ["signs"])} == {"signs"}
    assert not [code for code in candidates(Delta(torch.randn(9))) if isinstance(code, MixedFactors)]
    assert list(candidates(Delta(torch.zeros(4, 4))))
    assert check_codes(["factors", "signs"]) == ("signs", "factors")
    with pytest.raises(InputError, match="did you mean 'signs'"):
        check_codes(["sings"])
    for wrong in (
        "levels",
        "levels nan tensor",
        "factors -1 1",
        "factors 1.5 1",
        "signs x y",
        "none 1",
        "levels 1.0 rows",
    ):
        with pytest.raises(ValueError, match="."):
            parse(wrong)
    assert list(CODES) == ["signs", "levels", "factors"]
    with pytest.raises(InputError, match="at least one"):
        check_codes(["shared"])


def test_a_gram_matrix_must_fit():
    with pytest.raises(InputError, match="expected \\[4, 4\\]"):
        Delta(torch.ones(3, 4), torch.eye(3))
