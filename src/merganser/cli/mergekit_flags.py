"""Options of `mergekit-yaml` on our command line, each with its replacement."""

from __future__ import annotations

from collections.abc import Sequence

from merganser.errors import InputError

_NEEDLESS = "leave it out: "
#: Options of mergekit 0.1, each with its replacement.
FLAGS = {
    "--cuda": "write --device cuda",
    "--gpu-rich": "write --device cuda",
    "--read-to-gpu": "write --device cuda",
    "--multi-gpu": "use --ray to spread a merge over machines, or --device cuda:1 to choose a GPU",
    "--low-cpu-memory": f"{_NEEDLESS}weights are streamed, within --memory",
    "--lazy-unpickle": f"{_NEEDLESS}files are always read lazily, and pickles never run code",
    "--copy-tokenizer": f"{_NEEDLESS}the tokenizer is always copied; output.tokenizer in a recipe chooses another",
    "--no-copy-tokenizer": f"{_NEEDLESS}the tokenizer is always copied; delete its files if you do not want them",
    "--allow-crimes": f"{_NEEDLESS}tensors of equal shape merge across architectures; the plan lists differences",
    "--unsafe-truncate-embeddings": "set output.tokenizer (tokenizer_source) in the recipe: rows are merged by token",
    "--out-shard-size": "write --shard-size SIZE, in bytes such as 5GB",
    "--random-seed": "write --seed N",
    "--trust-remote-code": f"{_NEEDLESS}code of a model is never run",
    "--num-threads": "write --workers N",
    "--write-threads": f"{_NEEDLESS}every worker writes; --workers N sets how many there are",
    "--async-write": f"{_NEEDLESS}writing and computing overlap",
    "--clone-tensors": f"{_NEEDLESS}a layer that is used several times is written several times",
    "--safe-serialization": f"{_NEEDLESS}output is always safetensors",
    "--no-safe-serialization": "load the output and torch.save it, if something needs a pickle: output is safetensors",
    "--write-model-card": f"{_NEEDLESS}a model card is always written",
    "--no-write-model-card": "delete README.md from the output, if you do not want it",
    "--transformers-cache": "set the environment variable HF_HOME",
    "--lora-merge-cache": f"{_NEEDLESS}adapters are applied while weights are read, without a cache",
    "--lora-merge-dtype": f"{_NEEDLESS}adapters are applied in float32 and rounded once",
    "--verbose": f"{_NEEDLESS}`merganser plan RECIPE --tensors` shows what is done to every tensor",
    "--quiet": f"{_NEEDLESS}redirect standard error, or use --json",
}
#: Commands on which people use options of mergekit-yaml.
_COMMANDS = ("merge", "plan")


def refuse_mergekit_flags(words: Sequence[str]) -> None:
    """Raise an error with a hint for every mergekit option among the words of a command line."""
    if not words or words[0] not in _COMMANDS:
        return
    written = [word.partition("=")[0] for word in words[1 : words.index("--") if "--" in words else None]]
    if found := [flag for flag in dict.fromkeys(written) if flag in FLAGS]:
        hints = [f"{flag} is an option of mergekit; {FLAGS[flag]}" for flag in found]
        raise InputError("\n  ".join(hints))
