"""A loop is told by the tokens in the window alone, and each token costs a few look-ups."""

from collections import Counter
from math import log2

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvtier_worker.loops import TOKEN_BITS, WINDOW_TOKENS_MAX, LoopRules, LoopWindow

Tokens = list[int]


def naive_repeated_share(window: Tokens, ngram_tokens: int) -> float:
    starts = range(len(window) - ngram_tokens + 1)
    runs = [tuple(window[i : i + ngram_tokens]) for i in starts]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def naive_entropy_bits(window: Tokens) -> float:
    shares = [count / len(window) for count in Counter(window).values()]
    return -sum(share * log2(share) for share in shares)


def read(rules: LoopRules, tokens: Tokens) -> LoopWindow:
    window = LoopWindow(rules)
    for token in tokens:
        window.feed(token)
    return window


@given(
    tokens=st.lists(st.integers(0, 3) | st.just(2**TOKEN_BITS - 1), max_size=120),
    window_tokens=st.integers(2, 40),
    ngram_tokens=st.integers(1, 39),
)
@example(tokens=[0, 1] * 30, window_tokens=8, ngram_tokens=3)
def test_the_window_counts_as_a_naive_reference_does(
    tokens: Tokens, window_tokens: int, ngram_tokens: int
) -> None:
    rules = LoopRules(window_tokens, min(ngram_tokens, window_tokens - 1))
    window = LoopWindow(rules)
    for end, token in enumerate(tokens, 1):
        window.feed(token)
        seen = tokens[max(0, end - window_tokens) : end]
        share = naive_repeated_share(seen, rules.ngram_tokens)
        bits = naive_entropy_bits(seen)
        assert window.repeated_share == share
        assert window.entropy_bits == pytest.approx(bits, abs=1e-4)
        assert window.repeats == (len(seen) == window_tokens and share >= rules.repeated_share)
        if abs(bits - rules.entropy_bits) > 1e-4:
            low = bits < rules.entropy_bits
            assert window.is_monotonous == (len(seen) == window_tokens and low)


@given(
    old=st.lists(st.integers(0, 5), max_size=60),
    new=st.lists(st.integers(0, 5), min_size=20, max_size=40),
)
def test_who_begins_with_the_newest_tokens_says_exactly_what_who_read_all_says(
    old: Tokens, new: Tokens
) -> None:
    rules = LoopRules(window_tokens=20, ngram_tokens=3)
    all_of_it, newest = read(rules, old + new), read(rules, new)
    assert all_of_it.repeated_share == newest.repeated_share
    assert all_of_it.entropy_bits == newest.entropy_bits


def test_a_fork_goes_its_own_way() -> None:
    rules = LoopRules(window_tokens=16, ngram_tokens=2)
    window = read(rules, list(range(16)))
    child = window.fork()
    for _ in range(16):
        child.feed(7)
    assert child.repeats and child.is_monotonous
    assert not window.repeats and not window.is_monotonous
    assert window.repeated_share == 0 and window.entropy_bits == pytest.approx(4)


@pytest.mark.parametrize("period", [1, 7, 100, 124])
def test_by_default_loops_of_nearly_half_a_window_are_found(period: int) -> None:
    assert read(LoopRules(), list(range(period)) * 300).repeats


@pytest.mark.parametrize("tokens", [list(range(10_000)), list(range(200)) * 20])
def test_by_default_what_is_new_for_most_of_a_window_is_no_loop(tokens: Tokens) -> None:
    window = read(LoopRules(), tokens)
    assert not window.repeats and not window.is_monotonous


def test_two_tokens_in_changing_order_are_monotonous_without_repeated_runs() -> None:
    coin = [int(bit) for i in range(64) for bit in f"{i * 37 % 64:06b}"]
    window = read(LoopRules(ngram_tokens=64), coin)
    assert window.is_monotonous and not window.repeats


def test_a_window_that_is_not_full_is_no_loop() -> None:
    rules = LoopRules(window_tokens=64)
    assert not read(rules, [5] * 63).repeats and not read(rules, [5] * 63).is_monotonous
    assert read(rules, [5] * 64).repeats and read(rules, [5] * 64).is_monotonous


def test_either_rule_can_be_switched_off() -> None:
    window = read(LoopRules(repeated_share=1, entropy_bits=0), [5] * 1000)
    assert not window.repeats and not window.is_monotonous


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"window_tokens": 8}, "runs of 8 tokens in a window of 8"),
        ({"ngram_tokens": 0}, "runs of 0"),
        ({"window_tokens": WINDOW_TOKENS_MAX + 1}, "up to"),
        ({"repeated_share": 0}, "share of 0"),
        ({"repeated_share": 1.1}, "share of 1.1"),
        ({"entropy_bits": -1}, "-1 bits"),
    ],
)
def test_rules_that_no_window_could_follow_are_refused(changed: dict[str, int], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        LoopRules(**changed)
