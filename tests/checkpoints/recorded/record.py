"""Records small quantised checkpoints, and what the libraries that made them read back from them.

Run where bitsandbytes, hqq, optimum-quanto, compressed-tensors, torchao and transformers are installed:

    python tests/checkpoints/recorded/record.py

Each kind becomes `KIND.safetensors` (the codes, as the library stores them; its config as JSON in the metadata) and a
tensor of `expected.safetensors` (the weight, as the library decodes it).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HERE = Path(__file__).parent
MODULE = "model.layers.0.mlp.up_proj"
OUTPUTS, INPUTS = 64, 96
Recorded = tuple[dict[str, torch.Tensor], torch.Tensor, dict[str, Any]]


def weight() -> torch.Tensor:
    return torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(0)) * 0.05


def linear(dtype: torch.dtype = torch.float32) -> torch.nn.Linear:
    layer = torch.nn.Linear(INPUTS, OUTPUTS, bias=False, dtype=dtype)
    layer.weight.data = weight().to(dtype)
    return layer


def bitsandbytes(kind: str, nested: bool) -> Recorded:
    import bitsandbytes as bnb

    layer = bnb.nn.Linear4bit(INPUTS, OUTPUTS, bias=False, quant_type=kind, compress_statistics=nested)
    layer.weight = bnb.nn.Params4bit(weight(), requires_grad=False, quant_type=kind, compress_statistics=nested)
    layer = layer.to("cpu")
    expected = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    return layer.state_dict(), expected, {"quant_method": "bitsandbytes", "load_in_4bit": True}


def bitsandbytes_int8() -> Recorded:
    import bitsandbytes as bnb

    codes, scale, _ = bnb.functional.int8_vectorwise_quant(weight().half())
    stored = {"weight": codes, "SCB": scale, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    expected = bnb.functional.int8_vectorwise_dequant(codes, scale)
    return stored, expected, {"quant_method": "bitsandbytes", "load_in_8bit": True}


def hqq(bits: int, axis: int) -> Recorded:
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    settings = BaseQuantizeConfig(nbits=bits, group_size=32, axis=axis)
    layer = HQQLinear(linear(), settings, compute_dtype=torch.float32, device="cpu", del_orig=False)
    return layer.state_dict(), layer.dequantize(), {"quant_method": "hqq"}


def quanto(kind: str) -> Recorded:
    import optimum.quanto as library

    network = torch.nn.Sequential(linear())
    library.quantize(network, weights=getattr(library, kind))
    library.freeze(network)
    stored = {name.removeprefix("0."): each for name, each in network.state_dict().items()}
    return stored, network[0].weight.dequantize(), {"quant_method": "quanto"}


def compressed(form: str, **weights: Any) -> Recorded:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights), format=form)
    whole, size = weight(), weights.get("group_size") or INPUTS
    groups = whole.unflatten(1, (-1, size))
    low, high = groups.amin(-1), groups.amax(-1)
    if weights["strategy"] == "tensor":
        low, high = whole.min().reshape(1), whole.max().reshape(1)
    state = {"weight": whole}
    if form == "nvfp4-pack-quantized":
        state["weight_global_scale"] = generate_gparam(whole.min(), whole.max())
    given = {"global_scale": state["weight_global_scale"]} if "weight_global_scale" in state else {}
    state["weight_scale"], state["weight_zero_point"] = calculate_qparams(low, high, scheme.weights, **given)
    compressor = BaseCompressor.get_value_from_registry(form)
    stored = {name: each for name, each in compressor.compress(dict(state), scheme).items() if each is not None}
    expected = compressor.decompress(dict(stored), scheme)["weight"].float()
    return stored, expected, {"quant_method": "compressed-tensors", "format": form}


def torchao(name: str, **options: Any) -> Recorded:
    import torchao.quantization as library
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    network = torch.nn.Sequential(linear(torch.float32))
    library.quantize_(network, getattr(library, name)(**options))
    stored, _ = flatten_tensor_state_dict(dict(network.state_dict()))
    stored = {key.removeprefix("0."): each for key, each in stored.items()}
    return stored, network[0].weight.dequantize(), {"quant_method": "torchao"}


def torchao_groups() -> Recorded:
    from torchao.quantization.granularity import PerGroup

    return torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4, granularity=PerGroup(32))


def mxfp4() -> Recorded:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    random = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (2, 24, 3, 16), generator=random).to(torch.uint8)
    scales = torch.randint(118, 126, (2, 24, 3), generator=random).to(torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    return {"gate_up_proj_blocks": blocks, "gate_up_proj_scales": scales}, expected, {"quant_method": "mxfp4"}


def awq() -> Recorded:
    """Codes are drawn at random; AutoAWQ decodes them."""
    import importlib.util

    place = next(iter(importlib.util.find_spec("awq").submodule_search_locations))
    spec = importlib.util.spec_from_file_location("packing_utils", Path(place) / "utils" / "packing_utils.py")
    utils = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(utils)
    random = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randint(-(2**31), 2**31, shape, generator=random).to(torch.int32)  # noqa: E731
    stored = {
        "qweight": draw(INPUTS, OUTPUTS // 8),
        "qzeros": draw(INPUTS // 32, OUTPUTS // 8),
        "scales": (torch.rand(INPUTS // 32, OUTPUTS, generator=random) * 0.01).half(),
    }
    expected = utils.dequantize_gemm(stored["qweight"], stored["qzeros"], stored["scales"].float(), 4, 32)
    return stored, expected.t(), {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
FLOAT4 = {"num_bits": 4, "type": "float", "symmetric": True}
KINDS: dict[str, Callable[[], Recorded]] = {
    "bitsandbytes-nf4": lambda: bitsandbytes("nf4", nested=False),
    "bitsandbytes-nf4-nested": lambda: bitsandbytes("nf4", nested=True),
    "bitsandbytes-fp4": lambda: bitsandbytes("fp4", nested=True),
    "bitsandbytes-int8": bitsandbytes_int8,
    "hqq-8": lambda: hqq(8, 1),
    "hqq-4": lambda: hqq(4, 1),
    "hqq-4-axis-0": lambda: hqq(4, 0),
    "hqq-3": lambda: hqq(3, 1),
    "hqq-2": lambda: hqq(2, 1),
    "hqq-1": lambda: hqq(1, 1),
    "quanto-qint8": lambda: quanto("qint8"),
    "quanto-qfloat8": lambda: quanto("qfloat8"),
    "quanto-qint4": lambda: quanto("qint4"),
    "quanto-qint2": lambda: quanto("qint2"),
    "compressed-pack-int4": lambda: compressed("pack-quantized", **INT4, symmetric=True),
    "compressed-pack-int4-asymmetric": lambda: compressed("pack-quantized", **INT4, symmetric=False),
    "compressed-pack-int8": lambda: compressed("pack-quantized", num_bits=8, type="int", strategy="channel"),
    "compressed-int8": lambda: compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
    "compressed-float8-channel": lambda: compressed("float-quantized", **FLOAT8, strategy="channel"),
    "compressed-float8-tensor": lambda: compressed("float-quantized", **FLOAT8, strategy="tensor"),
    "compressed-nvfp4": lambda: compressed("nvfp4-pack-quantized", **FLOAT4, strategy="tensor_group", group_size=16),
    "compressed-mxfp4": lambda: compressed("mxfp4-pack-quantized", **FLOAT4, strategy="group", group_size=32),
    "torchao-int8": lambda: torchao("Int8WeightOnlyConfig"),
    "torchao-float8": lambda: torchao("Float8WeightOnlyConfig"),
    "torchao-int4-groups": torchao_groups,
    "mxfp4": mxfp4,
    "awq": awq,
}


def main() -> None:
    expected = {}
    for kind, make in KINDS.items():
        try:
            stored, expected[kind], settings = make()
        except Exception as error:
            print(f"{kind}: {type(error).__name__}: {error}")
            continue
        expected[kind] = expected[kind].detach().float().contiguous()
        tensors = {f"{MODULE}.{name}": each.detach().contiguous() for name, each in stored.items()}
        save_file(tensors, HERE / f"{kind}.safetensors", {"quantization_config": json.dumps(settings)})
        print(kind, {name: (str(each.dtype), list(each.shape)) for name, each in stored.items() if each.dim()})
    save_file(expected, HERE / "expected.safetensors")


if __name__ == "__main__":
    main()
