"""The limit of a merge: a compiled program that does the same reading, arithmetic and writing with nothing around it.

`merge_limit.c` is compiled where it is used, for the processor at hand; without a C compiler there is no limit.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from merganser.checkpoints.safetensors_file import SafetensorsFile

SOURCE = Path(__file__).with_name("merge_limit.c")
#: Reassociation is allowed: a limit need not give the same bits twice.
FLAGS = ("-O3", "-march=native", "-ffast-math", "-pthread")


def compile_limit(directory: Path) -> Path | None:
    """Return the program, compiled into `directory`; None, with a note, without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        print("the limit: not measured, there is no C compiler (cc)")
        return None
    program = directory / "merge_limit"
    subprocess.run([compiler, *FLAGS, str(SOURCE), "-o", str(program), "-lm"], check=True)
    return program


def limit_command(program: Path, family: str, paths: list[Path], out: Path) -> list[str]:
    """Return the command that does the work of `family` on checkpoints of one file each, the base first, into `out`.

    The files must be laid out alike, in bfloat16; a tensor is given as rows of its last axis.
    """
    files = [path / "model.safetensors" for path in paths]
    lines = []
    for entry in SafetensorsFile(files[0]).entries.values():
        columns = entry.spec.shape[-1] if entry.spec.shape else 1
        lines.append(f"{entry.start} {entry.spec.numel // max(1, columns)} {columns}\n")
    listed = program.with_name("tensors.txt")
    listed.write_text("".join(lines))
    return [str(program), family, str(listed), str(out / "model.safetensors"), *map(str, files)]
