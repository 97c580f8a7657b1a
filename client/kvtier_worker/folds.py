"""Fold operators: what becomes of a finished step's KV when only a few entries of it may stay.

`Tail` is a copy and near-lossless with a model that was trained for it. `Selection` and
`AttentionMatching` are for models that were not: approximations, whose error `relative_error`
measures on the step's own queries.
"""

from dataclasses import dataclass
from math import inf
from typing import Final, Protocol

import torch
from torch import Tensor

from kvtier_kernels import KeyScores, score_keys

SMOOTHED_KEYS: Final = 7
"""Keys over which a selection's scores are averaged, so that it keeps little spans."""

FIT_ROUNDS: Final = 100
LEAST_WEIGHT: Final = 1e-6
MOST_MASS: Final = 1e4


@dataclass(frozen=True, slots=True)
class StepKv:
    """A step's entries, and queries that stand for those that will attend to it.

    Shapes: `kv` [layers, 2, entries, kv_heads, head_dim]; `queries` [layers, rows, heads,
    head_dim], turned by RoPE to positions behind the step, or None if the operator needs none.
    """

    kv: Tensor
    queries: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Folded:
    """The entries that stay.

    Shapes: `kv` [layers, 2, kept, kv_heads, head_dim]; `bias` [layers, kept, kv_heads], added to
    the entries' logits, or None for zeros.
    """

    kv: Tensor
    bias: Tensor | None = None


class FoldOperator(Protocol):
    """Turns a step's entries into a few; the same input always gives the same bits."""

    @property
    def queries(self) -> int:
        """How many of the step's last tokens' queries it wants to see."""

    @property
    def biased(self) -> bool:
        """Whether its entries have biases."""

    @property
    def copies_tail(self) -> bool:
        """Whether what it keeps are the step's last entries as they are, so that it need not be
        asked."""

    def fold(self, step: StepKv, keep: int) -> Folded:
        """Keep so many entries of a step, which has more."""


@dataclass(frozen=True, slots=True)
class Tail:
    """Keeps the step's last entries, which were computed while the whole step could be seen."""

    queries: int = 0
    biased: bool = False
    copies_tail: bool = True

    def fold(self, step: StepKv, keep: int) -> Folded:
        """A copy."""
        return Folded(step.kv[:, :, step.kv.shape[2] - keep :].clone())


@dataclass(frozen=True, slots=True)
class Selection:
    """Keeps, for each kv head, the entries to which the step's last queries attend most."""

    queries: int = 32
    biased: bool = False
    copies_tail: bool = False

    def fold(self, step: StepKv, keep: int) -> Folded:
        """Copies of other entries in each head."""
        keys, values, _ = _lanes(step)
        weights = _seen(step).importance.flatten(0, 1)
        smooth = torch.nn.functional.avg_pool1d(
            weights[:, None], SMOOTHED_KEYS, 1, SMOOTHED_KEYS // 2, count_include_pad=False
        )[:, 0]
        kept = _most(smooth, keep)
        return Folded(_unlaned(_gathered(keys, kept), _gathered(values, kept), step))


@dataclass(frozen=True, slots=True)
class AttentionMatching:
    """Selects keys, then fits biases and values so that attention comes out nearly the same.

    Per kv head: the keys with the largest root mean square of attention; a weight for each, not
    negative, so that their mass is the whole step's for every reference query; values by ridge
    regression towards the whole step's output. The bias is the weight's logarithm.
    """

    queries: int = 192
    ridge: float = 1e-2
    biased: bool = True
    copies_tail: bool = False

    def fold(self, step: StepKv, keep: int) -> Folded:
        """Selected keys with fitted biases and values."""
        keys, values, queries = _lanes(step)
        seen = _seen(step, squared=True, outputs=True)
        assert seen.outputs is not None
        kept = _most(seen.importance.flatten(0, 1), keep)
        few = _gathered(keys, kept)
        top, mass = (part.flatten(0, 1)[..., None] for part in (seen.tops, seen.masses))
        relative = (torch.exp(_scores(queries, few) - top) / mass).clamp_max(MOST_MASS)
        factors = _least_squares(relative, keys.shape[1] / keep)
        few_shares = relative * factors[:, None]
        few_shares /= few_shares.sum(-1, keepdim=True).clamp_min(1e-20)
        outputs = seen.outputs.reshape(queries.shape)
        fitted = _ridge(few_shares, outputs, _gathered(values, kept), self.ridge)
        layers, heads = step.kv.shape[0], step.kv.shape[3]
        bias = factors.log().view(layers, heads, keep).transpose(1, 2).contiguous()
        return Folded(_unlaned(few, fitted, step), bias)


