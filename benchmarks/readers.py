"""What reading each stored form costs beside a plain read: processor time and memory.

    python -m benchmarks.readers

A matrix of random codes in every form is read through `merganser.open`, some rows at a time as a merge reads it, each
in a process of its own; the plain read is the same matrix in bfloat16, widened to float32.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

import merganser as mg

ROWS, COLUMNS, GROUP = 2048, 4096, 128
STEP = 256
Stored = tuple[dict[str, torch.Tensor], dict[str, object]]


def codes(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random bits of an integer dtype."""
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max, shape, dtype=torch.int64).to(dtype)


def scales(*shape: int) -> torch.Tensor:
    return torch.rand(*shape) + 0.5


def plain() -> Stored:
    return {"w.weight": torch.randn(ROWS, COLUMNS).bfloat16()}, {}


def float8(*scale: int) -> Stored:
    values = torch.randn(ROWS, COLUMNS).to(torch.float8_e4m3fn)
    return {"w.weight": values, "w.weight_scale": scales(*scale)}, {"quant_method": "fp8"}


def bitsandbytes() -> Stored:
    blocks = ROWS * COLUMNS // 64
    state = {"quant_type": "nf4", "blocksize": 64, "shape": [ROWS, COLUMNS], "nested_blocksize": 256}
    tensors = {
        "w.weight": codes(torch.uint8, ROWS * COLUMNS // 2, 1),
        "w.weight.absmax": codes(torch.uint8, blocks),
        "w.weight.quant_map": torch.randn(16),
        "w.weight.nested_absmax": scales(blocks // 256),
        "w.weight.nested_quant_map": torch.randn(256),
        "w.weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    return tensors, {"quant_method": "bitsandbytes"}


def gptq(bits: int) -> Stored:
    tensors = {
        "w.qweight": codes(torch.int32, COLUMNS * bits // 32, ROWS),
        "w.qzeros": codes(torch.int32, COLUMNS // GROUP, ROWS * bits // 32),
        "w.scales": scales(COLUMNS // GROUP, ROWS).half(),
        "w.g_idx": (torch.randperm(COLUMNS) // GROUP).to(torch.int32),
    }
    return tensors, {"quant_method": "gptq", "bits": bits}


def awq() -> Stored:
    tensors = {
        "w.qweight": codes(torch.int32, COLUMNS, ROWS // 8),
        "w.qzeros": codes(torch.int32, COLUMNS // GROUP, ROWS // 8),
        "w.scales": scales(COLUMNS // GROUP, ROWS).half(),
    }
    return tensors, {"quant_method": "awq"}


def hqq() -> Stored:
    groups = ROWS * COLUMNS // 64
    tensors = {
        "w.W_q": codes(torch.uint8, groups // 2, 64),
        "w.scale": scales(groups, 1).half(),
        "w.zero": scales(groups, 1).half(),
        "w.nbits": torch.tensor(4),
        "w.axis": torch.tensor(1),
        "w.shape": torch.tensor([ROWS, COLUMNS]),
    }
    return tensors, {"quant_method": "hqq"}


def packed() -> Stored:
    tensors = {
        "w.weight_packed": codes(torch.int32, ROWS, COLUMNS // 8),
        "w.weight_scale": scales(ROWS, COLUMNS // GROUP),
        "w.weight_shape": torch.tensor([ROWS, COLUMNS]),
    }
    return tensors, {"quant_method": "compressed-tensors"}


def nvfp4() -> Stored:
    tensors = {
        "w.weight_packed": codes(torch.uint8, ROWS, COLUMNS // 2),
        "w.weight_scale": scales(ROWS, COLUMNS // 16).to(torch.float8_e4m3fn),
        "w.weight_global_scale": scales(1),
    }
    return tensors, {"quant_method": "compressed-tensors"}


FORMS: dict[str, Callable[[], Stored]] = {
    "bfloat16, plain": plain,
    "FP8, scale by row": lambda: float8(ROWS, 1),
    "FP8, blocks of 128": lambda: float8(ROWS // 128, COLUMNS // 128),
    "bitsandbytes NF4, nested": bitsandbytes,
    "GPTQ, 4 bits, act-order": lambda: gptq(4),
    "GPTQ, 3 bits, act-order": lambda: gptq(3),
    "AWQ": awq,
    "HQQ, 4 bits": hqq,
    "compressed-tensors, int4": packed,
    "NVFP4": nvfp4,
}
KINDS = ("Q8_0", "Q4_0", "Q6_K", "Q4_K")


def write_gguf(path: Path, kind: str) -> None:
    import gguf

    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    writer = gguf.GGUFWriter(str(path), "x")
    raw = torch.randint(0, 60, (ROWS, COLUMNS // block * size)).to(torch.uint8).numpy()
    writer.add_tensor("w.weight", raw, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def memory(field: str) -> int:
    """Bytes of this process's memory: now (VmRSS) or at most since the last reset (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def read_all(opened: mg.checkpoints.Checkpoint, step: int) -> float:
    """Read a matrix so many rows at a time; return the processor seconds."""
    began = time.thread_time()
    for start in range(0, ROWS, step):
        opened.read("w.weight", (start, start + step)).float().sum()
    return time.thread_time() - began


def read(path: Path, answers: multiprocessing.Queue[tuple[float, int]]) -> None:
    """Read a checkpoint; answer with processor seconds and the memory that this takes besides the mapped file."""
    torch.set_num_threads(1)
    opened = mg.open(path)
    read_all(opened, 16)  # has the file in memory, and little else
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    seconds = read_all(opened, STEP)
    answers.put((seconds, memory("VmHWM") - before))


def measure(path: Path) -> tuple[float, int]:
    context = multiprocessing.get_context("spawn")
    answers: multiprocessing.Queue[tuple[float, int]] = context.Queue()  # type: ignore[assignment]
    process = context.Process(target=read, args=(path, answers))
    process.start()
    answer = answers.get()
    process.join()
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=3, help="readings of each form, in turn; the quickest counts")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as made:
        places: dict[str, Path] = {}
        for form, store in FORMS.items():
            tensors, settings = store()
            places[form] = Path(made) / form.replace(" ", "-")
            places[form].mkdir()
            save_file(tensors, places[form] / "model.safetensors")
            (places[form] / "config.json").write_text(json.dumps({"quantization_config": settings} if settings else {}))
        for kind in KINDS:
            places[f"GGUF {kind}"] = Path(made) / f"{kind}.gguf"
            write_gguf(places[f"GGUF {kind}"], kind)
        found: dict[str, list[tuple[float, int]]] = {form: [] for form in places}
        for _ in range(arguments.repeat):
            for form, path in places.items():
                found[form].append(measure(path))
    usual = min(seconds for seconds, _ in found["bfloat16, plain"])
    print(f"{ROWS} × {COLUMNS} entries, {STEP} rows at a time ({4 * STEP * COLUMNS / 2**20:.0f} MiB of float32)\n")
    print("| form | ns an entry | beside the plain read | memory |\n|---|---|---|---|")
    for form, runs in found.items():
        seconds = min(each for each, _ in runs)
        peak = max(each for _, each in runs) / 2**20
        print(f"| {form} | {seconds / ROWS / COLUMNS * 1e9:.1f} | {seconds / usual:.1f} × | {peak:.0f} MiB |")


if __name__ == "__main__":
    main()
