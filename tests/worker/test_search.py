"""Searches find what they are after, share what branches have in common, and leave nothing."""

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import cast

import pytest

from kvtier_worker.engine import Engine
from kvtier_worker.errors import (
    BadPrompt,
    BadSearch,
    BadStepRules,
    PoolTooSmall,
    SearchFailed,
    TooLong,
    WorkerError,
)
from kvtier_worker.scheduler import Limits
from kvtier_worker.search import Beam, BestOfN, Fate, MajorityVote, Mcts, Outcome, Question
from kvtier_worker.search.question import BRANCHES_MAX
from kvtier_worker.steps import StepRules
from tests.worker.searching import (
    LONG,
    MODEL,
    NAMES,
    NEW_TOKENS,
    PROMPT,
    QUESTION,
    RULES,
    Failing,
    depth,
    evenness,
    nothing_left,
    remainder,
    strategies,
    undisturbed,
)
from tests.worker.tiny import lively, tiny_engine

PAGES = 200


def roomy(running: int = 32) -> Engine:
    return tiny_engine(MODEL, PAGES, limits=Limits(running=running))


def generated_alone(branch: int) -> tuple[int, ...]:
    """What a branch from the prompt generates in an engine of its own."""
    engine = roomy()
    alone = engine.submit(PROMPT, NEW_TOKENS, QUESTION.sampling(branch))
    engine.run()
    return tuple(alone.generated)


def grown(outcome: Outcome) -> list[tuple[int, ...]]:
    return [report.generated for report in outcome.branches if report.number]


# ------------------------------------------------------------------ strategies


def test_n_branches_share_one_prefill() -> None:
    engine, n = roomy(), 5
    figures = BestOfN(evenness, n).search(engine, QUESTION).figures
    shared = len(PROMPT) - 1
    assert engine.scheduler.counters.computed_tokens == shared + n * NEW_TOKENS
    assert figures.shared_tokens == n * shared
    assert figures.generated_tokens == n * NEW_TOKENS
    assert engine.peak_pool_bytes < n * len(PROMPT) / 16 * engine.pool.page_bytes


def test_branches_are_what_each_would_have_been_alone() -> None:
    outcome = BestOfN(evenness, n=4).search(roomy(), QUESTION)
    assert grown(outcome) == [generated_alone(branch) for branch in range(1, 5)]
    assert len(set(grown(outcome))) == 4


def test_the_best_of_n_wins() -> None:
    outcome = BestOfN(evenness, n=8).search(roomy(), QUESTION)
    scores = [report.score for report in outcome.branches if report.number]
    assert outcome.winner.score == max(score for score in scores if score is not None)
    assert outcome.winner.fate is Fate.FINISHED
    assert scores == [evenness(PROMPT, tokens) for tokens in grown(outcome)]
    assert outcome.figures.verifier_calls == 8 and outcome.figures.verifier_failures == 0


def test_most_votes_win() -> None:
    outcome = MajorityVote(remainder, n=9).search(roomy(), QUESTION)
    votes = Counter(tokens[-1] % 3 for tokens in grown(outcome))
    winner = outcome.winner
    assert votes[winner.generated[-1] % 3] == max(votes.values())
    assert winner.score == max(votes.values()) / 9


def test_a_branch_without_an_answer_has_no_vote() -> None:
    def only_even(prompt: Sequence[int], generated: Sequence[int]) -> int | None:
        return 0 if generated[-1] % 2 == 0 else None

    outcome = MajorityVote(only_even, n=8).search(roomy(), QUESTION)
    even = sum(tokens[-1] % 2 == 0 for tokens in grown(outcome))
    assert outcome.winner.score == even / 8
    assert [r.score is None for r in outcome.branches[1:]] == [
        tokens[-1] % 2 == 1 for tokens in grown(outcome)
    ]
    assert all(report.failure is None for report in outcome.branches)
    with pytest.raises(SearchFailed, match="none of 9 branches") as caught:
        MajorityVote(lambda prompt, generated: None, n=8).search(roomy(), QUESTION)
    assert caught.value.figures is not None
    assert caught.value.figures.generated_tokens == 8 * NEW_TOKENS


def test_an_answer_that_cannot_be_counted_is_a_failure_of_its_branch() -> None:
    def answer_of(prompt: Sequence[int], generated: Sequence[int]) -> Hashable:
        return remainder(prompt, generated) or cast(Hashable, [0])

    outcome = MajorityVote(answer_of, n=9).search(roomy(), QUESTION)
    uncounted = [tokens[-1] % 3 == 0 for tokens in grown(outcome)]
    assert any(uncounted)
    assert [report.failure is not None for report in outcome.branches[1:]] == uncounted


