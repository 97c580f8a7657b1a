"""Trains the shipped reasoning model from scratch: `python -m kvtier_worker.cot.train --out DIR`.

The budget is counted in steps, and every draw comes from the seed: on the same machine with the
same number of threads the same recipe gives the same weights, however busy the machine is.
"""

import json
import os
import resource
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import click
import numpy as np
import torch
from safetensors.torch import save_file
from torch.nn import functional

from kvtier_worker.cot.grade import Grade, grade
from kvtier_worker.cot.lesson import CYCLE, Fold, Lesson, build_lesson
from kvtier_worker.cot.muon import Muon
from kvtier_worker.cot.network import Network, hugging_face_config
from kvtier_worker.cot.recipe import SHIPPED, Recipe
from kvtier_worker.cot.task import SESSION_1K, SESSION_4K, Size, sample_problem
from kvtier_worker.cot.vocabulary import FIRST, LAST, STOP_TOKEN, first_embedding
from kvtier_worker.cot.words import write_tokenizer
from kvtier_worker.model import ModelConfig

DEFAULT: Final = Recipe()
LOG_EVERY: Final = 20
SAVE_EVERY: Final = 200
ADAM_BETAS: Final = (0.9, 0.98)
SMOOTHING: Final = 0.95
GRADED_SEED: Final = 1_000_003
GRADED: Final = ((Size(8, 12), 64), (SESSION_1K, 32), (SESSION_4K, 8))
"""Sizes and numbers of problems that are looked at when weights are saved."""


@dataclass(slots=True)
class Point:
    """One point of the loss curve: losses of far look-ups and of row tokens, smoothed."""

    step: int
    tokens: int
    cpu_s: float
    lookup_loss: float
    row_loss: float


@dataclass(slots=True)
class Trainer:
    """The network, its optimisers and its random numbers."""

    recipe: Recipe
    config: ModelConfig
    step: int = 0
    tokens: int = 0
    problems: int = 0
    curve: list[Point] = field(default_factory=list)
    network: Network = field(init=False)
    _random: np.random.Generator = field(init=False)
    _muon: Muon = field(init=False)
    _adam: torch.optim.AdamW = field(init=False)
    _losses: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        recipe = self.recipe
        torch.manual_seed(recipe.seed)
        self._random = np.random.default_rng(recipe.seed)
        table = first_embedding(self.config.hidden, recipe.embedding_spread, recipe.seed)
        self.network = Network(self.config, torch.from_numpy(table))
        named = list(self.network.named_parameters())
        self._muon = Muon(p for name, p in named if p.dim() == 2 and "embed" not in name)
        others = [p for name, p in named if p.dim() != 2 or "embed" in name]
        self._adam = torch.optim.AdamW(others, betas=ADAM_BETAS, weight_decay=0.0)

    def advance(self) -> None:
        """One step of training."""
        lesson = self._draw()
        targets = lesson.weights[:, 1:]
        wanted = targets > 0
        logits = self.network(
            lesson.tokens[:, :-1], lesson.positions[:, :-1], lesson.seen[:, :-1, :-1], wanted
        )
        weights = targets[wanted]
        each = functional.cross_entropy(logits, lesson.tokens[:, 1:][wanted], reduction="none")
        ((each * weights).sum() / weights.sum()).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), self.recipe.clip)
        rate = self.recipe.rate(self.step)
        self._muon.step(rate * self.recipe.muon_rate)
        self._adam.param_groups[0]["lr"] = rate * self.recipe.adam_rate
        self._adam.step()
        self._adam.zero_grad()
        self.step += 1
        self.tokens += int(wanted.sum())
        self._note(each.detach(), weights)

    def save(self, directory: str, grades: dict[str, Grade]) -> None:
        """Write weights, config, tokenizer and the run's record as a Hugging Face directory."""
        os.makedirs(directory, exist_ok=True)
        weights = {name: t.detach().contiguous() for name, t in self.network.state_dict().items()}
        save_file(weights, os.path.join(directory, "model.safetensors"), {"format": "pt"})
        write_tokenizer(directory)
        record = {
            "recipe": asdict(self.recipe),
            "parameters": sum(p.numel() for p in self.network.parameters()),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "steps": self.step,
            "tokens": self.tokens,
            "problems": self.problems,
            "cpu_s": round(_cpu_s(), 1),
            "grades": {name: asdict(g) for name, g in grades.items()},
            "curve": [asdict(point) for point in self.curve],
        }
        _write_json(directory, "config.json", hugging_face_config(self.config, STOP_TOKEN))
        _write_json(directory, "training.json", record)

    def _draw(self) -> Lesson:
        size = self.recipe.draw_size(self._random, self.step)
        count = max(1, round(self.recipe.batch_tokens / (size.tokens + 2 * size.steps)))
        firsts = self._random.integers(FIRST, LAST - size.steps + 2, size=count)
        problems = [
            sample_problem(self._random, size, self.recipe.note_share, int(first))
            for first in firsts
        ]
        folds = [CYCLE[(self.problems + i) % len(CYCLE)] for i in range(count)]
        self.problems += count
        return build_lesson(problems, folds, self._random, extra_endings=size.steps, moved=True)

    def _note(self, each: torch.Tensor, weights: torch.Tensor) -> None:
        now = each[weights > 1].mean().item(), each[weights == 1].mean().item()
        before = self._losses or now
        self._losses = lookup, row = (
            SMOOTHING * before[0] + (1 - SMOOTHING) * now[0],
            SMOOTHING * before[1] + (1 - SMOOTHING) * now[1],
        )
        if self.step % LOG_EVERY == 0:
            self.curve.append(
                Point(self.step, self.tokens, round(_cpu_s(), 1), round(lookup, 6), round(row, 6))
            )


def train(trainer: Trainer, directory: str, stop_at: int) -> Iterator[Point | dict[str, Grade]]:
    """Run a trainer to step `stop_at`; yields the points of its curve, and grades when it saves."""
    while trainer.step < stop_at:
        trainer.advance()
        if trainer.step % LOG_EVERY == 0:
            yield trainer.curve[-1]
        if trainer.step % SAVE_EVERY == 0 or trainer.step == stop_at:
            grades = grade_all(trainer.network)
            trainer.save(directory, grades)
            yield grades


def grade_all(network: Network) -> dict[str, Grade]:
    """Teacher-forced grades at all sizes, with full KV and folded."""
    return {
        f"{size.steps}x{size.rows} {fold.name}": grade(network, size, fold, count, GRADED_SEED)
        for size, count in GRADED
        for fold in (Fold.FULL, Fold.LAST_4)
    }


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _write_json(directory: str, name: str, content: dict[str, Any]) -> None:
    with open(os.path.join(directory, name), "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.write("\n")


@click.command()
@click.option("--out", required=True, help="Where the model's directory is written.")
@click.option("--seed", default=DEFAULT.seed, show_default=True, type=click.IntRange(0))
@click.option("--steps", default=DEFAULT.steps, show_default=True, type=click.IntRange(1))
@click.option("--threads", default=2, show_default=True, type=click.IntRange(1))
@click.option("--stop-at", type=click.IntRange(1), help="Stop at this step of the same run.")
def main(out: str, seed: int, steps: int, threads: int, stop_at: int | None) -> None:
    """Train the reasoning model and write it as a Hugging Face directory."""
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    trainer = Trainer(replace(DEFAULT, seed=seed, steps=steps), SHIPPED)
    for news in train(trainer, out, stop_at or steps):
        click.echo(str(news))


if __name__ == "__main__":
    main()
