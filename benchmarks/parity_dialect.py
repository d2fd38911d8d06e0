"""Does a recipe in mergekit's dialect mean the same in both programs? Every method with every parameter.

    python -m benchmarks.parity_dialect --mergekit BIN [--json FILE] [--markdown]

BIN is the bin directory of an environment with mergekit. Each case runs through both. It is

- `same` if the results are equal, or both refuse;
- `noted` if they are not, and our plan has a note about it;
- `silent` if they differ and nothing is said: a defect.

Methods that drop at random are compared at density 1, where nothing is drawn; at other densities it is only checked
that the parameter acts in both. Takes about two minutes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import merganser as mg
from benchmarks.machine import describe
from benchmarks.parity import AGREE, Document, difference, make_models, parse_options, run_peer
from benchmarks.records import record
from merganser import recipes
from merganser.errors import InputError
from merganser.methods.registry import aliases, lookup, parameters
from merganser.recipes.mergekit_parameters import ACTING, KNOWN

#: A value that shows for each parameter, truth values apart, which are tried both ways.
VALUES: dict[str, Any] = {
    "weight": 0.3, "density": 0.5, "epsilon": 0.01, "gamma": 0.05, "lambda": 0.5, "t": 0.3, "scale": 0.5, "eps": 0.1,
    "select_topk": 0.4, "max_iter": 1, "tol": 0.1, "r": 0.3, "alpha": 0.5, "iterations": 1, "tolerance": 0.1,
    "scope": "global",
}  # fmt: skip
DRAWN = ("dare_linear", "dare_ties", "della", "della_linear")
#: Models besides the base, where not two.
ONE = ("slerp", "nearswap", "arcee_fusion")


def plain(method: str, base: str, models: list[str]) -> Document:
    """Return a recipe of the method with as little as it needs."""
    if method == "passthrough":
        return {"merge_method": method, "models": [{"model": models[0]}], "dtype": "float32"}
    named = models[: 1 if method in ONE else 2]
    entries: list[Document] = [{"model": model, "parameters": {}} for model in named]
    if "weight" in ACTING[method]:
        for entry, weight in zip(entries, (0.4, 0.7), strict=False):
            entry["parameters"]["weight"] = weight
    if method == "slerp":
        entries.insert(0, {"model": base, "parameters": {}})
    shared = {"t": 0.6 if method == "slerp" else 0.001} if "t" in ACTING[method] else {}
    found = {"merge_method": method, "models": entries, "parameters": shared, "dtype": "float32"}
    return found if method in ("linear", "karcher") else found | {"base_model": base}


def changed(document: Document, name: str, value: Any) -> Document:
    """Return the recipe with a parameter set, beside the models where they have it already."""
    beside = any(name in entry.get("parameters", {}) for entry in document["models"])
    if not beside:
        return document | {"parameters": {**document.get("parameters", {}), name: value}}
    first, *others = document["models"]
    return document | {"models": [first | {"parameters": {**first["parameters"], name: value}}, *others]}


def parameter_cases(base: str, models: list[str]) -> Iterator[tuple[str, str, Document]]:
    """Yield every method with every name a parameter could have: mergekit's and ours."""
    for method in ACTING:
        document = plain(method, base, models)
        yield method, "", document
        for name in sorted({*KNOWN, *parameters(lookup(method)), *aliases(lookup(method))}):
            for value in [VALUES[name]] if name in VALUES else [True, False]:
                yield method, f"{name}: {value}".lower(), changed(document, name, value)


def other_cases(base: str, models: list[str], narrow: str) -> Iterator[tuple[str, str, Document]]:
    """Yield what is not a matter of one parameter: defaults, places, spellings, dtypes, the base."""
    a, b, *_ = models
    linear = plain("linear", base, models)
    ties = plain("ties", base, models)
    bare = [{"model": a}, {"model": b}]
    mlp = [{"filter": "mlp", "value": 0.2}]
    yield "linear", "no weight", linear | {"models": bare}
    yield "ties", "no weight", ties | {"models": bare}
    yield "linear", "weight for all", linear | {"models": bare, "parameters": {"weight": 0.5}}
    yield "linear", "filters without a default", changed(linear, "weight", mlp)
    yield "linear", "filters with a default", changed(linear, "weight", [*mlp, {"value": 0.7}])
    yield "linear", "filters, default for all", changed(linear, "weight", mlp) | {"parameters": {"weight": 0.5}}
    yield "ties", "density by filters without a default", changed(ties, "density", mlp)
    yield "ties", "density as a gradient", changed(ties, "density", [0.2, 0.9, 0.4])
    yield "ties", "normalize as a gradient", changed(ties, "normalize", [True, False])
    yield (
        "ties",
        "normalize beside a model",
        ties | {"models": [_beside(bare[0], normalize=False, weight=1), *ties["models"][1:]]},
    )
    yield "ties", "numbers in quotes", changed(changed(ties, "density", "0.5"), "normalize", "false")
    yield "ties", "the base among the models", ties | {"models": [{"model": base}, *ties["models"]]}
    yield "linear", "an unlisted base", linear | {"base_model": base}
    yield (
        "linear",
        "an unlisted base, weight for all",
        linear | {"base_model": base, "models": bare, "parameters": {"weight": 1}},
    )
    yield "karcher", "an unlisted base", plain("karcher", base, models) | {"base_model": base}
    for key, value in {"int8_mask": True, "normalize": False, "pad_to_multiple_of": 64, "embed_slerp": True}.items():
        yield "ties", f"{key} at the top", ties | {key: value}
    yield "linear", "x-anchors at the top", linear | {"x-shared": {"weight": 1}}
    for method in ("ties", "linear", "karcher"):
        document = {key: value for key, value in plain(method, base, models).items() if key != "dtype"}
        mixed = [document["models"][0], document["models"][1] | {"model": narrow}]
        yield method, "no dtype, a bfloat16 model", document | {"models": mixed}
    document = {key: value for key, value in ties.items() if key != "dtype"}
    yield "ties", "no dtype, a bfloat16 base", document | {"base_model": narrow}
    whole = {"merge_method": "passthrough", "dtype": "float32"}
    for layers in ([0.0, 2.0], ["0", "2"]):
        yield (
            "passthrough",
            f"layer_range {layers}",
            whole | {"slices": [{"sources": [{"model": a, "layer_range": layers}]}]},
        )


