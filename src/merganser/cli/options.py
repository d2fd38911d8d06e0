"""Arguments and options that several commands share, so that each has one name and one meaning."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Out = Annotated[Path, typer.Argument(metavar="OUT", help="Directory to create.")]
Made = Annotated[Path, typer.Argument(metavar="DIR", help="Directory written by merganser.")]
Recipe = Annotated[
    Path,
    typer.Argument(metavar="RECIPE", help="Recipe file (YAML), native or mergekit format; - reads standard input."),
]
LibraryPath = Annotated[Path, typer.Argument(metavar="LIB", help="Directory of the library.")]

Json = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing OUT.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue where an interrupted run stopped.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything, print the plan and stop.")]

Base = Annotated[str, typer.Option("--base", metavar="CKPT", help="Checkpoint the others were fine-tuned from.")]
MovedBase = Annotated[
    str | None, typer.Option("--base", metavar="CKPT", help="Base checkpoint, if it is no longer where LIB says.")
]
RankFraction = Annotated[
    float | None, typer.Option("--rank-fraction", help="Share of the singular components to use; default 1/T.")
]
Experts = Annotated[
    list[str] | None,
    typer.Option("--expert", "-e", metavar="NAME", help="Expert to use; may be repeated. Default: all."),
]
FactorDtype = Annotated[str, typer.Option("--dtype", help="Dtype of the factors: float32, bfloat16 or float16.")]
LowRankOnly = Annotated[
    bool, typer.Option("--low-rank-only", help="Leave out norms and biases, for servers that do not support them.")
]
Model = Annotated[
    str, typer.Option("--model", metavar="MODULE:FUNCTION", help="Function that returns the network, e.g. net:build.")
]
Task = Annotated[
    list[str] | None,
    typer.Option(
        "--task",
        metavar="[NAME=]KIND:FILE",
        help="Questions to ask; may be repeated. Kinds: classification, multiple-choice, choice, generation, "
        "exact-match, perplexity; lm-eval:TASK is a task of the lm-evaluation-harness.",
    ),
]
Shape = Annotated[str | None, typer.Option("--shape", help="Shape of an example input, e.g. 1x3x32x32.")]
NetworkOutputs = Annotated[
    list[str] | None,
    typer.Option(
        "--output",
        metavar="NAME",
        help="Output of the network that counts, e.g. logits; may be repeated. Default: all of them.",
    ),
]
AllowUnused = Annotated[
    bool, typer.Option("--allow-unused", help="Continue if the example input does not use every weight.")
]
Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a page with plots to this file.")]
Tensors = Annotated[bool, typer.Option("--tensors", help="List every tensor.")]
Check = Annotated[bool, typer.Option("--check", help="Read every weight and look for NaN, infinity and damage.")]

Device = Annotated[str, typer.Option("--device", help="Device to compute on: cpu, cuda, cuda:1 …")]
Workers = Annotated[
    int | None,
    typer.Option("--workers", min=1, help="Number of workers; default: one per core."),
]
Memory = Annotated[
    str | None, typer.Option("--memory", metavar="SIZE", help="Memory limit for tensors in flight; default: 2GiB.")
]
Root = Annotated[
    Path | None,
    typer.Option(
        "--relative-to", metavar="DIR", help="Directory that relative model paths refer to; default: working directory."
    ),
]
Ray = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="ADDRESS",
        help="Run on the Ray cluster at this address ('auto' finds one, 'local' starts one).",
    ),
]
RecipeSeed = Annotated[int | None, typer.Option("--seed", help="Seed; overrides the recipe's.")]
Dtype = Annotated[
    str | None,
    typer.Option("--dtype", help="Dtype of the output, e.g. bfloat16; overrides the recipe's."),
]
ShardSize = Annotated[
    str | None,
    typer.Option("--shard-size", metavar="SIZE", help="Largest output file, e.g. 5GB; overrides the recipe's."),
]
Quantize = Annotated[
    str | None,
    typer.Option("--quantize", metavar="FORM", help="Quantise the output: fp8, or a GGUF type such as q8_0."),
]
Seed = Annotated[int, typer.Option("--seed", help="Seed of all random numbers.")]
