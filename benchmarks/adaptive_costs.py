"""What `benchmarks.adaptive` counts of every contender: multiply-adds of a request, and numbers stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from benchmarks.adaptive_accounting import Cost, measure, multiply_adds, stored
from benchmarks.adaptive_contenders import Model
from benchmarks.adaptive_setting import Setting
from merganser.methods.matrices import rank_kept
from merganser.modules.activations import linear_layers
from merganser.modules.inputs import Inputs
from merganser.routing import AdaptiveModel
from merganser.routing.baselines import Smile
from merganser.routing.baselines.gated import GatedBaseline
from merganser.routing.routers import CalibratedRouter

#: Single sentences in the stream whose costs are counted.
STREAM = 64


def single_sentences(setting: Setting) -> Iterator[Inputs]:
    """Test sentences one by one without padding, tasks in turn."""
    streams = [
        [trimmed(x.select(torch.tensor([row]))) for x, labels in parts for row in range(len(labels))]
        for parts in setting.data.test.values()
    ]
    # Batches hold sentences of one length: a fixed shuffle mixes them.
    orders = [
        torch.randperm(len(stream), generator=torch.Generator().manual_seed(place)).tolist()
        for place, stream in enumerate(streams)
    ]
    for turn in range(max(map(len, streams))):
        for stream, order in zip(streams, orders, strict=True):
            if turn < len(order):
                yield stream[order[turn]]


def trimmed(x: Inputs) -> Inputs:
    assert x.mask is not None
    length = int(x.mask.sum())
    return Inputs((), {key: value[:, :length] for key, value in x.kwargs.items()})


def forwards(model: Model, setting: Setting) -> float:
    """Multiply-adds of a stream of single sentences over those of forward passes of the whole encoder.

    The layers below the trained ones are as many multiply-adds again, and every contender needs them once: what they
    make of a sentence does not depend on the task. Merging sets is counted as it comes up, the cache being empty at
    first; routers and gates are counted too.
    """
    sentences = [x for x, _ in zip(single_sentences(setting), range(STREAM), strict=False)]
    if isinstance(model, AdaptiveModel):
        fresh = model.with_cache()
        cost = sum((measure(fresh, x) for x in sentences), Cost(0, 0, 0, 0, 0))
        return (1 + cost.ratio) / 2
    spent = plain = 0
    for x in sentences:
        spent += multiply_adds(lambda x=x: model.run(x))[1]  # type: ignore[misc]
        plain += multiply_adds(lambda x=x: x.run(model.module))[1]  # type: ignore[misc]
    return (1 + spent / plain) / 2


def numbers(model: Model, setting: Setting) -> float:
    """Numbers stored beside the base, over those of the trained tensors; heads, which all need, are left out.

    The library's factors and vectors for MASS, SMILE and Arrow; of WeMoE those of the gated layers, the other trained
    tensors merged, and the gates; of Twin-Merging the shared expert and the residuals' factors; fitted routers; of a
    static merge its trained tensors. The fixed merge that MASS reads is computed from the factors and not stored.
    """
    size = stored(setting.library)
    router = getattr(model, "router", None)
    fitted = router.weight.numel() + router.bias.numel() if isinstance(router, CalibratedRouter) else 0
    if isinstance(model, AdaptiveModel | Smile):
        whole = sum(size.experts.values())
    elif isinstance(model, GatedBaseline):
        stacks = sum(
            each.numel() for s in model.stacks.values() for each in (s.left, s.right, s.bias) if each is not None
        )
        gates = sum(p.numel() for name, p in model.named_parameters() if name.startswith("gating."))
        whole = stacks + sum(tensor.numel() for tensor in model.rest.whole.values()) + gates
    else:
        whole = size.trained
    return (whole + fitted) / size.trained


def storage(module: nn.Module, tasks: int) -> dict[str, float]:
    """What `numbers` counts for experts that changed all tensors of a module, by their shapes alone.

    Factors have rank n // T. Two rows have no contender: WeMoE as published, with whole task vectors in the gated
    layers, and the experts themselves.
    """
    trained = sum(tensor.numel() for tensor in module.parameters())
    layers = linear_layers(module)
    gated = {name: layer for name, layer in layers.items() if layer.in_features != layer.out_features}

    def factors(chosen: Mapping[str, nn.Linear]) -> int:
        ranks = {name: rank_kept(min(layer.weight.shape), tasks, None) for name, layer in chosen.items()}
        return sum(ranks[name] * sum(layer.weight.shape) for name, layer in chosen.items())

    def weights(chosen: Mapping[str, nn.Linear]) -> int:
        return sum(layer.weight.numel() for layer in chosen.values())

    def biases(chosen: Mapping[str, nn.Linear]) -> int:
        return sum(layer.out_features for layer in chosen.values())

    singular_values = sum(rank_kept(min(layer.weight.shape), tasks, None) for layer in layers.values())
    library = tasks * (factors(layers) + singular_values + trained - weights(layers))
    router = tasks * (tasks + 1)
    width = min(layer.in_features for layer in gated.values())
    gates = len(gated) // 2 * ((width + 1) * width + (width + 1) * tasks)
    merged = trained - weights(gated) - biases(gated) + gates
    counted = {
        "MASS": library,
        "MASS, calibrated router": library + router,
        "SMILE": library,
        "Arrow": library,
        "Twin-Merging": trained + tasks * (factors(layers) + biases(layers)) + router,
        "WeMoE": merged + tasks * (factors(gated) + biases(gated)),
        "WeMoE, whole task vectors": merged + tasks * (weights(gated) + biases(gated)),
        "one merge": trained,
        "the experts, whole": tasks * trained,
    }
    return {name: count / trained for name, count in counted.items()}
