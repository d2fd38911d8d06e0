"""One model in memory that is loaded with any recipe, and generates, answers and scores text.

The mixer, the comparison, the grid and the landscape are all this: a list of recipes, each merged into the same live
module, of which only the tensors that differ from the last one are computed.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from merganser.errors import InputError, require
from merganser.studio.machine import free_memory
from merganser.studio.questions import Questions
from merganser.studio.roots import Roots
from merganser.units import show_size

if TYPE_CHECKING:
    from merganser.checkpoints.base import Checkpoint
    from merganser.engine.live import LiveModule
    from merganser.engine.merge import Merge

PlayedEvent = dict[str, Any]
#: Share of the free memory that a float32 model may take; a larger model keeps its own dtype.
_ROOM = 0.5
#: The share of the free memory in which thinned task vectors are kept.
_KEPT = 0.25


@dataclass(frozen=True)
class Prompt:
    """A prompt and generation settings. A temperature of 0 always takes the most likely token."""

    text: str
    tokens: int = 48
    temperature: float = 0.0
    seed: int = 0
    chat: bool = False


@dataclass
class _Live:
    """The module in memory, its purpose, and the checkpoints it was filled from."""

    live: LiveModule
    tokenizer: Any
    kind: str
    config: str
    directory: Path
    sources: dict[str, Checkpoint]


class Player:
    """Plays recipes on one live model; a new request ends the previous one.

    Args:
        roots: The directories that models come from.
        device: Where the model computes.
    """

    def __init__(self, roots: Roots, device: str = "cpu") -> None:
        self._roots = roots
        self._device = device
        self._lock = threading.Lock()
        self._turn = 0
        self._now: _Live | None = None

    def describe(self) -> dict[str, Any]:
        """Return what is in memory."""
        now = self._now
        if now is None:
            return {"loaded": False}
        tensors = list(now.live.module.parameters())
        return {
            "loaded": True,
            "kind": now.kind,
            "parameters": sum(t.numel() for t in tensors),
            "bytes": sum(t.numel() * t.element_size() for t in tensors),
        }

    def free(self) -> None:
        """Release the model."""
        with self._lock:
            self._turn += 1
            self._now = None

    def play(
        self,
        documents: Sequence[Mapping[str, Any]],
        prompt: Prompt | None = None,
        texts: Sequence[str] = (),
        compare: bool = False,
        questions: Questions | None = None,
    ) -> Iterator[PlayedEvent]:
        """Merge one recipe after the other and let each generate text.

        Args:
            documents: Native recipes, as data.
            prompt: What each is asked; nothing if there is none.
            texts: Texts to score: the mean loss per token, in nats.
            compare: Score what the first model writes, token by token, with every model.
            questions: A file of questions that each is asked.

        Yields:
            Events, each with the `index` of its recipe: `merged`, `token`, `classes`, `loss`, `likelihood`, `score`
            (again and again, with what is answered so far), `end`.

        Raises:
            InputError: If a recipe is wrong, its model cannot be played, or a later request took the model.
        """
        with self._lock:
            self._turn += 1
            turn = self._turn
        reference: str | None = None
        for index, document in enumerate(documents):
            yield {"index": index, **self._run_in_turn(turn, lambda document=document: self._load(document))}
            said = ""
            if prompt is not None:
                for event in self._speak(turn, prompt):
                    said += event.get("text", "")
                    yield {"index": index, **event}
            if compare and prompt is not None and (reference := said if reference is None else reference):
                found = self._run_in_turn(turn, lambda text=reference: self._likelihood(text, prompt))
                yield {"index": index, "event": "likelihood", "tokens": found}
            if texts:
                loss = self._run_in_turn(turn, lambda: self._loss(texts))
                yield {"index": index, "event": "loss", "loss": loss}
            if questions is not None:
                yield from ({"index": index, **event} for event in self._score(turn, questions))
            yield {"index": index, "event": "end"}

    def _run_in_turn(self, turn: int, work: Any) -> Any:
        """Run one step of a request, unless a later request has come. The lock is not held while the client reads."""
        with self._lock:
            if turn != self._turn:
                raise InputError("the model went to another page, or was freed: ask again")
            return work()

    def _load(self, document: Mapping[str, Any]) -> PlayedEvent:
        from merganser.recipes.planning import prepare

        began, worked = time.perf_counter(), time.process_time()
        opened: dict[str, Checkpoint] = {}

        def remember(reference: str) -> Checkpoint:
            opened[reference] = self._roots.open(reference)
            return opened[reference]

        merge = prepare(self._roots.load(document), remember)
        now = self._now = self._module(merge, opened)
        changed = now.live.load(merge)
        now.live.finite = True
        return {
            "event": "merged",
            "tensors": len(changed),
            "of": len(merge.plan.outputs),
            "seconds": round(time.perf_counter() - began, 4),
            "processor": round(time.process_time() - worked, 4),
        }

    def _module(self, merge: Merge, opened: Mapping[str, Checkpoint]) -> _Live:
        """Return the module in memory if it fits the merge, else a new one, in float32 if that fits into memory."""
        from merganser.engine.live import LiveModule
        from merganser.evaluate.language import kind_of_model
        from merganser.evaluate.loaders import Loader

        directory = merge.sources[0].directory
        kind = kind_of_model(directory)
        if directory is None or kind not in ("causal-lm", "sequence-classification"):
            raise InputError(
                f"{merge.sources[0].label}: the mixer needs a language model or a text classifier with its config.json "
                "and tokenizer; this one can be merged, but not played"
            )
        config = (directory / "config.json").read_text(encoding="utf-8")
        now = self._now
        if now is not None and now.config == config:
            stale = any(now.sources.get(name, checkpoint) is not checkpoint for name, checkpoint in opened.items())
            live = LiveModule(now.live.module, room=int(_KEPT * free_memory()[0])) if stale else now.live
            live.finite = live.finite and opened.keys() <= now.sources.keys()
            return _Live(live, now.tokenizer, kind, config, directory, {**now.sources, **opened})
        self._now = None  # two models need not be in memory at once
        size = sum(output.spec.numel for output in merge.plan.outputs)
        available, _ = free_memory()
        if merge.plan.bytes_out > available:
            raise InputError(f"the model needs {show_size(merge.plan.bytes_out)}, and {show_size(available)} are free")
        tokenizer = load_tokenizer(directory)
        module = Loader(kind, str(directory), self._device)().eval().requires_grad_(False)
        if 4 * size <= _ROOM * available:
            module = module.float()
        live = LiveModule(module, room=int(_KEPT * free_memory()[0]))
        return _Live(live, tokenizer, kind, config, directory, dict(opened))

    def _speak(self, turn: int, prompt: Prompt) -> Iterator[PlayedEvent]:
        assert self._now is not None
        if self._now.kind != "causal-lm":
            yield self._run_in_turn(turn, lambda: self._classify(prompt.text))
            return
        state = self._run_in_turn(turn, lambda: _Decoding(self._now, prompt))
        for _ in range(prompt.tokens):
            piece = self._run_in_turn(turn, state.step)
            if piece is None:
                return
            if piece:
                yield {"event": "token", "text": piece}

    def _score(self, turn: int, questions: Questions) -> Iterator[PlayedEvent]:
        """Answers to a few questions at a time, so that a later request does not wait for all of them."""
        assert self._now is not None
        module, directory = self._now.live.module, self._now.directory
        quiz = self._run_in_turn(turn, lambda: questions.open(directory))
        wanted = "sequence-classification" if quiz.kind == "classification" else "causal-lm"
        if self._now.kind != wanted:
            asked = "text classifiers" if quiz.kind == "classification" else "language models"
            raise InputError(f"{questions.path.name}: questions of kind {quiz.kind} are for {asked}")
        answers: list[float] = []
        for part in quiz.parts():
            answers += self._run_in_turn(turn, lambda part=part: quiz.ask(module, part))
            yield {"event": "score", **quiz.describe(answers)}

    def _classify(self, text: str) -> PlayedEvent:
        import torch

        assert self._now is not None
        module: Any = self._now.live.module
        with torch.inference_mode():
            logits = module(**self._now.tokenizer(text, return_tensors="pt").to(self._device)).logits[0]
        names = module.config.id2label
        rows = [[str(names[i]), float(p)] for i, p in enumerate(logits.float().softmax(-1))]
        return {"event": "classes", "classes": sorted(rows, key=lambda row: -row[1])}

    def _loss(self, texts: Sequence[str]) -> float:
        """Return the mean negative log-likelihood per token over all texts."""
        rows = [self._likelihood(text) for text in texts]
        values: list[float] = [-row[1] for found in rows for row in found if row[1] is not None]
        if not values:
            raise InputError("the texts to score have less than two tokens")
        return sum(values) / len(values)

    def _likelihood(self, text: str, after: Prompt | None = None) -> list[list[Any]]:
        """Return every token of a text with its log-probability; the first has none unless it follows a prompt."""
        import torch

        assert self._now is not None
        if self._now.kind != "causal-lm":
            raise InputError("only language models give texts a likelihood")
        tokenizer = self._now.tokenizer
        before = _encode(tokenizer, after) if after else []
        own = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = torch.tensor([[*before, *own]], device=self._device)
        with torch.inference_mode():
            logits = self._now.live.module(ids).logits[0, :-1].float().log_softmax(-1)
        chosen = [None, *logits.gather(1, ids[0, 1:, None])[:, 0].tolist()][len(before) :]
        return [[piece, value] for piece, value in zip(split_pieces(tokenizer, own), chosen, strict=True)]


class _Decoding:
    """A reply that is generated token by token."""

    def __init__(self, now: _Live | None, prompt: Prompt) -> None:
        import torch

        assert now is not None
        self._module, self._tokenizer = now.live.module, now.tokenizer
        self._random = torch.Generator().manual_seed(prompt.seed)
        self._temperature = prompt.temperature
        ids = _encode(now.tokenizer, prompt)
        self._next = torch.tensor([ids], device=next(now.live.module.parameters()).device)
        self._cache: Any = None
        self._ids = ids
        self._shown = str(now.tokenizer.decode(ids, skip_special_tokens=True))
        ends = getattr(getattr(now.live.module, "generation_config", None), "eos_token_id", None)
        self._ends = {now.tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}

    def step(self) -> str | None:
        """Return the text that the next token adds, which may be empty; None at the end."""
        import torch

        with torch.inference_mode():
            out = self._module(self._next, past_key_values=self._cache, use_cache=True)
            self._cache, logits = out.past_key_values, out.logits[0, -1].float()
            if self._temperature > 0:
                shares = (logits / self._temperature).softmax(-1).cpu()
                token = int(torch.multinomial(shares, 1, generator=self._random))
            else:
                token = int(logits.argmax())
        if token in self._ends:
            return None
        self._ids.append(token)
        self._next = torch.tensor([[token]], device=self._next.device)
        text = str(self._tokenizer.decode(self._ids, skip_special_tokens=True))
        if text.endswith("\ufffd"):  # an incomplete character
            return ""
        new, self._shown = text[len(self._shown) :], text
        return new


def split_pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return what every token adds to a text. Decoded alone, tokens of some tokenizers lose their leading space."""
    texts = ["", *(str(tokenizer.decode(ids[: end + 1])) for end in range(len(ids)))]
    complete = [text.rstrip("\ufffd") for text in texts]
    return [now[len(before) :] for before, now in itertools.pairwise(complete)]


def _encode(tokenizer: Any, prompt: Prompt) -> list[int]:
    if prompt.chat and tokenizer.chat_template:
        talk = [{"role": "user", "content": prompt.text}]
        text = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    ids = list(tokenizer(prompt.text)["input_ids"])
    if not ids:
        raise InputError("the prompt is empty")
    return ids


def load_tokenizer(directory: Path) -> Any:
    """Return the tokenizer beside a model, never from the network.

    Raises:
        InputError: If there is none, or it cannot be read.
    """
    tokenizers = require("transformers", "hf").AutoTokenizer
    try:
        return tokenizers.from_pretrained(str(directory), local_files_only=True)
    except Exception as error:  # transformers raises many kinds
        reason = (str(error).strip().splitlines() or [""])[0].rstrip(": ")
        raise InputError(f"{directory.name}: it has no tokenizer that transformers can load ({reason})") from None
