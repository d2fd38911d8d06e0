"""The page of a directory of weights: what was merged by which recipe, consistency checks, and its contents."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from merganser.checkpoints import open as open_checkpoint
from merganser.checkpoints.kinds import is_adapter
from merganser.checkpoints.tensor_names import block_of
from merganser.engine.changes import read_changes
from merganser.report import changes
from merganser.report.changes import verdict
from merganser.report.contents import UNFOLDED, Contents, blocks_table, contents, facts, tensors_table
from merganser.report.page import Page
from merganser.report.sidecars import config_table, files_table, read_card, read_json
from merganser.report.tables import Table

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.txt", "vocab.json", "tekken.json")


def fill(page: Page, directory: Path, check: bool) -> dict[str, Any]:
    """Fill the page of a merge, of an adapter, or of any checkpoint directory; `check` reads every weight."""
    adapter = is_adapter(directory)
    # An adapter is shown without its base, which may be elsewhere.
    found = contents(open_checkpoint(next(directory.glob("adapter_model.*")) if adapter else directory), check=check)
    card = read_card(directory)
    noted = read_changes(directory)
    if noted is not None:
        page.text(verdict(noted))
    page.items([*(card.facts() if card else ()), *facts(found)])
    checks = checks_table(directory, found)
    if checks.rows:
        page.add(checks)
    if noted is not None:
        changes.fill(page, noted)
    if card is not None and card.recipe:
        page.heading("Recipe")
        page.code(card.recipe)
    page.heading("Weights")
    page.add(blocks_table(found))
    page.heading("Other files")
    if (config := config_table(directory)) is not None:
        page.add(config)
    page.add(files_table(directory))
    page.heading("Every tensor")
    page.add(tensors_table(found), folded=len(found.tensors) > UNFOLDED)
    return {
        "kind": "adapter" if adapter else "merge" if card else "checkpoint",
        "tensors": len(found.tensors),
        "parameters": found.parameters,
        "bytes": found.nbytes,
        "methods": card.methods if card else None,
        "changed": verdict(noted) if noted else None,
        "checks": {str(row[0]): row[1] == "yes" for row in checks.rows},
    }


def holds_weights(path: Path) -> bool:
    """Return whether a directory has weights of one model in files that can be opened."""
    return path.is_dir() and any(
        next(path.glob(pattern), None)
        for pattern in ("model*.safetensors", "adapter_model.*", "pytorch_model*.bin", "*.safetensors", "*.gguf")
    )


def checks_table(directory: Path, found: Contents) -> Table:
    """Return a table that checks config and tokenizer against the tensors."""
    config = read_json(directory / "config.json")
    rows: list[list[object]] = []
    if isinstance(expected := config.get("num_hidden_layers"), int) and (stacks := _count_layers(found)):
        counted = ", ".join(f"{count} in {stack}" for stack, count in stacks.items())
        rows.append([f"layers: {expected} in config, {counted}", _show_check(expected in stacks.values())])
    embedding = next((t for t in found.tensors if _is_embedding(t.name) and len(t.shape) == 2), None)
    if isinstance(vocabulary := config.get("vocab_size"), int) and embedding is not None:
        rows.append(
            [f"vocabulary: the same in config and {embedding.name}", _show_check(vocabulary == embedding.shape[0])]
        )
    if config.get("vocab_size"):
        rows.append(
            ["tokenizer: its files are there", _show_check(any((directory / name).is_file() for name in _TOKENIZERS))]
        )
    if any(tensor.not_finite is not None for tensor in found.tensors):
        rows.append(["every value is finite", _show_check(not any(tensor.not_finite for tensor in found.tensors))])
    return Table(["check", "holds"], rows, "Checks")


def _count_layers(found: Contents) -> dict[str, int]:
    """Return numbered layers by the name they are numbered under."""
    blocks = dict.fromkeys(block_of(tensor.name) for tensor in found.tensors)
    return Counter(block.rpartition(".")[0] for block in blocks if block.rpartition(".")[2].isdigit())


def _is_embedding(name: str) -> bool:
    return any(part in name for part in ("embed_tokens", "word_embeddings", "wte", "tok_embeddings"))


def _show_check(holds: bool) -> str:
    return "yes" if holds else "NO"
