"""Classification heads of several tasks: one table of (head, class) columns, and the best pair in it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from merganser.errors import InputError, did_you_mean, first_line, one_of
from merganser.modules.naming import adopt
from merganser.routing.choices import Routing, choose
from merganser.routing.predictions import Prediction

#: From features (samples × width) to logits (samples × classes); a linear head may be given as its `weight` and `bias`.
UnnamedHead: TypeAlias = Callable[[Tensor], Tensor] | Mapping[str, Tensor]
#: How pairs of different heads are compared: raw logits (thesis), log-probabilities within each head, or the
#: log-probability of the answer (see `Heads.predict`).
HeadScore = Literal["logit", "probability", "posterior"]


@dataclass(frozen=True)
class NamedHead:
    """A head with the names of its classes. Heads whose classes have the same names answer the same question.

    Args:
        logits: The head: from features of shape (samples, width) to logits of shape (samples, classes), or the
            `weight` and `bias` of a linear layer.
        classes: The names of the classes, in the order of the logits.

    Example:
        >>> linear = {"weight": torch.zeros(2, 16), "bias": torch.zeros(2)}
        >>> head = mg.routing.NamedHead(linear, ("negative", "positive"))
    """

    logits: UnnamedHead
    classes: Sequence[str]


HeadLike: TypeAlias = UnnamedHead | NamedHead


class Heads(nn.Module):
    """Heads by task. Tasks with the same classes may share a head (pass the same object for both), or have heads with
    the same names of classes (see `NamedHead`).

    Heads that are modules, or given by tensors, are submodules under the name of the first of their tasks.
    """

    def __init__(self, heads: Mapping[str, HeadLike], tasks: Sequence[str]) -> None:
        if unknown := [task for task in heads if task not in tasks]:
            raise InputError(f"there is a head for {unknown[0]!r}, but no such expert{did_you_mean(unknown[0], tasks)}")
        if missing := [task for task in tasks if task not in heads]:
            raise InputError(f"the expert {missing[0]!r} has no head; heads: {', '.join(heads) or 'none'}")
        super().__init__()
        self.tasks = tuple(tasks)
        self._heads = {task: make_head(heads[task]) for task in tasks}
        self._shared = {task: next(other for other in tasks if heads[other] is heads[task]) for task in tasks}
        self._questions = {task: _question(self._shared[task], heads[task]) for task in tasks}
        self._widths: dict[str, int] = {}
        for task in tasks:
            head = self._heads[task]
            if isinstance(head, nn.Linear):
                self._check_names(task, head.out_features)
            if self._shared[task] == task and isinstance(head, nn.Module):
                adopt(self, task, head)

    def classes(self, task: str) -> int | None:
        """Return the number of classes of a linear head; `None` for other heads."""
        head = self._heads[task]
        return head.out_features if isinstance(head, nn.Linear) else None

    def names(self, task: str) -> tuple[str, ...] | None:
        """Return the names of a head's classes; `None` if they have none."""
        question = self._questions[task]
        return question if isinstance(question, tuple) else None

    def logits(self, task: str, features: Tensor) -> Tensor:
        try:
            logits = self._heads[task](features)
        except (RuntimeError, ValueError, IndexError) as error:
            raise InputError(
                f"the head of {task!r} does not accept features of shape {list(features.shape)}: {first_line(error)}"
            ) from error
        if logits.dim() != 2 or len(logits) != len(features):
            raise InputError(f"the head of {task!r} gives {list(logits.shape)} for {len(features)} samples")
        return logits

    def pooled(self, weights: Tensor, tasks: Sequence[str]) -> Tensor:
        """Return weights of these tasks in which the likeliest of each question has that of all tasks that ask it."""
        pooled = weights.clone()
        for question in {self._questions[task] for task in tasks}:
            ours = [place for place, task in enumerate(tasks) if self._questions[task] == question]
            best = torch.tensor(ours, device=weights.device)[weights[:, ours].argmax(1, keepdim=True)]
            pooled.scatter_(1, best, weights[:, ours].sum(1, keepdim=True))
        return pooled

    def check(self, task: str | None) -> None:
        """Refuse a task that has no head."""
        if task is not None and task not in self.tasks:
            raise InputError(f"no expert {task!r} in the library{did_you_mean(task, self.tasks)}")

    def predict(
        self,
        features: Tensor,
        routing: Routing,
        score: HeadScore = "logit",
        *,
        task: str | None = None,
        together: bool = False,
    ) -> Prediction:
        """Answer with (i*, c*) = arg max over i ∈ Ω, c of s_i[c].

        By `logit`, s_i[c] = z_i[c]. By `probability`, s_i[c] = log p_i[c] with p_i = softmax(z_i). By `posterior`, it
        is the logarithm of P(question) P(c | question): of the weights of all tasks that ask the question of i, times
        the mean of p_j[c] over those of them in Ω, weighted by w_j. Of tasks with equal scores, the one with the
        largest weight answers.

        Args:
            features: What the heads read, shape (samples, width).
            routing: Sets and weights of the same tasks; the weights break ties between tasks that share a head.
            score: How answers of different heads are compared.
            task: Answer with the head of this task, regardless of what was merged.
            together: All samples are of one task: i* = arg max over i of the sum over samples of max_c s_i[c].
        """
        one_of("score", score, HeadScore)
        self.check(task)
        sets, weights = routing.sets, routing.weights
        if task is not None:
            sure = torch.tensor([[float(name == task) for name in self.tasks]]).expand(len(sets), -1)
            told = choose(self.tasks, sure, threshold=1.0, top=1)
            return self.predict(features, told, score)._replace(sets=sets, routing=routing)
        if together and len(set(sets)) > 1:
            raise InputError("samples that share one head need one set of experts; these were routed separately")
        owners = [task for task in self.tasks if self._shared[task] == task]
        parts, columns = [], []
        for owner in owners:
            member = torch.tensor([bool(chosen & self._users(owner)) for chosen in sets], device=features.device)
            part = features.new_full((len(sets), self._width(owner, features)), -torch.inf, dtype=torch.float32)
            if member.any():
                logits = self.logits(owner, features[member]).float()
                part[member] = logits if score == "logit" else logits.log_softmax(dim=1)
            parts.append(part)
            columns += [(owner, label) for label in range(part.shape[1])]
        if score == "posterior":
            parts = self._posterior(owners, parts, routing)
        table = torch.cat(parts, dim=1)
        if together:
            total = torch.stack([part.amax(1).sum() for part in parts])
            chosen_head = owners[int(total.argmax())]
            others = torch.tensor([owner != chosen_head for owner, _ in columns], device=table.device)
            place = table.masked_fill(others, -torch.inf).max(dim=1).indices
        else:
            place = table.max(dim=1).indices
        winners = tuple(
            self._winner(columns[column][0], chosen, row, score)
            for column, chosen, row in zip(place.tolist(), sets, weights.tolist(), strict=True)
        )
        return Prediction(table, winners, sets, routing, columns=tuple(columns), chosen=place)

    def _width(self, owner: str, features: Tensor) -> int:
        """Return the number of classes of a head; one that is no linear layer is asked for the first sample."""
        if owner not in self._widths:
            known = self.classes(owner)
            width = self.logits(owner, features[:1]).shape[1] if known is None else known
            self._check_names(owner, width)
            self._widths[owner] = width
        return self._widths[owner]

    def _check_names(self, task: str, width: int) -> None:
        names = self.names(task)
        if names is not None and len(names) != width:
            raise InputError(f"the head of {task!r} has {width} classes, but {len(names)} names for them")

    def _users(self, owner: str) -> frozenset[str]:
        return frozenset(task for task in self.tasks if self._shared[task] == owner)

    def _posterior(self, owners: Sequence[str], parts: Sequence[Tensor], routing: Routing) -> list[Tensor]:
        """Return log P(question) + log P(class | question) from the log-probabilities within each head."""
        weights = routing.weights.clamp(min=1e-30).to(parts[0])
        chosen = torch.tensor([[task in tasks for task in self.tasks] for tasks in routing.sets], device=weights.device)
        asked = weights * chosen

        def log_sum(table: Tensor, tasks: Collection[str]) -> Tensor:
            return table[:, [task in tasks for task in self.tasks]].sum(1, keepdim=True).log()

        scores = []
        for owner, part in zip(owners, parts, strict=True):
            alike = [task for task in self.tasks if self._questions[task] == self._questions[owner]]
            heads = [(name, other) for name, other in zip(owners, parts, strict=True) if name in alike]
            mixed = torch.stack([other + log_sum(asked, self._users(name)) for name, other in heads]).logsumexp(0)
            score = mixed - log_sum(asked, alike) + log_sum(weights, alike)
            scores.append(score.masked_fill(part.isneginf(), -torch.inf))
        return scores

    def _winner(self, owner: str, chosen: frozenset[str], weights: Sequence[float], score: HeadScore) -> str:
        alike = self._questions if score == "posterior" else self._shared
        candidates = [task for task in self.tasks if task in chosen and alike[task] == alike[owner]]
        return max(candidates, key=lambda task: weights[self.tasks.index(task)])


