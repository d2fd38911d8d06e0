"""Log-likelihoods of continuations, such as the options of multiple choice, with little computation.

Continuations of one prompt share its keys and values, and prompts share those of a common prefix (the examples of a
few-shot task). Logits are computed only where a token of a continuation follows, and sequences of similar length are
batched. If a model's cache cannot be split, whole sequences are computed instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from merganser.errors import MerganserError, require
from merganser.evaluate.sampling import batches_by_length

#: Tokens of a prompt, and tokens of its continuation.
TokenPair: TypeAlias = "tuple[Sequence[int], Sequence[int]]"
#: Minimum length of a common prefix that is worth its own pass.
STEM = 16
#: Pairs that are computed both ways before a model's cache is shared.
CHECKED = 8
#: Allowed difference of a token's log-likelihood between a shared and a whole pass; more for narrow dtypes.
TOLERANCE, NARROW_TOLERANCE = 1e-3, 0.1


@dataclass(frozen=True)
class Likelihood:
    """log p of a continuation, and whether each of its tokens was the model's first choice."""

    log: float
    greedy: bool


def score_continuations(model: nn.Module, pairs: Sequence[TokenPair], batch: int = 16) -> list[Likelihood]:
    """Return Σ_t log p(c_t | prompt, c_<t) for each pair of a prompt and a continuation c.

    Args:
        model: A causal model of `transformers`, or an encoder-decoder (the prompt is the encoder's).
        pairs: Token ids; prompts and continuations of one token or more.
        batch: Maximum sequences per forward pass.

    Returns:
        One likelihood per pair, in order.

    Raises:
        MerganserError: If the logits are not finite.

    Example:
        >>> score_continuations(model, [([1, 5, 7], [9]), ([1, 5, 7], [4, 2])])  # doctest: +SKIP
    """
    if not pairs:
        return []
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return _score_with_decoder(model, pairs, batch)
    if max(len(prompt) + len(rest) for prompt, rest in pairs) * 2 > _find_window(model):
        return score_whole(model, pairs, batch)  # padding between prompt and option would use up the window
    if model not in _SHARING:
        _SHARING[model] = _can_share(model, pairs[:CHECKED])
    return _score_with_shared_prompts(model, pairs, batch) if _SHARING[model] else score_whole(model, pairs, batch)


#: Whether a model's cache can be shared; determined once per model.
_SHARING: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def score_whole(model: nn.Module, pairs: Sequence[TokenPair], batch: int = 16) -> list[Likelihood]:
    """Return the same from whole sequences, one per pair; `score_continuations` must agree with it."""
    found: dict[int, Likelihood] = {}
    for chosen in batches_by_length([len(prompt) + len(rest) for prompt, rest in pairs], batch):
        ids, mask = _pad([[*pairs[n][0], *pairs[n][1]] for n in chosen], _device(model))
        logits = model(input_ids=ids, attention_mask=mask).logits
        for row, number in enumerate(chosen):
            prompt, rest = pairs[number]
            asked = slice(len(prompt) - 1, len(prompt) + len(rest) - 1)
            found[number] = _likelihood(_log_probabilities(logits[row, asked]), rest)
    return [found[number] for number in range(len(pairs))]


def require_finite(logits: Tensor) -> Tensor:
    """Return the logits, or raise an error: comparisons with NaN would give wrong answers."""
    if not bool(torch.isfinite(logits).all()):
        raise MerganserError("the merged model's logits are not finite")
    return logits


def _log_probabilities(logits: Tensor) -> Tensor:
    return torch.log_softmax(require_finite(logits.detach()).float(), -1)


def _likelihood(logs: Tensor, tokens: Sequence[int]) -> Likelihood:
    """Return the likelihood of tokens, from the log-probabilities of the vocabulary before each."""
    wanted = torch.tensor(list(tokens), device=logs.device)
    return Likelihood(float(logs.gather(-1, wanted[:, None]).sum()), bool((logs.argmax(-1) == wanted).all()))


def common_length(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the length of the common prefix of two sequences."""
    differ = (place for place, (a, b) in enumerate(zip(left, right, strict=False)) if a != b)
    return next(differ, min(len(left), len(right)))


def _pad(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return tokens padded on the right, and their mask."""
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=device)
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=device)
    return ids, mask


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


