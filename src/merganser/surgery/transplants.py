"""Give a model the tokenizer of another one."""

from __future__ import annotations

from dataclasses import replace

from merganser.checkpoints.opening import Reference
from merganser.checkpoints.opening import open as open_checkpoint
from merganser.engine.nested import Merged
from merganser.errors import InputError, one_of
from merganser.recipes.loading import load
from merganser.recipes.planning import prepare
from merganser.recipes.schema import ABSENT, DEFAULT_TERMS, Places


def transplant(
    model: Reference,
    donor: Reference,
    *,
    absent: str = "omp",
    terms: int | None = None,
    pad_to_multiple_of: int | None = None,
) -> Merged:
    """Give a model the tokenizer of another model; its embedding and head get a row per new token.

    Tokens that both have keep the model's rows, matched by the bytes they stand for and special ones by their role.
    The other rows are made by a rule:

    | `absent` | the row of a token that the model does not have |
    |---|---|
    | `omp` | a sparse combination of shared rows: fitted in the donor's embedding, applied to the model's own |
    | `nearest` | the shared row whose direction is most similar in the donor's embedding |
    | `subwords` | the mean of the rows of the pieces that the model's own tokenizer cuts the token into |
    | `weighted_subwords` | the same, weighted by the pieces' lengths in bytes |
    | `mean`, `zero` | the mean row of the model, zeros |

    Args:
        model: The model to change: a path, a hub id or an open checkpoint in a directory with a tokenizer.
        donor: The model whose tokenizer it gets. `omp` and `nearest` read its embedding too.
        absent: The rule.
        terms: How many rows `omp` combines.
        pad_to_multiple_of: Make the number of rows a multiple of this.

    Returns:
        The changed model as a checkpoint, computed as it is read; `mg.save` writes it with its config, the donor's
        tokenizer and chat template, and the numbers of its special tokens.

    Raises:
        InputError: If a tokenizer is missing or the vocabularies share too little for the rule; before any work.

    Example:
        >>> mg.save(mg.surgery.transplant("SmolLM2-135M", "Llama-3.2-1B"), "out/")  # doctest: +SKIP
    """
    one_of("rule for absent tokens", absent, ABSENT)
    if terms is not None and absent != "omp":
        raise InputError(f"terms={terms} is for absent='omp'; absent={absent!r} does not combine rows")
    changed, source = open_checkpoint(model), open_checkpoint(donor)
    if changed.label == source.label:
        raise InputError(f"{changed.label} is both the model and the donor; name another model as the donor")
    options = {"source": source.label, "absent": absent, "pad_to_multiple_of": pad_to_multiple_of}
    if absent == "omp":
        options["terms"] = DEFAULT_TERMS if terms is None else terms
    document = {"method": "passthrough", "models": [changed.label], "output": {"tokenizer": options}}
    opened = {changed.label: changed, source.label: source}
    places = Places({"output.tokenizer": f"the tokenizer of {source.label} for {changed.label}"})
    prepared = prepare(replace(load(document, held=opened), places=places), opened.__getitem__)
    return Merged(prepared, f"{changed.label} with the tokenizer of {source.label}")