@pytest.mark.parametrize(("width", "expand"), [(1, 4), (3, 2), (4, 3)])
def test_a_beam_keeps_exactly_its_width_and_prunes_the_rest_at_once(
    width: int, expand: int
) -> None:
    engine, alive = roomy(), []

    def watching(prompt: Sequence[int], generated: Sequence[int]) -> float:
        alive.append(len(engine.scheduler.running))
        return evenness(prompt, generated)

    outcome = Beam(watching, RULES, width, expand).search(engine, LONG)
    assert max(alive) == width * expand
    rounds = 1 + max(depth(outcome, report.number) for report in outcome.branches)
    assert rounds > 3
    parents = {report.parent for report in outcome.branches}
    in_beam = 0
    for at in range(1, rounds):
        made = [r for r in outcome.branches if depth(outcome, r.number) == at]
        kept = [r.score for r in made if r.number in parents]
        dropped = [r.score for r in made if r.fate is Fate.PRUNED and r.number not in parents]
        in_beam += sum(report.fate is Fate.FINISHED for report in made)
        assert len(kept) == width if not in_beam else len(kept) <= width
        assert all((one or 0) >= (other or 0) for one in kept for other in dropped)
        if at == 1:
            assert len(made) == width * expand
    assert outcome.winner.fate is Fate.FINISHED


def test_a_beam_expands_where_steps_end() -> None:
    outcome = Beam(evenness, RULES, width=2, expand=2).search(roomy(), QUESTION)
    delimiters = {run[0] for run in RULES.delimiters}
    for report in outcome.branches[1:]:
        before = report.generated[: report.forked_at]
        assert not before or before[-1] in delimiters
        assert sum(token in delimiters for token in report.generated) == report.steps
        grown_here = report.generated[report.forked_at : -1]
        assert not delimiters & set(grown_here)


def test_a_tree_search_goes_deeper_where_it_is_good() -> None:
    def likes_first(prompt: Sequence[int], generated: Sequence[int]) -> float:
        return float(tuple(generated[:2]) == liked)

    liked = BestOfN(evenness, n=1).search(roomy(), QUESTION).branches[1].generated[:2]
    search = Mcts(likes_first, RULES, width=3, visits=12, rollouts=2, exploration=0.5)
    outcome = search.search(roomy(), LONG)
    nodes = [report for report in outcome.branches if report.fate is Fate.PRUNED][1:]
    below = [r for r in nodes if r.generated[:2] == liked]
    assert len(below) > len(nodes) / 2
    assert max(depth(outcome, report.number) for report in below) >= 3
    assert outcome.winner.score == 1.0


def test_a_tree_search_visits_ends_again_without_new_branches() -> None:
    short = Question(PROMPT, 1, temperature=12.0)
    outcome = Mcts(evenness, RULES, width=2, visits=20, rollouts=1).search(roomy(), short)
    assert outcome.figures.branches == 3
    assert outcome.figures.verifier_calls == 2


@pytest.mark.parametrize("name", NAMES)
def test_a_search_is_the_same_again(name: str) -> None:
    assert strategies()[name].search(roomy(), QUESTION) == undisturbed(name)
    other = Question(PROMPT, 5, temperature=12.0, seed=6)
    begun = grown(strategies()[name].search(roomy(), other))[0]
    assert begun[:5] != grown(undisturbed(name))[0][:5]


@pytest.mark.parametrize("name", NAMES)
def test_a_search_leaves_nothing_but_its_winner(name: str) -> None:
    engine = roomy()
    outcome = strategies()[name].search(engine, QUESTION)
    assert nothing_left(engine)
    fates = Counter(report.fate for report in outcome.branches)
    assert fates[Fate.PRUNED] == outcome.figures.pruned
    assert sum(fates.values()) == outcome.figures.branches
    assert outcome.winner in outcome.branches


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("running", [1, 2])
def test_fewer_may_run_than_there_are_branches(name: str, running: int) -> None:
    engine = roomy(running)
    outcome = strategies()[name].search(engine, QUESTION)
    assert outcome.branches == undisturbed(name).branches
    assert engine.scheduler.counters.peak_running <= running
    assert nothing_left(engine)


@pytest.mark.parametrize("name", NAMES)
def test_others_go_on_meanwhile_and_are_not_touched(name: str) -> None:
    alone = roomy()
    expected = alone.submit(PROMPT[:9], 30, lively(1))
    alone.run()
    engine = roomy()
    other = engine.submit(PROMPT[:9], 30, lively(1))
    outcome = strategies()[name].search(engine, QUESTION)
    assert len(other.generated) > 20
    engine.run()
    assert other.generated == expected.generated
    assert outcome == undisturbed(name)


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_of_one_token_can_be_searched(name: str) -> None:
    def by_length(prompt: Sequence[int], generated: Sequence[int]) -> float:
        return len(generated)

    engine = roomy()
    one = Question((7,), 12, temperature=12.0)
    assert len(strategies(by_length)[name].search(engine, one).winner.generated) == 12
    assert nothing_left(engine)