@dataclass(frozen=True)
class _Past:
    """The state of a batch of sequences: keys and values of each layer, and the mask of tokens."""

    layers: tuple[tuple[Tensor, Tensor], ...]
    mask: Tensor

    def rows(self, chosen: Sequence[int]) -> _Past:
        index = torch.tensor(list(chosen), device=self.mask.device)
        return _Past(tuple((k[index], v[index]) for k, v in self.layers), self.mask[index])


def _extend(
    model: nn.Module, past: _Past | None, rows: Sequence[Sequence[int]], *, last: bool = False
) -> tuple[Tensor, _Past]:
    """Return the logits after these tokens, which continue `past`, and the new past; with `last`, the logits only
    after the last token of each row.
    """
    cache = require("transformers", "hf").DynamicCache()
    ids, mask = _pad(rows, _device(model))
    starts = torch.zeros(len(rows), 1, dtype=torch.long, device=ids.device)
    whole = mask
    if past is not None:
        for number, (keys, values) in enumerate(past.layers):
            cache.update(keys, values, number)
        starts, whole = past.mask.sum(1, keepdim=True), torch.cat([past.mask, mask], 1)
    options: dict[str, Any] = {"attention_mask": whole, "past_key_values": cache, "use_cache": True}
    if "position_ids" in inspect.signature(model.forward).parameters:
        options["position_ids"] = starts + torch.arange(ids.shape[1], device=ids.device)
    ends = mask.sum(1) - 1
    with _compute_logits_at(model, ends) if last else nullcontext():
        output = model(input_ids=ids, **options)
    logits = output.logits
    if last:
        logits = logits[:, 0] if logits.shape[1] == 1 else logits[torch.arange(len(rows)), ends]
    return logits, _Past(_layers(output.past_key_values), whole)