def relative_error(step: StepKv, folded: Folded) -> float:
    """How far attention to the folded entries is from attention to the whole step.

    The norm of the outputs' difference over that of the outputs, over all heads and queries.
    """
    keys, values, queries = _lanes(step)
    expected = torch.softmax(_scores(queries, keys), -1) @ values
    few, few_values, _ = _lanes(StepKv(folded.kv, step.queries))
    scores = _scores(queries, few)
    if folded.bias is not None:
        scores += folded.bias.to(scores.device).transpose(1, 2).reshape(len(few), 1, -1)
    got = torch.softmax(scores, -1) @ few_values
    return float((got - expected).norm() / expected.norm().clamp_min(1e-20))


def _lanes(step: StepKv) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and queries of each (layer, kv head): [lanes, entries or queries, head_dim]."""
    assert step.queries is not None
    layers, _, entries, heads, head_dim = step.kv.shape
    keys, values = step.kv.permute(1, 0, 3, 2, 4).reshape(2, layers * heads, entries, head_dim)
    rows = step.queries.shape[1]
    grouped = step.queries.view(layers, rows, heads, -1, head_dim).transpose(1, 2)
    return keys, values, grouped.reshape(layers * heads, -1, head_dim)


def _seen(step: StepKv, squared: bool = False, outputs: bool = False) -> KeyScores:
    """How the queries' attention falls on the step's entries."""
    assert step.queries is not None
    keys, values = (list(part) for part in step.kv.unbind(1))
    slots = torch.arange(step.kv.shape[2], device=step.kv.device)
    return score_keys(keys, slots, step.queries, squared, values if outputs else None)


def _unlaned(keys: Tensor, values: Tensor, step: StepKv) -> Tensor:
    layers, _, _, heads, head_dim = step.kv.shape
    both = torch.stack([keys, values]).view(2, layers, heads, -1, head_dim)
    return both.permute(1, 0, 3, 2, 4).contiguous()


def _scores(queries: Tensor, keys: Tensor) -> Tensor:
    return torch.bmm(queries * keys.shape[-1] ** -0.5, keys.transpose(1, 2))


def _most(importance: Tensor, keep: int) -> Tensor:
    """The entries of most importance, in their own order. Shapes: [lanes, keep]."""
    return importance.topk(keep, -1).indices.sort(-1).values


def _gathered(entries: Tensor, kept: Tensor) -> Tensor:
    return entries.gather(1, kept[..., None].expand(-1, -1, entries.shape[-1]))


def _least_squares(a: Tensor, start: float) -> Tensor:
    """Weights w, none below `LEAST_WEIGHT`, for which a @ w comes near 1: projected gradients.

    Shapes: `a` [lanes, queries, kept]; the result [lanes, kept].
    """
    gram = a.transpose(1, 2) @ a
    target = a.sum(1)
    bound = torch.linalg.matrix_norm(gram, ord=inf)[:, None].clamp_min(1e-20)
    weights = torch.full_like(target, start)
    ahead, pace = weights, 1.0
    for _ in range(FIT_ROUNDS):
        gradient = (gram @ ahead[..., None])[..., 0] - target
        stepped = (ahead - gradient / bound).clamp_min(LEAST_WEIGHT)
        faster = (1 + (1 + 4 * pace * pace) ** 0.5) / 2
        ahead = stepped + (pace - 1) / faster * (stepped - weights)
        weights, pace = stepped, faster
    return weights


def _ridge(shares: Tensor, outputs: Tensor, prior: Tensor, ridge: float) -> Tensor:
    """Values for which shares @ values comes near the outputs, drawn towards their prior.

    Shapes: `shares` [lanes, queries, kept]; `outputs` [lanes, queries, head_dim]; `prior` and the
    result [lanes, kept, head_dim]. Solved in float64.
    """
    a, y, p = shares.double(), outputs.double(), prior.double()
    gram = a.transpose(1, 2) @ a
    pull = ridge * gram.diagonal(dim1=1, dim2=2).mean(-1)[:, None, None] + 1e-9
    system = gram + pull * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    factor = torch.linalg.cholesky(system)
    return torch.cholesky_solve(a.transpose(1, 2) @ y + pull * p, factor).to(prior.dtype)
