"""Where steps end, in the awkward cases too."""

import pytest

from kvtier_worker.errors import BadStepRules
from kvtier_worker.folding import FoldPolicy
from kvtier_worker.model import Llama
from kvtier_worker.steps import PROBE_TIMEOUTS_MAX, StepRules, StepScanner
from tests.worker.tiny import tiny_engine


def decode(tokens: list[int]) -> str:
    """Tokens are bytes."""
    return bytes(tokens).decode("utf-8", errors="replace")


def steps_of(rules: StepRules, text: str, first: int = 0) -> list[str]:
    """The texts of the steps that end; one token for each byte, fed one by one."""
    tokens = list(text.encode())
    scanner = StepScanner(rules, first)
    found = [step for token in tokens for step in scanner.feed([token])]
    assert StepScanner(rules, first).feed(tokens) == found  # no matter in how many pieces
    return [decode(tokens[a:b]) for a, b in found]


BLANK = (tuple(b"\n\n"),)


def test_a_delimiter_split_over_tokens_ends_a_step_with_its_last_token() -> None:
    assert steps_of(StepRules(BLANK), "one\n\ntwo\nhalf\n\nopen\n") == ["one\n\n", "two\nhalf\n\n"]


def test_a_delimiter_is_not_made_of_the_last_one_s_tokens() -> None:
    assert steps_of(StepRules(BLANK), "one\n\n\ntwo\n\n") == ["one\n\n", "\ntwo\n\n"]


def test_empty_steps_are_none_where_a_step_has_a_least_length() -> None:
    assert steps_of(StepRules(BLANK), "\n\n\n\nx\n\n") == ["\n\n", "\n\n", "x\n\n"]
    assert steps_of(StepRules(BLANK, least_tokens=3), "\n\n\n\nx\n\n") == ["\n\n\n\n", "x\n\n"]


def test_a_step_may_end_with_the_last_token() -> None:
    assert steps_of(StepRules(BLANK), "the end\n\n") == ["the end\n\n"]


def test_a_prompt_s_delimiters_end_nothing() -> None:
    assert steps_of(StepRules(BLANK), "ask\n\nme\n\nyes\n\n", first=6) == ["e\n\n", "yes\n\n"]
    assert steps_of(StepRules(BLANK), "ask\n\nyes\n\n", first=4) == ["\nyes\n\n"]


def test_nothing_ends_inside_a_code_fence() -> None:
    rules = StepRules(BLANK, fence="```", decode=decode)
    text = "so\n\n```\na = 1\n\nb = 2\n\n```\n\ndone\n\n"
    assert steps_of(rules, text) == ["so\n\n", "```\na = 1\n\nb = 2\n\n```\n\n", "done\n\n"]
    assert steps_of(rules, "```\nnever closed\n\nnothing\n\n") == []


def test_a_pattern_ends_a_step_where_its_match_ends() -> None:
    rules = StepRules(pattern=r"(?<=\n)(Wait|But)\b,", decode=decode)
    assert steps_of(rules, "a\nWait, b But, c\nBut, d") == ["a\nWait,", " b But, c\nBut,"]


def test_a_pattern_sees_characters_of_several_tokens() -> None:
    rules = StepRules(pattern="→|終", decode=decode)
    assert steps_of(rules, "é→ü終x") == ["é→", "ü終"]


def test_a_long_step_waits_for_the_next_soft_boundary() -> None:
    rules = StepRules(BLANK, soft_delimiters=((ord("."),),), long_tokens=8)
    assert steps_of(rules, "a.b.cdefghij.k.l\n\n") == ["a.b.cdefghij.", "k.l\n\n"]
    assert steps_of(rules, "abcdefghijklmnopqrstuvwxyz") == []


def test_a_catastrophic_pattern_is_given_up_and_delimiters_go_on() -> None:
    rules = StepRules(BLANK, pattern=r"(a|aa|a?)+(a|aa)+\1*$[^b]", decode=decode)
    scanner = StepScanner(rules, 0)
    found = [step for token in b"a" * 80 + b"\n\nb\n\n" for step in scanner.feed([token])]
    assert found == [(0, 82), (82, 85)]
    assert scanner.probe_timeouts == PROBE_TIMEOUTS_MAX


def test_a_fork_scans_on_by_itself() -> None:
    one = StepScanner(StepRules(BLANK), 0)
    one.feed(b"abc\n")
    other = one.fork()
    assert one.feed(b"x\n") == []
    assert other.feed(b"\n") == [(0, 5)]
    assert one.feed(b"\n") == [(0, 7)]


@pytest.mark.parametrize(
    ("rules", "match"),
    [
        (StepRules(((256,),)), "not a run of tokens"),
        (StepRules(((-1,),)), "not a run of tokens"),
        (StepRules(((),)), "not a run of tokens"),
        (StepRules(pattern="("), "no `decode`"),
        (StepRules(pattern="(", decode=decode), "no regular expression"),
        (StepRules(BLANK, fence="```"), "no `decode`"),
        (StepRules(), "no step would ever end"),
        (StepRules(BLANK, soft_delimiters=BLANK), "long_tokens"),
    ],
)
def test_rules_that_end_nothing_are_refused(tiny: Llama, rules: StepRules, match: str) -> None:
    with pytest.raises(BadStepRules, match=match):
        tiny_engine(tiny, 5, folding=FoldPolicy(rules))