@contextmanager
def _compute_logits_at(model: nn.Module, places: Tensor) -> Iterator[None]:
    """Let a model's head see the hidden state at one place of each row alone: a large vocabulary costs as much per
    token as many layers.
    """
    find = getattr(model, "get_output_embeddings", lambda: None)
    head = find()
    if head is None:
        yield
        return

    def choose(_: nn.Module, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        chosen = states[0][torch.arange(len(places)), places]
        return (chosen[:, None], *states[1:])

    hook = head.register_forward_pre_hook(choose)
    try:
        yield
    finally:
        hook.remove()


def _find_window(model: nn.Module) -> float:
    """Return how many tokens a model looks back: 0 if it has layers without attention, infinity without a window."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - {"full_attention", "sliding_attention"}:
        return 0.0
    if kinds == {"full_attention"} or getattr(config, "use_sliding_window", True) is False:
        return float("inf")
    return float(getattr(config, "sliding_window", None) or "inf")


def _layers(cache: Any) -> tuple[tuple[Tensor, Tensor], ...]:
    """Return keys and values of a cache; older versions of transformers keep them in two lists."""
    if hasattr(cache, "layers"):
        return tuple((layer.keys, layer.values) for layer in cache.layers)
    return tuple(zip(cache.key_cache, cache.value_cache, strict=True))


def _score_with_shared_prompts(model: nn.Module, pairs: Sequence[TokenPair], batch: int) -> list[Likelihood]:
    prompts: dict[tuple[int, ...], list[int]] = {}
    for number, (prompt, _) in enumerate(pairs):
        prompts.setdefault(tuple(prompt), []).append(number)
    known = list(prompts)
    stem: Sequence[int] = ()
    if len(known) > 1:
        lowest, highest = min(known), max(known)  # the common prefix of the first and last in order is common to all
        stem = lowest[: min(common_length(lowest, highest), *(len(prompt) - 1 for prompt in known))]
    past = None
    if len(stem) >= STEM:
        _, past = _extend(model, None, [stem], last=True)
    else:
        stem = ()
    found: dict[int, Likelihood] = {}
    for chosen in batches_by_length([len(prompt) for prompt in known], batch):
        rows = [known[n][len(stem) :] for n in chosen]
        start = None if past is None else past.rows([0] * len(rows))
        logits, prompted = _extend(model, start, rows, last=True)
        branches = [(row, number) for row, n in enumerate(chosen) for number in prompts[known[n]]]
        found |= _score_branches(model, prompted, _log_probabilities(logits), branches, pairs, batch)
    return [found[number] for number in range(len(pairs))]


def _score_branches(
    model: nn.Module,
    past: _Past,
    last: Tensor,
    branches: Sequence[tuple[int, int]],
    pairs: Sequence[TokenPair],
    batch: int,
) -> dict[int, Likelihood]:
    """Score continuations (row of the batch, number of the pair): the first token follows from the log-probabilities
    `last` after the prompts, so that only longer ones need a pass.
    """
    short = [(row, n, pairs[n][1][0]) for row, n in branches if len(pairs[n][1]) == 1]
    found: dict[int, Likelihood] = {}
    if short:
        rows, numbers, tokens = (list(each) for each in zip(*short, strict=True))
        logs, greedy = last[rows, tokens].tolist(), last.argmax(-1)[rows].tolist()
        found = {n: Likelihood(log, g == t) for n, t, log, g in zip(numbers, tokens, logs, greedy, strict=True)}
    longer = [(row, n) for row, n in branches if n not in found]
    for chosen in batches_by_length([len(pairs[n][1]) for _, n in longer], batch):
        here = [longer[place] for place in chosen]
        starts = [pairs[n][1][:-1] for _, n in here]
        logits, _ = _extend(model, past.rows([row for row, _ in here]), starts)
        for place, (row, n) in enumerate(here):
            before = torch.cat([last[row][None], _log_probabilities(logits[place, : len(starts[place])])])
            found[n] = _likelihood(before, pairs[n][1])
    return found


def _can_share(model: nn.Module, pairs: Sequence[TokenPair]) -> bool:
    """Return whether the model has a cache that can be split, and answers the same with it as without."""
    if "past_key_values" not in inspect.signature(model.forward).parameters:
        return False
    try:
        shared = _score_with_shared_prompts(model, pairs, len(pairs))
    except (TypeError, AttributeError, IndexError, RuntimeError, ValueError, NotImplementedError):
        return False
    narrow = any(parameter.dtype not in (torch.float32, torch.float64) for parameter in model.parameters())
    allowed = NARROW_TOLERANCE if narrow else TOLERANCE
    whole = score_whole(model, pairs, len(pairs))
    tokens = [len(rest) for _, rest in pairs]
    return all(
        abs(a.log - b.log) <= allowed * n * (1 + abs(b.log) / n) for a, b, n in zip(shared, whole, tokens, strict=True)
    )


def _score_with_decoder(model: nn.Module, pairs: Sequence[TokenPair], batch: int) -> list[Likelihood]:
    """Score with an encoder-decoder: every prompt is encoded once, and the decoder scores the continuations."""
    prompts: dict[tuple[int, ...], list[int]] = {}
    for number, (prompt, _) in enumerate(pairs):
        prompts.setdefault(tuple(prompt), []).append(number)
    known = list(prompts)
    config: Any = model.config
    encoder = model.get_encoder()  # type: ignore[operator]
    first = config.decoder_start_token_id if config.decoder_start_token_id is not None else config.pad_token_id
    found: dict[int, Likelihood] = {}
    for chosen in batches_by_length([len(prompt) for prompt in known], batch):
        ids, mask = _pad([known[n] for n in chosen], _device(model))
        states = encoder(input_ids=ids, attention_mask=mask)[0]
        branches = [(row, number) for row, n in enumerate(chosen) for number in prompts[known[n]]]
        for part in batches_by_length([len(pairs[n][1]) for _, n in branches], batch):
            rows = [branches[place][0] for place in part]
            numbers = [branches[place][1] for place in part]
            inputs, _ = _pad([[first, *pairs[n][1][:-1]] for n in numbers], ids.device)
            logits = model(encoder_outputs=(states[rows],), attention_mask=mask[rows], decoder_input_ids=inputs).logits
            for place, n in enumerate(numbers):
                found[n] = _likelihood(_log_probabilities(logits[place, : len(pairs[n][1])]), pairs[n][1])
    return [found[number] for number in range(len(pairs))]
