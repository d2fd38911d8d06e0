"""Every kind of file the product reads: a valid example of it, and what reads it."""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

import merganser as mg
from fuzz import seeds
from fuzz.harness import Silent, Target
from fuzz.mutations import mutate
from fuzz.studies import irt_file, prepared_study, read_design, read_study, study_file
from merganser import recipes
from merganser.align.records import Record
from merganser.checkpoints.safetensors_file import SafetensorsFile
from merganser.engine.changes import Change, Changes, read_changes
from merganser.engine.disk import Disk
from merganser.errors import CheckpointError, MerganserError
from merganser.evaluate.models import Evaluation, Scores
from merganser.evaluate.records import read_records
from merganser.evaluate.search import Rung
from merganser.evaluate.verdicts import Check
from merganser.evolve import loading
from merganser.evolve.intervals import Interval
from merganser.evolve.irt.model import IRT
from merganser.library.codes.coding import Delta, encode
from merganser.library.codes.levels import Levels
from merganser.library.codes.mixed_factors import MixedFactors
from merganser.library.codes.signs import Signs
from merganser.library.expert_file import ExpertFile
from merganser.library.library import Library
from merganser.library.masks import MaskLibrary
from merganser.report.directories import report
from merganser.report.evaluations import fill_file
from merganser.report.page import Page
from merganser.tuning.autopilot.answers import AnswerJournal
from merganser.tuning.autopilot.budgets import Budget, Meter
from merganser.tuning.autopilot.decisions import Challenge, Decision
from merganser.tuning.autopilot.looking import Remark
from merganser.tuning.score_journal import ScoreJournal

CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 6, "num_hidden_layers": 1}
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [{"id": 5, "content": "<x>", "special": True, "normalized": False, "single_word": False}],
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "c": 2, "d": 3, "e": 4}, "merges": []},
}
#: The journal of an interrupted merge as it is; anything else is a seed for damage to it.
WHOLE = b"whole" * 20
#: Why we refuse a header that the reference library takes: two meanings, or nothing that torch could hold.
STRICTER = re.compile(r"is repeated|cannot be read|too large for any tensor|is malformed|digits")