def _question(owner: str, head: HeadLike) -> str | tuple[str, ...]:
    """Return the names of a head's classes; the task that owns the head if they have none."""
    return tuple(head.classes) if isinstance(head, NamedHead) else owner


def make_head(head: HeadLike) -> Callable[[Tensor], Tensor]:
    if isinstance(head, NamedHead):
        head = head.logits
    if not isinstance(head, Mapping):
        return head
    weight = head.get("weight")
    if weight is None or weight.dim() != 2 or not weight.is_floating_point() or head.keys() - {"weight", "bias"}:
        found = ", ".join(f"{name} {list(tensor.shape)} in {tensor.dtype}" for name, tensor in head.items())
        raise InputError(
            f"a head has a float weight of shape (classes, width) and maybe a bias; found {found or 'none'}"
        )
    if "bias" in head and head["bias"].shape != weight.shape[:1]:
        raise InputError(f"a head of {len(weight)} classes has a bias of shape {list(head['bias'].shape)}")
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias="bias" in head, device=weight.device, dtype=weight.dtype)
    linear.load_state_dict(dict(head))
    return linear.eval().requires_grad_(False)


def default_features(output: Any) -> Tensor:
    """Return the output itself as the features, if it has shape (samples, width)."""
    if isinstance(output, Tensor) and output.dim() == 2:
        return output
    raise InputError(
        f"heads read a tensor of shape (samples, width), but the module returns {_describe(output)}; pass "
        "features=lambda output, inputs: ... to convert it"
    )


def _describe(output: Any) -> str:
    return f"shape {list(output.shape)}" if isinstance(output, Tensor) else f"a {type(output).__name__}"
