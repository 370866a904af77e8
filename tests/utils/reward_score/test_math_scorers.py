"""The scorers of GSM8K and MATH, and their dispatch."""

import pytest

from verl.utils.reward_score import SCORERS, default_compute_score, gsm8k, math_reward


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("5+7=12\n#### 12", "12", "12"),
        ("####12", "12", "12"),
        ("#### 1,234.", "1234", "1234"),
        ("#### -3.5", "-3.5", "-3.5"),
        ("#### 1 or #### 2", "2", "2"),
        ("the answer is 12.", None, "12"),
        ("#### none, but 7 is near", None, "7"),
        ("no number . , here", None, None),
        ("#### 5" + "x" * 400, None, None),
        ("#### $7", None, "7"),
    ],
)
def test_gsm8k_extraction(text, strict, flexible):
    assert gsm8k.extract_solution(text) == strict
    assert gsm8k.extract_solution(text, "flexible") == flexible


def test_gsm8k_score():
    assert gsm8k.compute_score("#### 1,000", "1000") == 1.0
    assert gsm8k.compute_score("#### 1000", "1,000") == 1.0
    assert gsm8k.compute_score("#### 7", "8") == 0.0
    assert gsm8k.compute_score("#### 7", "8", format_score=0.1) == 0.1
    assert gsm8k.compute_score("7", "8", format_score=0.1) == 0.0
    assert gsm8k.compute_score("is 8", "8", method="flexible", score=2.0) == 2.0
    with pytest.raises(ValueError, match="'loose'"):
        gsm8k.compute_score("8", "8", method="loose")


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        (r"so \boxed{1} then \boxed{\frac{1}{2}}.", r"\boxed{\frac{1}{2}}"),
        (r"\fbox{3}", r"\fbox{3}"),
        (r"\boxed 5$", r"\boxed 5"),
        (r"\boxed{1} and \boxed{2", r"\boxed{1}"),
        ("no box", None),
    ],
)
def test_last_boxed(text, boxed):
    assert math_reward.last_boxed_only_string(text) == boxed


SAME = [
    (r"\frac{1}{2}", r"\dfrac12"),
    (r"\frac{1}{2}", "1/2"),
    (r"\frac{1}{2}", "0.5"),
    (r"-\frac{3}{4}", "-.75"),
    (r"1\frac{1}{2}", "3/2"),
    (r"\frac{2}{4}", r"\frac12"),
    ("1,000", "1000"),
    ("10,\\!000", "10000"),
    (r"90^\circ", "90"),
    (r"50\%", "50"),
    (r"\$18", "18"),
    (r"12\text{ cm}", "12"),
    (r"\text{Monday}", "Monday"),
    (r"\text{(B)}", "(B)"),
    (r"\left( 1, \frac{1}{2} \right)", "(1, 0.5)"),
    (r"[0, 1)", r"\left[0,1\right)"),
    (r"\sqrt2", r"\sqrt{2}"),
    ("x = 5", "5"),
    ("5.", "5"),
    ("1,2", "1, 2.0"),
    (r"\frac{\pi}{2}", r"\frac\pi2"),
]
DIFFERENT = [
    ("1", "2"),
    ("(0, 1)", "[0, 1]"),
    ("(0, 1)", "[0, 1)"),
    ("1, 2", "2, 1"),
    (r"\sqrt{2}", "2"),
    ("x", "y"),
    ("1/0", "0"),
    (r"\frac{1}{2}", r"\frac{1}{3}"),
    ("", "0"),
    ("(1,2)", "(1,2,3)"),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_equivalent(one, other):
    assert math_reward.is_equiv(one, other) and math_reward.is_equiv(other, one)
    assert math_reward.compute_score(rf"hence \boxed{{{one}}}", other) == 1.0


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_not_equivalent(one, other):
    assert not math_reward.is_equiv(one, other) and not math_reward.is_equiv(other, one)
    assert math_reward.compute_score(rf"\boxed{{{one}}}", other) == 0.0


def test_dispatch():
    assert default_compute_score("openai/gsm8k", "#### 3", "3") == 1.0
    for source in SCORERS:
        assert default_compute_score(source, r"\boxed{3} #### 3", "3", extra_info={}) == 1.0
        assert default_compute_score(source, "3", "3") == 0.0
    with pytest.raises(NotImplementedError, match=r"data_source='mine'; known are .*gsm8k.*custom_reward_function"):
        default_compute_score("mine", "", "")