def _beside(entry: Document, **own: Any) -> Document:
    return entry | {"parameters": own}


def outcome(document: Document, out: Path) -> tuple[Path | None, tuple[str, ...]]:
    """Run a recipe here: the result, or None if it is refused, and the notes of its plan."""
    try:
        notes = recipes.plan(recipes.load(document)).notes
        return mg.run(document, out), notes
    except InputError as error:
        return None, (str(error),)


def same_dtypes(ours: Path, theirs: Path) -> bool:
    a, b = mg.open(ours), mg.open(theirs)
    return all(a.spec(name).dtype == b.spec(name).dtype for name in b.names())


Result = tuple[Path | None, Path | None]


def judge(found: Result, plain: Result | None, base: Path, notes: tuple[str, ...]) -> dict[str, Any]:
    """Compare one case; with the `plain` results given, only whether both programs depart from theirs."""
    ours, theirs = found
    gap = None
    if ours is None or theirs is None:
        equal = ours is theirs
    elif plain is not None:
        acts = [a is not None and b is not None and difference(a, b, base)["of_weight"] > AGREE
                for a, b in zip(found, plain, strict=True)]  # fmt: skip
        equal = all(acts)
    else:
        gap = difference(ours, theirs, base)["of_weight"]
        equal = gap <= AGREE and same_dtypes(ours, theirs)
    verdict = "same" if equal else "noted" if notes or ours is None else "silent"
    return {"verdict": verdict, "gap": gap, "refused": [ours is None, theirs is None], "notes": len(notes)}


def compare(mergekit: Path, directory: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Run all cases through both programs: method -> case -> verdict."""
    base, *models = make_models(directory)
    narrow = directory / "narrow"
    narrow.mkdir()
    (narrow / "config.json").write_bytes((models[1] / "config.json").read_bytes())
    tensors = load_file(models[1] / "model.safetensors")
    save_file({k: v.to(torch.bfloat16) for k, v in tensors.items()}, narrow / "model.safetensors", {"format": "pt"})
    named = str(base), [str(model) for model in models]
    cases = {(m, c): d for m, c, d in (*parameter_cases(*named), *other_cases(*named, str(narrow)))}
    keys = {"|".join(key): key for key in cases}
    jobs = {name: (cases[key], str(directory / f"theirs-{i}")) for i, (name, key) in enumerate(keys.items())}
    failures = run_peer(mergekit, directory, jobs)
    results: dict[str, dict[str, dict[str, Any]]] = {}
    plain_results: dict[str, Result] = {}
    for i, (name, (method, case)) in enumerate(keys.items()):
        ours, notes = outcome(cases[method, case], directory / f"ours-{i}")
        found = ours, None if name in failures else directory / f"theirs-{i}"
        plain_results.setdefault(method, found)
        drawn = method in DRAWN and case.startswith("density")
        verdict = judge(found, plain_results[method] if drawn else None, base, notes)
        results.setdefault(method, {})[case or "nothing else"] = verdict
    return results


def main() -> None:
    if (options := parse_options(__doc__)) is None:
        return
    with tempfile.TemporaryDirectory() as temporary:
        results = compare(options.mergekit, Path(temporary))
    line = "| {} | {} | {} | {} | {} |" if options.markdown else "{:<18}{:>6}{:>6}{:>7}  {}"
    print(describe())
    for method, cases in results.items():
        verdicts = [case["verdict"] for case in cases.values()]
        others = [f"{case} ({found['verdict']})" for case, found in cases.items() if found["verdict"] != "same"]
        counts = [verdicts.count(verdict) for verdict in ("same", "noted", "silent")]
        print(line.format(method, *counts, ", ".join(others)))
    record(options.json, results, [0])


if __name__ == "__main__":
    main()
