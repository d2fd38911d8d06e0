"""Record the terminal picture of the README from a real run.

    python docs/tools/terminal.py docs/images/terminal.svg

Makes three small language models in a temporary directory, runs the commands below there, and draws what they print.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text
from safetensors.torch import save_file

RECIPE = """\
method: ties
base: ./base
models:
  - {path: ./math, weight: 0.6}
  - ./code
parameters: {density: 0.2}
"""
COMMANDS = (("merganser", "plan", "recipe.yml"), ("merganser", "merge", "recipe.yml", "out"))
LAYERS, WIDTH, COLUMNS = 12, 768, 96


def write_models(directory: Path) -> None:
    """Write a base and two fine-tunes of it, with the names and shapes of a small language model."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"model.embed_tokens.weight": (32000, WIDTH), "model.norm.weight": (WIDTH,)}
    for layer in range(LAYERS):
        for part, shape in {
            "self_attn.qkv_proj.weight": (3 * WIDTH, WIDTH),
            "self_attn.o_proj.weight": (WIDTH, WIDTH),
            "mlp.up_proj.weight": (4 * WIDTH, WIDTH),
            "mlp.down_proj.weight": (WIDTH, 4 * WIDTH),
        }.items():
            shapes[f"model.layers.{layer}.{part}"] = shape
    base = {name: 0.02 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for name in ("base", "math", "code"):
        change = 0.0 if name == "base" else 0.002
        weights = {
            key: (value + change * torch.randn(value.shape, generator=generator)).bfloat16()
            for key, value in base.items()
        }
        (directory / name).mkdir()
        save_file(weights, directory / name / "model.safetensors", {"format": "pt"})
    (directory / "recipe.yml").write_text(RECIPE)


def main(out: Path) -> None:
    program = shutil.which("merganser", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if program is None:
        sys.exit("merganser is not installed")
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    with tempfile.TemporaryDirectory() as scratch:
        write_models(Path(scratch))
        for command in COMMANDS:
            console.print(Text.assemble(("$ ", "bold green"), (" ".join(command), "bold")))
            done = subprocess.run(
                [program, *command[1:]], cwd=scratch, env=environment, text=True, capture_output=True, check=True
            )
            console.print(Text.from_ansi(done.stdout.rstrip()))
            console.print()
    picture = re.sub(r"@font-face \{.*?\}", "", console.export_svg(title="merganser"), flags=re.DOTALL)
    out.write_text(picture, encoding="utf-8")  # without fonts from elsewhere


if __name__ == "__main__":
    main(Path(sys.argv[1]))
