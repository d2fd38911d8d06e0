"""Map the parameters of a model to a PEFT adapter: low-rank or saved whole.

PEFT adapts Linear layers, GPT-2's Conv1D (stored input × output), embeddings and convolutions, each in its own
orientation, and saves other modules whole. The role of a parameter follows from the model's class if transformers knows
it, else from its name, its shape and the config.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from torch import nn

from merganser.checkpoints.base import Checkpoint
from merganser.checkpoints.json_file import read_config
from merganser.checkpoints.skeleton import find_shared_parameters
from merganser.library.adapter_writing import Orientation, module_of

#: The role of a parameter in an adapter: low-rank in some orientation, or whole.
Role = Orientation | Literal["whole"]
#: Embeddings whose rows are looked up by index only.
_EMBEDDING = re.compile(
    r"(^|\.)(embed|embed_tokens|embed_in|wte|wpe|word_embeddings|token_type_embeddings|position_embeddings|"
    r"tok_embeddings|relative_attention_bias)\.weight$"
)
_TOKENS = re.compile(r"(^|\.)(embed|embed_tokens|embed_in|wte|word_embeddings|tok_embeddings)\.weight$")
#: Other lookups, and positions with a lookup of their own.
_LOOKUP = re.compile(r"embed(?!_out)|(^|\.)(wte|wpe|shared)\.|relative_attention_bias")
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out)\.weight$")
_CONV1D = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")
_LAYERS: dict[str, Orientation] = {
    "Linear": "linear",
    "Conv1D": "turned",
    "Conv1d": "convolution",
    "Conv2d": "convolution",
    "Conv3d": "convolution",
}
#: Suffix of a class name -> PEFT's name of its task.
_TASKS = {
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
    "Model": "FEATURE_EXTRACTION",
}
#: Heads that PEFT saves whole for these tasks.
_CLASSIFIERS = {
    "SEQ_CLS": ("classifier", "score"),
    "TOKEN_CLS": ("classifier", "score"),
    "QUESTION_ANS": ("qa_outputs",),
}


class AdapterModules:
    """The roles of a fine-tuned model's parameters in an adapter of its base.

    Args:
        base: The model the adapter is for.
        tuned: The fine-tuned model, whose config gives the task; if it has none, the base's does.
        fan_in_fan_out: Whether weights are stored input × output; None means decided by the model's class or the
            config.
        model: The modules of the base, if known.
    """

    def __init__(
        self, base: Checkpoint, tuned: Checkpoint, fan_in_fan_out: bool | None = None, model: nn.Module | None = None
    ) -> None:
        config = read_config(tuned.directory) or read_config(base.directory)
        named = config.get("architectures")
        self._architecture = str(named[0]) if isinstance(named, list) and named else ""
        self._model = model if fan_in_fan_out is None else None
        self.fan_in_fan_out = config.get("model_type") in _CONV1D if fan_in_fan_out is None else fan_in_fan_out
        self.task_type = self._find_task(bool(config.get("is_encoder_decoder")))
        self._heads = _CLASSIFIERS.get(self.task_type or "", ())
        names = [*tuned.names(), *base.names()]
        tied = {stored for checkpoint in (base, tuned) for stored in checkpoint.aliases().values()}
        if config.get("tie_word_embeddings", True) and not any(_HEAD.search(name) for name in names):
            tied |= {name for name in names if _TOKENS.search(name)} if self._generates() else set()
        if model is not None:
            tied |= find_shared_parameters(model).keys()
        self._tied = tied

    def role(self, name: str, shape: Sequence[int]) -> Role | None:
        """Return the role of a parameter in an adapter; None if it has none."""
        if self.is_head(name):
            return "whole"
        if name in self._tied:
            return None
        if len(shape) < 2:
            return "whole"
        if not name.endswith(".weight"):
            return None
        kind = self._find_layer(name)
        if kind is not None and not isinstance(kind, nn.Embedding):
            single = getattr(kind, "groups", 1) == 1
            return _LAYERS.get(type(kind).__name__) if single else "whole"
        if len(shape) != 2:
            return None
        if _EMBEDDING.search(name) and type(kind) in (type(None), nn.Embedding):
            return "embedding"
        if _LOOKUP.search(name) or kind is not None:
            return None
        # The head is a Linear layer even in a model that stores its layers as input × output.
        return "turned" if self.fan_in_fan_out and not _HEAD.search(name) else "linear"

    def is_head(self, name: str) -> bool:
        """Return whether a tensor belongs to the head of a classifier."""
        return name.split(".")[0] in self._heads

    def is_norm(self, module: str) -> bool:
        """Return whether a module has only parameters with one axis, so that it is small enough to save whole."""
        layer = self._find_layer(f"{module}.weight")
        return layer is None or all(parameter.dim() < 2 for parameter in layer.parameters())

    def _find_layer(self, name: str) -> nn.Module | None:
        try:
            return self._model.get_submodule(module_of(name)) if self._model is not None else None
        except AttributeError:
            return None

    def _generates(self) -> bool:
        return self.task_type in ("CAUSAL_LM", "SEQ_2_SEQ_LM") or not self._architecture

    def _find_task(self, encoder_decoder: bool) -> str | None:
        """Return PEFT's name of the model's task, or None if it has none."""
        found = next((task for end, task in _TASKS.items() if self._architecture.endswith(end)), None)
        return "CAUSAL_LM" if found == "SEQ_2_SEQ_LM" and not encoder_decoder else found
