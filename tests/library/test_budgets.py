"""The energy that smaller libraries would keep."""

import torch

from merganser.library import Library
from merganser.library.budgets import predict_budgets


def test_heads_of_another_shape_are_kept_whole_and_do_not_count(tmp_path):
    torch.manual_seed(0)
    base = {"body": torch.randn(48, 32), "head": torch.randn(40, 32)}
    heads = {"small": torch.randn(12, 32), "usual": base["head"], "other": base["head"], "last": base["head"]}
    experts = {name: {"body": base["body"] + 0.1 * torch.randn(48, 32), "head": head} for name, head in heads.items()}
    library = Library.build(base, experts, tmp_path / "library")
    points = predict_budgets(library)
    assert points[-1]["energy"]["small"] > points[0]["energy"]["small"]
    assert heads["small"].numel() * 4 < points[0]["bytes"] < sum(library.size().experts.values())