# ---------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize("name", NAMES)
def test_a_verifier_that_raises_costs_a_branch_and_is_reported(name: str) -> None:
    engine = roomy()
    outcome = strategies(Failing(lambda call: call == 2))[name].search(engine, QUESTION)
    failed = [report for report in outcome.branches if report.failure is not None]
    assert [report.failure for report in failed] == ["RuntimeError: no verdict"]
    assert failed[0].fate is Fate.FAILED and failed[0].score is None
    assert outcome.winner.failure is None
    assert outcome.figures.verifier_failures == 1
    assert nothing_left(engine)


@pytest.mark.parametrize("name", NAMES)
def test_a_verifier_that_always_raises_ends_the_search(name: str) -> None:
    engine, verifier = roomy(), Failing(lambda call: True)
    with pytest.raises(SearchFailed, match="first to fail: RuntimeError: no verdict") as caught:
        strategies(verifier)[name].search(engine, QUESTION)
    assert isinstance(caught.value, WorkerError)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert verifier.calls > 1
    assert nothing_left(engine)


@pytest.mark.parametrize("score", [float("nan"), float("inf"), None, "good"])
def test_what_is_no_score_is_a_failure(score: float) -> None:
    with pytest.raises(SearchFailed, match="Error"):
        BestOfN(lambda prompt, generated: score, n=2).search(roomy(), QUESTION)


@pytest.mark.parametrize("name", NAMES)
def test_an_interrupt_leaves_nothing_either(name: str) -> None:
    engine = roomy()
    verifier = Failing(lambda call: call == 3, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        strategies(verifier)[name].search(engine, QUESTION)
    assert nothing_left(engine)


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt": ()},
        {"new_tokens": 0},
        {"temperature": 0.0},
        {"temperature": float("nan")},
        {"seed": -1},
    ],
)
def test_questions_that_cannot_be_searched_are_refused(wrong: dict[str, object]) -> None:
    fields: dict[str, object] = {"prompt": PROMPT, "new_tokens": 9, "temperature": 1.0, "seed": 0}
    with pytest.raises(BadSearch):
        Question(**(fields | wrong))  # type: ignore[arg-type]


def test_strategies_without_branches_or_with_too_many_are_refused() -> None:
    for count in (0, -1, BRANCHES_MAX):
        for refused in (
            lambda count=count: BestOfN(evenness, count),
            lambda count=count: MajorityVote(remainder, count),
            lambda count=count: Beam(evenness, RULES, width=count),
            lambda count=count: Beam(evenness, RULES, expand=count),
            lambda count=count: Mcts(evenness, RULES, width=count),
            lambda count=count: Mcts(evenness, RULES, visits=count),
            lambda count=count: Mcts(evenness, RULES, rollouts=count),
        ):
            with pytest.raises(BadSearch, match=str(count)):
                refused()
    with pytest.raises(BadSearch, match="width × expand is 10000"):
        Beam(evenness, RULES, width=100, expand=100)
    with pytest.raises(BadSearch, match="visits × "):
        Mcts(evenness, RULES, visits=1000, rollouts=4)
    for exploration in (-1.0, float("nan"), float("inf")):
        with pytest.raises(BadSearch, match="exploration"):
            Mcts(evenness, RULES, exploration=exploration)


def test_what_the_engine_refuses_is_its_own_error() -> None:
    engine = tiny_engine(MODEL, 3)
    search = BestOfN(evenness, n=2)
    with pytest.raises(PoolTooSmall):
        search.search(engine, QUESTION)
    with pytest.raises(TooLong):
        search.search(engine, Question(PROMPT, 5000))
    with pytest.raises(BadPrompt, match="tokens that the model has not"):
        search.search(engine, Question((256,), 5))
    unknown = StepRules(delimiters=((999,),))
    with pytest.raises(BadStepRules):
        Beam(evenness, unknown).search(engine, QUESTION)
    assert nothing_left(engine)


def test_a_search_without_end_stops_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier_worker.search.tree.BRANCHES_MAX", 10)
    engine = roomy()
    with pytest.raises(SearchFailed, match="has made 10 branches"):
        Beam(evenness, RULES, width=2, expand=2).search(engine, QUESTION)
    assert nothing_left(engine)
