"""Where the tensors of a model go in a PEFT adapter: which are low-rank, which are saved whole, and how.

PEFT adapts Linear layers, GPT-2's Conv1D (stored input × output) and embeddings, each in its own orientation, and
saves the head of a classifier whole. What a tensor is follows from its name and the configs: no model is built.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from merganser.checkpoints.base import Checkpoint
from merganser.checkpoints.json_file import read_config

#: A Linear layer; one stored input × output; an embedding; a head that is saved whole.
Role = Literal["linear", "turned", "embedding", "whole"]
#: Embeddings whose rows are looked up by number alone.
_EMBEDDING = re.compile(
    r"(^|\.)(embed|embed_tokens|embed_in|wte|wpe|word_embeddings|token_type_embeddings|position_embeddings|"
    r"tok_embeddings|relative_attention_bias)\.weight$"
)
_TOKENS = re.compile(r"(^|\.)(embed|embed_tokens|embed_in|wte|word_embeddings|tok_embeddings)\.weight$")
#: Other lookups, and positions that a model looks up in its own way.
_LOOKUP = re.compile(r"embed(?!_out)|(^|\.)(wte|wpe|shared)\.|relative_attention_bias")
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out)\.weight$")
_CONV1D = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")
#: The end of a class's name -> PEFT's word for its task.
_TASKS = {
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
    "Model": "FEATURE_EXTRACTION",
}
#: Heads that PEFT saves whole with these tasks.
_CLASSIFIERS = {
    "SEQ_CLS": ("classifier", "score"),
    "TOKEN_CLS": ("classifier", "score"),
    "QUESTION_ANS": ("qa_outputs",),
}


class AdapterModules:
    """How the tensors of a fine-tuned model fit an adapter of its base.

    Args:
        base: The model the adapter is for.
        tuned: The fine-tuned model, whose config says what it is for; the base's does if it has none.
        fan_in_fan_out: Whether weights are stored input × output; None asks the config.
    """

    def __init__(self, base: Checkpoint, tuned: Checkpoint, fan_in_fan_out: bool | None = None) -> None:
        config = read_config(tuned.directory) or read_config(base.directory)
        named = config.get("architectures")
        self._architecture = str(named[0]) if isinstance(named, list) and named else ""
        self.fan_in_fan_out = config.get("model_type") in _CONV1D if fan_in_fan_out is None else fan_in_fan_out
        self.task_type = self._task(bool(config.get("is_encoder_decoder")))
        self._heads = _CLASSIFIERS.get(self.task_type or "", ())
        names = [*tuned.names(), *base.names()]
        tied = {stored for checkpoint in (base, tuned) for stored in checkpoint.aliases().values()}
        if config.get("tie_word_embeddings", True) and not any(_HEAD.search(name) for name in names):
            tied |= {name for name in names if _TOKENS.search(name)} if self._generates() else set()
        self._tied = tied
        # Checkpoints of a bare GPT-2 or BLOOM lack what their classes with a head put before every name.
        bare = any(name.startswith("h.0.") for name in names)
        self.prefix = "transformer." if bare and self.task_type not in (None, "FEATURE_EXTRACTION") else ""

    def role(self, name: str, shape: Sequence[int]) -> Role | None:
        """Return what a tensor is to an adapter; None if it has no place in one."""
        if self.is_head(name):
            return "whole"
        if len(shape) != 2 or not name.endswith(".weight") or name in self._tied:
            return None
        if _EMBEDDING.search(name):
            return "embedding"
        if _LOOKUP.search(name):
            return None
        if not self.fan_in_fan_out:
            return "linear"
        # PEFT turns Conv1D alone, readers of the file turn all of it: a Linear head fits no such adapter.
        return None if _HEAD.search(name) else "turned"

    def is_head(self, name: str) -> bool:
        """Whether a tensor belongs to the head of a classifier."""
        return name.split(".")[0] in self._heads

    def _generates(self) -> bool:
        return self.task_type in ("CAUSAL_LM", "SEQ_2_SEQ_LM") or not self._architecture

    def _task(self, encoder_decoder: bool) -> str | None:
        """Return PEFT's word for what the model is for, or None if it has none."""
        found = next((task for end, task in _TASKS.items() if self._architecture.endswith(end)), None)
        return "CAUSAL_LM" if found == "SEQ_2_SEQ_LM" and not encoder_decoder else found