def weights(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {
        "model.embed_tokens.weight": torch.full((6, 4), value),
        "model.layers.0.mlp.weight": torch.full((4, 4), value),
        "model.norm.weight": torch.full((4,), value),
    }


def noted_changes() -> bytes:
    merged = Change("ties", 100, (0, 1), True, (50.0, 12.0, 1.0, 1.1, 0.2, 0.1, 0.3, 0.05, 0.1, 0.2))
    return Changes(("a", "b"), {"w": merged, "steps": Change("copied", 1, (0,))}).to_bytes()


def evaluated() -> bytes:
    checks = (Check("weights", "pass", "2 tensors, all finite"),)
    scores = Scores(12.5, {"quiz": 0.75})
    found = Evaluation("merged", "sound", checks, scores, {"a": Scores(14.0, {"quiz": 0.5})}, 1.5, {"quiz": 20})
    return json.dumps(found.to_dict()).encode()


def locked() -> dict[str, bytes]:
    """A merge with its lock file, and one of its sources merged before."""
    with tempfile.TemporaryDirectory() as made:
        place = Path(made)
        write(place, model("a") | model("b", 2.0))
        for other, out in (("b", "first"), ("first", "out")):
            mg.run(recipes.load({"method": "linear", "models": ["a", other]}, place), place / out)
        return files_of(place)


def read_locked(directory: Path) -> None:
    mg.origin.verify(directory / "out")
    mg.origin.trace(directory / "out", root=directory).lines()
    mg.origin.rebuild(directory / "out", root=directory, workers=1)


def saved(value: float = 1.0, **metadata: str) -> bytes:
    return bytes(save(weights(value), {"format": "pt", **metadata}))


def dumped(value: Any) -> bytes:
    return json.dumps(value).encode()


def model(name: str, value: float = 1.0) -> dict[str, bytes]:
    return {
        f"{name}/model.safetensors": saved(value),
        f"{name}/config.json": dumped(CONFIG),
        f"{name}/tokenizer.json": dumped(TOKENIZER),
    }


def recipe(text: str) -> dict[str, bytes]:
    return {"recipe.yml": text.encode()}


def read_all(reference: Path | str) -> None:
    opened = mg.open(reference)
    for name in opened.names():
        opened.read(name)
    opened.fingerprint()


def merge(directory: Path) -> None:
    mg.run(directory / "recipe.yml", directory / "out", workers=1)


def plan(directory: Path) -> None:
    each(directory, "recipe", lambda file: recipes.plan(recipes.load(file)))


def both(stem: str, text: str) -> dict[str, bytes]:
    """A YAML document as it is written, and as JSON, which is YAML too and can be damaged by its structure."""
    return {f"{stem}.yml": text.encode(), f"{stem}.json": dumped(yaml.safe_load(text))}


def each(directory: Path, stem: str, read: Callable[[Path], object]) -> None:
    for end in ("yml", "json"):
        read(directory / f"{stem}.{end}")


def compare_with_safetensors(directory: Path) -> None:
    """What the reference library rejects is rejected, and what it takes is taken but for a few good reasons."""
    file = directory / "x.safetensors"
    try:
        with safe_open(file, "pt") as opened:
            names = set(opened.keys())
        reason = None
    except (SafetensorError, OSError, ValueError, OverflowError) as error:
        names, reason = set(), str(error)
    try:
        ours = SafetensorsFile(file)
    except CheckpointError as error:
        if reason is None and not STRICTER.search(str(error)):
            raise Silent(f"refused what the reference library takes: {error}") from None
        raise
    if reason is not None:
        raise Silent(f"accepted what the reference library rejects: {reason}")
    if set(ours.names()) != names:
        raise Silent(f"read {sorted(ours.names())}, the reference library {sorted(names)}")
    read_all(file)


def read_library(directory: Path) -> None:
    library = Library(directory / "lib")
    library.verify()
    for name in library.experts:
        read_all(directory / "lib" / "experts" / f"{name}.safetensors")
    for name in list(library.experts)[:1]:
        library.remove(name)


def codes() -> dict[str, bytes]:
    """An expert in every code and what it shares, without the library whose checksums would refuse any damage."""
    shapes = {name: tensor.shape for name, tensor in weights().items()}
    deltas = {name: Delta(torch.arange(1.0, 1 + shape.numel()).reshape(shape)) for name, shape in shapes.items()}
    blobs = [
        encode(deltas[name], code).blob
        for name, code in zip(shapes, (Levels(1.0), MixedFactors(2), Signs()), strict=True)
    ]
    stored = [torch.frombuffer(bytearray(blob), dtype=torch.uint8) for blob in blobs]
    parts = ("::code", "::code", "::residual")
    expert = {name + part: blob for name, part, blob in zip(shapes, parts, stored, strict=True)}
    metadata = {"dropped": '{"model.other": 0.5}'}
    shared = {"model.norm.weight::code": stored[2]}
    return {"shared.safetensors": bytes(save(shared)), "math.safetensors": bytes(save(expert, metadata))}


def read_codes(directory: Path) -> None:
    file = ExpertFile(directory / "math.safetensors", ExpertFile(directory / "shared.safetensors"))
    for name, tensor in weights().items():
        if name in file.kinds and file.kinds[name] != "full" and file.fits(name, tuple(tensor.shape)):
            file.added_to(tensor, name)


def read_masks(directory: Path) -> None:
    library = MaskLibrary(directory / "masks")
    for name in library.experts:
        expert = library.expert(name)
        for tensor in expert.names():
            expert.read(tensor)


def read_scores(directory: Path) -> None:
    with ScoreJournal(directory / "sweep.jsonl", "x"):
        pass


def read_race(directory: Path) -> None:
    with AnswerJournal(directory / "answers.jsonl", "x", Meter(Budget())):
        pass
    report(directory)[0].render()


def resume(directory: Path) -> None:
    """A merge that stops before it is published, its journal damaged as the file `damage` says, then resumed."""
    rename = Disk.rename
    Disk.rename = _stop  # type: ignore[method-assign]
    try:
        with contextlib.suppress(MerganserError):
            mg.run(directory / "recipe.yml", directory / "out", workers=1)
    finally:
        Disk.rename = rename  # type: ignore[method-assign]
    journal, damage = directory / "out.partial" / "journal", (directory / "damage").read_bytes()
    if damage != WHOLE:
        journal.write_bytes(mutate(journal.read_bytes(), random.Random(damage)))
    mg.run(directory / "recipe.yml", directory / "out", workers=1, resume=True)
    merged = mg.open(directory / "out")
    if not all(bool((merged.read(name) == 1.5).all()) for name in merged.names()):
        raise Silent("the resumed merge has other weights")


def _stop(*_: Any) -> None:
    raise OSError("stopped")


ANSWERS = {
    "label": "a",
    "part": "race",
    "answers": {"t": [1.0, None]},
    "asked": 2,
    "seconds": 1,
    "merging": 0,
    "scored_by": "x",
}
RACE = dumped(ANSWERS) + b"\n"


def decision() -> bytes:
    score = Interval(0.5, 0.4, 0.6)
    by_task = {"quiz": 0.4, "sums": 0.6}
    challenges = (Challenge("a", score, by_task), Challenge("b", score, by_task, "a", score))
    rungs = (Rung(4, {"a": 0.5, "b": float("nan")}),)
    remarks = (Remark("long", "a is long", ("a",)),)
    made = Decision(
        "merge", "merge", "b", {"method": "b"}, score=score, remarks=remarks, challenges=challenges, rungs=rungs
    )
    return dumped(made.to_dict())


def files_of(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def write(directory: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)


def gguf_file(directory: Path) -> bytes:
    import gguf

    writer = gguf.GGUFWriter(str(directory / "m.gguf"), "llama")
    writer.add_array("tokens", ["a", "b"])
    writer.add_tensor("w", np.ones((2, 4), np.float32))
    packed = gguf.quants.quantize(np.ones((2, 32), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("q", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return (directory / "m.gguf").read_bytes()


def torch_file(zipped: bool) -> bytes:
    stream = io.BytesIO()
    torch.save({"state_dict": weights(), "epoch": 3}, stream, _use_new_zipfile_serialization=zipped)
    return stream.getvalue()


PAIR = "method: linear\nmodels: [./a, ./b]\n"
UNION = "method: linear\nbase: ./a\nmodels: [./a, ./b]\noutput: {tokenizer: union}\n"
VOCABULARY = "method: linear\nbase: ./b\nmodels: [./a, ./b]\noutput: {tokenizer: union}\n"
STAGES = """
method: ties
base: ./a
models: [{path: ./a, weight: 0.5}, {path: ./b, density: [0.1, 0.9]}]
overrides: [{match: "*.mlp.*", parameters: {weight: 0.3}}]
output: {dtype: bfloat16, tokenizer: {source: union, pad_to_multiple_of: 8}}
"""
MERGEKIT = """
merge_method: ties
base_model: ./a
models: [{model: ./a, parameters: {weight: [{filter: mlp, value: 0.3}, {value: 0.5}]}}, {model: ./b}]
dtype: bfloat16
tokenizer_source: union
"""
RUN = """
base: ./a
models: {left: ./b, right: ./c}
method: task_arithmetic
space: {weight: {low: 0, high: 1.5, per: model}}
tasks: {quiz: {kind: multiple-choice, data: ./quiz.jsonl, subset: 2}}
objectives: [quiz]
search: {algorithm: ga, population: 6, generations: 2}
model: {kind: causal-lm}
"""
QUIZ = b"".join(
    dumped({"question": f"q{i}", "options": ["x", "y"], "answer": i % 2, "topic": "t"}) + b"\n" for i in range(6)
)


def adapter() -> dict[str, bytes]:
    module = "base_model.model.model.layers.0.mlp"
    factors = {f"{module}.lora_A.weight": torch.ones(2, 4), f"{module}.lora_B.weight": torch.ones(4, 2)}
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "rank_pattern": {"mlp": 2}, "modules_to_save": None}
    return {"ad/adapter_model.safetensors": bytes(save(factors)), "ad/adapter_config.json": dumped(config)}


def modules() -> dict[str, bytes]:
    """A sentence-transformers model with a dense layer."""
    listed = [{"idx": i, "name": str(i), "path": path, "type": "t"} for i, path in enumerate(("", "2_Dense"))]
    dense = {
        "2_Dense/model.safetensors": bytes(save({"linear.weight": torch.ones(2, 2)})),
        "2_Dense/config.json": b"{}",
    }
    files = {"model.safetensors": saved(), "config.json": dumped(CONFIG), "modules.json": dumped(listed)} | dense
    return {f"s/{name}": content for name, content in files.items()}


def distributed_files(place: Path) -> dict[str, bytes]:
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": weights()}, checkpoint_id=place, no_dist=True)
    return files_of(place)


def quantised() -> dict[str, bytes]:
    """GPTQ, NF4, HQQ and FP8 weights in one file."""
    state = dumped({"quant_type": "nf4", "blocksize": 8, "dtype": "float16", "shape": [4, 8]})
    tensors = {
        "a.qweight": torch.ones(8, 8, dtype=torch.int32),
        "a.qzeros": torch.ones(2, 1, dtype=torch.int32),
        "a.scales": torch.ones(2, 8),
        "a.g_idx": torch.arange(64, dtype=torch.int32) // 32,
        "b.weight": torch.ones(16, 1, dtype=torch.uint8),
        "b.weight.absmax": torch.ones(4),
        "b.weight.quant_map": torch.ones(16),
        "b.weight.quant_state.bitsandbytes__nf4": torch.tensor(list(state), dtype=torch.uint8),
        "c.W_q": torch.ones(4, 8, dtype=torch.uint8),
        "c.scale": torch.ones(8, 1),
        "c.zero": torch.ones(8, 1),
        "c.nbits": torch.tensor(4),
        "c.axis": torch.tensor(1),
        "c.shape": torch.tensor([4, 16]),
        "d.weight": torch.ones(4, 8).to(torch.float8_e4m3fn),
        "d.weight_scale_inv": torch.ones(2, 2),
    }
    config = {"quantization_config": {"quant_method": "gptq", "bits": 4, "weight_block_size": [2, 4]}}
    return {"q/model.safetensors": bytes(save(tensors)), "q/config.json": dumped(config)}


def with_vocabulary() -> dict[str, bytes]:
    files = {name: each for name, each in (model("a") | model("b", 2.0)).items() if name != "a/tokenizer.json"}
    vocabulary, added = {"a": 0, "b": 1, "c": 2, "d": 3, "e": 4}, {"<x>": 5}
    return files | {"a/vocab.json": dumped(vocabulary), "a/added_tokens.json": dumped(added)}


def all_targets() -> list[Target]:
    """Every target, with files made anew."""
    pair = model("a") | model("b", 2.0)
    index = {"weight_map": {name: f"s{i}.safetensors" for i, name in enumerate(weights())}}
    shards = {f"m/s{i}.safetensors": bytes(save({name: value})) for i, (name, value) in enumerate(weights().items())}
    with tempfile.TemporaryDirectory() as made:
        place = Path(made)
        write(place, pair)
        Library.build(place / "a", {"math": place / "b"}, place / "lib", copy_base=True)
        MaskLibrary.build(weights(), {"math": weights(2.0), "code": weights(3.0)}, place / "masks")
        gguf, study = gguf_file(place), study_file(place)
        permutations, irt = alignment_file(place), irt_file(place)
        distributed = {f"ck/{name}": content for name, content in distributed_files(place / "ck").items()}
        library = {f"lib/{name}": content for name, content in files_of(place / "lib").items()}
        masks = {f"masks/{name}": content for name, content in files_of(place / "masks").items()}
    found = [
        Target("safetensors", {"x.safetensors": saved()}, ("x.safetensors",), compare_with_safetensors),
        Target("index", shards | {"m/model.safetensors.index.json": dumped(index)}, ("m/model.safetensors.index.json",),
               lambda d: read_all(d / "m")),
        Target("config", pair | recipe(PAIR), ("a/config.json",), merge),
        Target("tokenizer", pair | recipe(UNION), ("a/tokenizer.json", "b/tokenizer.json"), merge),
        Target("adapter", pair | adapter() | recipe("method: linear\nmodels: [./a, ./b+./ad]\n"),
               ("ad/adapter_config.json", "ad/adapter_model.safetensors"), merge),
        Target("gguf", {"m.gguf": gguf}, ("m.gguf",), lambda d: read_all(d / "m.gguf")),
        Target("torch", {"m.pt": torch_file(True)}, ("m.pt",), lambda d: read_all(d / "m.pt")),
        Target("torch-legacy", {"m.pt": torch_file(False)}, ("m.pt",), lambda d: read_all(d / "m.pt")),
        Target("distributed", distributed, ("ck/.metadata", "ck/__0_0.distcp"), lambda d: read_all(d / "ck")),
        Target("quantised", quantised(), ("q/model.safetensors", "q/config.json"), lambda d: read_all(d / "q")),
        Target("modules", modules() | recipe("method: linear\nmodels: [./s, ./s]\n"), ("s/modules.json",), merge),
        Target("vocabulary", with_vocabulary() | recipe(VOCABULARY), ("a/vocab.json", "a/added_tokens.json"), merge),
        Target("recipe", pair | both("recipe", STAGES), ("recipe.yml", "recipe.json"), plan),
        Target("mergekit", pair | both("recipe", MERGEKIT), ("recipe.yml", "recipe.json"), plan),
        Target("library", library, ("lib/library.json", "lib/experts/math.safetensors"), read_library,
               may_leave=("lib/.lock",)),
        Target("codes", codes(), ("shared.safetensors", "math.safetensors"), read_codes),
        Target("masks", masks, ("masks/masks.json",), read_masks),
        Target("journal", pair | recipe(PAIR) | {"damage": WHOLE}, ("damage",), resume, may_leave=("out",)),
        Target("study", {"study.sqlite": study}, ("study.sqlite",), read_study, may_leave=("study.sqlite-",)),
        Target("design", prepared_study(), ("design.json", "prepared"), read_design, may_leave=("new.sqlite",)),
        Target("runfile", pair | model("c", 3.0) | both("run", RUN) | {"quiz.jsonl": QUIZ},
               ("run.yml", "run.json", "quiz.jsonl"), lambda d: each(d, "run", loading.load)),
        Target("records", {"quiz.jsonl": QUIZ, "quiz.json": dumped([{"a": 1}])}, ("quiz.jsonl", "quiz.json"),
               lambda d: (read_records(d / "quiz.jsonl"), read_records(d / "quiz.json"))),
        Target("sweep", {"sweep.jsonl": b'{"key": "a", "score": 0.5, "scored_by": "x"}\n' * 3}, ("sweep.jsonl",),
               read_scores),
        Target("auto", {"answers.jsonl": RACE * 3, "decision.json": decision()}, ("answers.jsonl", "decision.json"),
               read_race),
        Target("alignment", {"p.safetensors": permutations}, ("p.safetensors",),
               lambda d: Record.load(d / "p.safetensors")),
        Target("lock", locked(), ("out/merganser.lock.json",), read_locked),
        Target("changes", {"merganser-changes.json": noted_changes()}, ("merganser-changes.json",), read_changes),
        Target("evaluation", {"e.json": evaluated()}, ("e.json",), lambda d: fill_file(Page("p"), d / "e.json", False)),
        Target("irt", {"irt.safetensors": irt}, ("irt.safetensors",), lambda d: IRT.load(d / "irt.safetensors")),
    ]  # fmt: skip
    return [Target(t.name, t.files, t.damaged, t.run, seeds.STORED.get(t.name, {}), t.may_leave) for t in found]


def alignment_file(place: Path) -> bytes:
    from merganser.align.symmetries import Atom, Factor, Symmetry, product

    symmetry = Symmetry({"h": Atom("h", 3, None)}, {"w": (product(Factor("h", 3)),)}, frozenset(), {})
    Record(symmetry, ("a", "b"), ({"h": np.arange(3)}, {"h": np.array([2, 0, 1])}), 1.0, ()).save(
        place / "p.safetensors"
    )
    return (place / "p.safetensors").read_bytes()
