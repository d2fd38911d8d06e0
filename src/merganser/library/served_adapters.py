"""Tell whether vLLM loads an adapter, by the limits of its loader.

vLLM reads PEFT's files, but only low-rank updates of linear layers, all of one rank.
https://docs.vllm.ai/en/latest/features/lora.html
"""

from __future__ import annotations

import os
from pathlib import Path

from merganser.checkpoints.adapter_file import PREFIX
from merganser.checkpoints.json_file import read_object
from merganser.checkpoints.kinds import ADAPTER_CONFIG
from merganser.checkpoints.safetensors_file import SafetensorsFile
from merganser.library.adapter_writing import WEIGHTS

#: What `--max-lora-rank` may be.
MAX_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def vllm_options(adapter: str | os.PathLike[str]) -> str:
    """Return the options of `vllm serve` that an adapter needs.

    Args:
        adapter: The directory of a PEFT adapter.
    """
    rank = int(read_object(Path(adapter) / ADAPTER_CONFIG)["r"])
    return f"--enable-lora --max-lora-rank {next(most for most in MAX_RANKS if most >= rank)}"


def vllm_objections(adapter: str | os.PathLike[str]) -> list[str]:
    """Return why vLLM does not load an adapter; empty if it knows the base's architecture and loads it.

    Args:
        adapter: The directory of a PEFT adapter, with weights in safetensors.
    """
    config, file = read_object(Path(adapter) / ADAPTER_CONFIG), SafetensorsFile(Path(adapter) / WEIGHTS)
    found = []
    if config.get("peft_type", "LORA") != "LORA":
        found.append(f"it is of kind {config['peft_type']}, not LORA")
    found += [f"its config has {key}" for key in ("modules_to_save", "use_dora") if config.get(key)]
    if (bias := config.get("bias", "none")) != "none":
        found.append(f"its config has bias: {bias}")
    if config["r"] > MAX_RANKS[-1]:
        found.append(f"its rank is {config['r']}, and at most {MAX_RANKS[-1]} is possible: write it with a lower rank")
    if config.get("rank_pattern") or config.get("alpha_pattern"):
        found.append("its modules have different ranks, and vLLM reads one: write it with one rank")
    names = file.names()
    kinds = {
        "whole weights, which low_rank_only leaves out": [name for name in names if ".lora_" not in name],
        "embeddings": [name for name in names if ".lora_embedding_" in name],
        "convolutions": [name for name in names if ".lora_" in name and len(file.spec(name).shape) > 2],
    }
    found += [
        f"{own[0].removeprefix(PREFIX)!r} is one of {len(own)} tensors of {kind}" for kind, own in kinds.items() if own
    ]
    return found
