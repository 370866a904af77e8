"""Scorers of text and numbers, and the dispatch to them by data source."""

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.utils.reward_score.answer_pairs import DIFFERENT as DIFFERENT_PAIRS
from tests.utils.reward_score.answer_pairs import EQUAL as EQUAL_PAIRS
from tests.utils.reward_score.answer_pairs import EQUAL_BY_ALGEBRA
from verl.errors import MissingPackage
from verl.utils import reward_score
from verl.utils.reward_score import (
    SCORERS,
    data_source_problem,
    default_compute_score,
    geo3k,
    gsm8k,
    math_batch,
    math_dapo,
    math_reward,
    math_verify,
    prime_math,
    scorer_module,
    search_r1_like_qa_em,
)

ROOT = Path(__file__).parents[3]


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
        (r"} \boxed{a{b}c} } {", r"\boxed{a{b}c}"),
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
    ("9" * 5000, "3"),  # more digits than Python reads
    ("1" + "0" * 5000 + "/3", "3"),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_equivalent(one, other):
    assert math_reward.is_equiv(one, other) and math_reward.is_equiv(other, one)
    assert math_reward.compute_score(rf"hence \boxed{{{one}}}", other) == 1.0


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_not_equivalent(one, other):
    assert not math_reward.is_equiv(one, other) and not math_reward.is_equiv(other, one)
    assert math_reward.compute_score(rf"\boxed{{{one}}}", other) == 0.0


# ---- DAPO


@pytest.mark.parametrize(
    ("text", "truth", "pred", "correct"),
    [
        ("thus\nAnswer: 34", "34", "34", True),
        (r"Answer: $\boxed{34}$", "34", "34", True),
        ("Answer: 1\nAnswer: $1{,}234$.", "1234", "1234", True),
        ("answer : $1,234$", "1234", "1234", True),
        ("Answer: -1,234", "-1234", "-1234", True),
        (r"Answer: \frac12", r"\frac{1}{2}", r"\frac{1}{2}", True),
        (r"Answer: $x=\sqrt3$", r"\sqrt{3}", r"\sqrt{3}", True),
        ("Answer: $m + n = 9 + 16 = 25$", "25", "25", True),
        ("Answer: $m + n = 25$", "26", "25", False),
        ("Answer: $x + y = 2, y = 25$", "25", "25", False),
        ("Answer: $2x = 6$", "6", "6", False),
        (r"Answer: 12\text{ cm}", "12", "12", True),
        ("Answer: 40 degrees", "40", "40", True),
        ("Answer: 50\\%", "50", "50", True),
        ("the answer is 34", "34", "[INVALID]", False),
        ("Answer: 34" + " " * 400, "34", "[INVALID]", False),
    ],
)
def test_math_dapo(text, truth, pred, correct):
    assert math_dapo.compute_score(text, truth) == {"score": 1.0 if correct else -1.0, "acc": correct, "pred": pred}


def test_math_dapo_strict_box():
    strict = {"strict_box_verify": True}
    assert math_dapo.compute_score(r"so \boxed{34}", "34", **strict) == {"score": 1.0, "acc": True, "pred": "34"}
    assert math_dapo.compute_score("Answer: 34", "34", **strict)["pred"] == "[INVALID]"
    assert not math_dapo.compute_score(r"\boxed{34}" + "x" * 100, "34", **strict)["acc"]
    late = r"\boxed{34}" + "x" * 120  # the last pause token stands at 50: the box is in the 100 characters before it
    assert math_dapo.verify(late, "34", True, [10, 20, 30, 50]) == (True, "34")


# ---- competition mathematics


FORMULAS = [
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"),
    (r"x^2+2x+1", r"(x+1)^2"),
    (r"2\pi", r"\pi\cdot 2"),
    (r"\sqrt{8}", r"2\sqrt2"),
    (r"\{1,2\}", r"\{2,1\}"),
    (r"\left(\frac{\sqrt{3}}{3},2\right)", r"(1/\sqrt{3},2)"),
    (r"\log_2 8", "3"),
    (r"\sin^2 x+\cos^2 x", "1"),
    ("3!", "6"),
    ("2^{10}", "1024"),
    (r"\binom{5}{2}", "10"),
    (r"\sqrt[3]{-8}", "-2"),
    ("1+i", "i+1"),
    (r"e^{i\pi}", "-1"),
    ("0.5x", r"\frac{x}{2}"),
    ("-x^2", "-(x^2)"),
    (r"\sqrt{x^2}", "|x|"),
    (r"2/3x", r"\frac{2}{3}x"),
    ("y=2x", "2x"),
    ("10^{-3}", "1/1000"),
    (r"\frac{x^2-1}{x-1}", "x+1"),
    ("sqrt(2)", r"\sqrt2"),
]
NO_FORMULAS = [
    ("x+1", "x+2"),
    (r"\sqrt{x^2}", "x"),
    ("(1,2)", "(2,1)"),
    ("[1,2]", "(1,2)"),
    (r"\{1,1\}", r"\{1,2\}"),
    (r"2\pi", "6.28"),
    ("xy", "x+y"),
    ("-x^2", "(-x)^2"),
    ("east", "seat"),
    ("1.0000001", "1"),
    (r"\frac{1}{0}", r"\frac{2}{0}"),
    ("99999!", "1"),
    ("10^{10^{10^{10}}}", "1"),
    ("{" * 200, "1"),
    ("(" * 450, "1"),
    ("", "0"),
]


@pytest.mark.parametrize(("one", "other"), FORMULAS)
def test_prime_math_knows_equal_formulas(one, other):
    assert prime_math.grade_answer(one, other) and prime_math.grade_answer(other, one)
    assert prime_math.compute_score(rf"hence \boxed{{{one}}}.", other) == (True, True, one)
    assert default_compute_score("numina_olympiads", rf"\boxed{{{one}}}", other) == 1.0


@pytest.mark.parametrize(("one", "other"), NO_FORMULAS)
def test_prime_math_tells_others_apart(one, other):
    start = time.process_time()
    assert not prime_math.grade_answer(one, other) and not prime_math.grade_answer(other, one)
    assert time.process_time() - start < 10  # it takes milliseconds, unless powers are multiplied out


@pytest.mark.parametrize(("one", "other"), [*SAME, *FORMULAS[:3]])
def test_prime_math_knows_what_the_others_know(one, other):
    assert prime_math.grade_answer(one, other)


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_prime_math_tells_apart_what_the_others_do(one, other):
    assert not prime_math.grade_answer(one, other)


def test_prime_math_answers():
    assert prime_math.compute_score("So the answer is $\\frac12$, done.", "0.5") == (True, True, "\\frac12")
    assert prime_math.compute_score("Final answer: 12.", "\\boxed{12}") == (True, True, "12")
    assert prime_math.compute_score("12", "12") == (False, False, "12")


# ---- pairs judged by hand, and answers that are written in another way


JUDGES = {
    "math_reward": lambda answer, truth: math_reward.compute_score(rf"hence $\boxed{{{answer}}}$.", truth) == 1,
    "math_dapo": lambda answer, truth: math_dapo.compute_score(f"Answer: {answer}", truth)["acc"],
    "prime_math": lambda answer, truth: prime_math.compute_score(rf"hence $\boxed{{{answer}}}$.", truth)[0],
}


@pytest.fixture(params=JUDGES)
def judge(request):
    if request.param == "prime_math" and not reward_score.MATH.is_installed():
        pytest.skip(reward_score.MATH.problem())
    return JUDGES[request.param]


def test_no_scorer_takes_different_answers_for_equal(judge):
    assert [pair for pair in DIFFERENT_PAIRS if judge(*pair) or judge(*pair[::-1])] == []


def test_every_scorer_finds_equal_answers(judge):
    pairs = EQUAL_PAIRS + EQUAL_BY_ALGEBRA if judge is JUDGES["prime_math"] else EQUAL_PAIRS
    assert [pair for pair in pairs if not (judge(*pair) and judge(*pair[::-1]))] == []


ENTRIES = st.integers(-99, 99)
ROWS = st.integers(1, 3).flatmap(
    lambda width: st.lists(st.lists(ENTRIES, min_size=width, max_size=width), min_size=1, max_size=3)
)


def written(rows, kind, gap):
    lines = (f"{gap}&{gap}".join(map(str, row)) for row in rows)
    return rf"\begin{{{kind}}}{gap}" + rf"{gap}\\{gap}".join(lines) + rf"\end{{{kind}}}"


KINDS = st.sampled_from(["pmatrix", "bmatrix", "matrix"])


@given(ROWS, ROWS, st.tuples(KINDS, KINDS), st.sampled_from(["", " "]), st.sampled_from(["", " "]))
def test_matrices_are_equal_if_their_entries_are(rows, others, kinds, gap, other_gap):
    one = written(rows, kinds[0], gap)
    for judge in JUDGES.values():
        assert judge(one, written(rows, kinds[1], other_gap))
        assert judge(one, written(others, kinds[1], other_gap)) == (rows == others)


@given(st.integers(0, 10**40), st.integers(0, 10**40), st.sampled_from(["{,}", ",", r"\,", r"\!", " ", ""]))
def test_large_numbers_are_compared_exactly(one, other, separator):
    digits = f"{one:,}".replace(",", separator)
    for judge in JUDGES.values():
        assert judge(digits, str(one)) and judge(digits, one)
        assert judge(digits, str(other)) == (one == other)


@pytest.mark.parametrize("truth", [12, 12.0, "12.0", "12"])
def test_a_truth_may_be_a_number(truth):
    for answer, is_right in (("12", True), ("12.0", True), ("1.20", False), ("120", False), ("-12", False)):
        assert all(judge(answer, truth) == is_right for judge in JUDGES.values())
        assert math_dapo.compute_score(rf"\boxed{{{answer}}}", truth, strict_box_verify=True)["acc"] == is_right
        assert (gsm8k.compute_score(f"#### {answer}", truth) == 1) == is_right
        assert (search_r1_like_qa_em.compute_score(f"<answer>{answer}</answer>", truth) == 1) == is_right


LONG = ["9", "(", "{", r"\{", r"\frac", "1,", r"\boxed{", "x+", " ", r"\text{", r"a\\", r"\begin{pmatrix}", "1 ", "a_"]


@pytest.mark.parametrize("part", LONG)
def test_very_long_answers_are_scored_at_once(part):
    text = part * (200_000 // len(part))
    start = time.process_time()
    for answer in (text, rf"\boxed{{{text}}}", f"Answer: {text}", f"#### {text}", f"<answer>{text}</answer>"):
        scores = [math_reward.compute_score(answer, "1"), prime_math.compute_score(answer, "1")[0]]
        scores += [math_dapo.compute_score(answer, "1")["acc"], gsm8k.compute_score(answer, "1")]
        assert not any([*scores, search_r1_like_qa_em.compute_score(answer, "1")])
    assert time.process_time() - start < 20  # 0.3 s; a scorer that takes quadratic time needs minutes


# ---- search


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<answer>The Eiffel Tower!</answer>", 1.0),
        ("<answer>Paris</answer> no, <answer>\neiffel  tower\n</answer>", 1.0),
        ("<answer>eiffel tower</answer> no, <answer>Paris</answer>", 0.0),
        ("<answer>tour Eiffel</answer>", 1.0),
        ("<answer>the eiffel tower of Paris</answer>", 0.0),
        ("eiffel tower", 0.0),
        ("<answer>eiffel tower", 0.0),
        ("<answer>x</answer>" * 10 + "<answer>eiffel tower</answer>", 0.25),
        ("<answer>x</answer>" * 9 + "<answer>eiffel tower</answer>", 1.0),
    ],
)
def test_search(text, score):
    truth = {"target": np.array(["Eiffel Tower", "Tour Eiffel"], dtype=object)}
    assert default_compute_score("searchR1_nq", text, truth) == score
    assert search_r1_like_qa_em.compute_score_subem(text, truth) == (1.0 if "of Paris" in text else score)
    wrong = 0.1 if "</answer>" in text and not score else score
    assert search_r1_like_qa_em.compute_score(text, truth, format_score=0.1) == wrong
    assert search_r1_like_qa_em.compute_score(text, {"target": "Eiffel tower"}) in (score, 0.0)


@pytest.mark.parametrize(
    ("answer", "truth", "is_right"),
    [
        ("", "The", False),
        ("the", "The", True),
        ("a", "The", False),
        ("", "", False),
        ("1.5", "15", False),
        ("-5", "5", False),
        ("1,000", 1000, True),
        ("don’t", "don't", True),
        ("Beyonce\u0301", "Beyonc\u00e9", True),
        ("１２", "12", True),
        (".5", "0.5", True),
        (".5", "5", False),
        ("3/4", "34", False),
        ("1-2", "12", False),
        ("1990\u20131995", "1990-1995", True),
    ],
)
def test_search_of_short_and_unusual_answers(answer, truth, is_right):
    assert search_r1_like_qa_em.compute_score(f"<answer>{answer}</answer>", truth) == is_right
    assert search_r1_like_qa_em.compute_score(f"<answer>{answer}</answer>", {"target": [truth]}) == is_right


# ---- libraries


def test_geo3k():
    if not reward_score.GEO.is_installed():
        with pytest.raises(MissingPackage, match=r"geo3k needs mathruler.*pip install 'verl\[geo\]'"):
            geo3k.compute_score(r"\boxed{3}", "3")
        assert "'verl[geo]'" in data_source_problem("hiyouga/geometry3k")
    else:
        for text, score in (
            (r"<think>a</think>\boxed{3}", 1.0),
            (r"\boxed{3}", 0.9),
            (r"<think></think>\boxed{4}", 0.1),
        ):
            assert default_compute_score("hiyouga/geometry3k", text, "3") == pytest.approx(score)
        assert geo3k.compute_score("3", "3", use_boxed=False) == 0.9
        assert geo3k.compute_score(rf"<think></think>\boxed{{{'1+' * 300}1}}", "301") == pytest.approx(0.1)
    assert geo3k.format_reward("<think>a\nb</think> so \\boxed{3}.") == 1.0
    assert geo3k.format_reward("from the prompt on\n</think> so \\boxed{3}.") == 1.0
    assert geo3k.format_reward("a \\boxed{3}</think>") == geo3k.format_reward("a</think> \\boxed{3") == 0.0
    assert geo3k.format_reward("\\boxed{3} <think>a</think>") == geo3k.format_reward("<think>\\boxed{3}") == 0.0


def test_math_verify():
    if not reward_score.MATH.is_installed():
        with pytest.raises(ImportError, match=r"math_verify needs math-verify.*pip install 'verl\[math\]'"):
            math_verify.compute_score(r"\boxed{3}", "3")
        return
    assert math_verify.compute_score(r"so \boxed{\frac{1}{2}}", "0.5") == 1.0
    assert math_verify.compute_score(r"so \boxed{\frac{1}{3}}", "0.5") == 0.0


def test_math_verify_has_a_limit_of_cpu_time(monkeypatch):
    if not reward_score.MATH.is_installed():
        pytest.skip(reward_score.MATH.problem())
    from math_verify.errors import TimeoutException

    with math_verify._cpu_limit(0.2):
        time.sleep(0.5)  # as on a busy machine
    with pytest.raises(TimeoutException), math_verify._cpu_limit(0.2):
        while True:
            pass
    monkeypatch.setattr(math_verify, "CPU_LIMIT_S", 1e-6)
    assert not math_verify.equal("x+1", "1+x")
    assert math_verify.compute_score(r"\boxed{x+1}", "1+x", timeout_score=-7) == -7


def test_batch_scorer():
    columns = (["lighteval/MATH"] * 2, [r"\boxed{1}", r"\boxed{2}"], ["1", "1"], [None, None])
    assert math_batch.compute_score_batched(*columns) == [1.0, 0.0]


# ---- dispatch


RIGHT = {
    "gsm8k": ("#### 3", "3"),
    "math_reward": (r"\boxed{3}", "3"),
    "math_dapo": ("Answer: 3", "3"),
    "prime_math": (r"\boxed{3}", "3"),
    "prime_code": ("```python\nprint(3)\n```", {"inputs": [""], "outputs": ["3"]}),
    "geo3k": (r"<think>a</think>\boxed{3}", "3"),
    "search_r1_like_qa_em": ("<answer>3</answer>", {"target": ["3"]}),
}
SPECIFIED = """openai/gsm8k lighteval/MATH DigitalLearningGmbH/MATH-lighteval HuggingFaceH4/MATH-500
math_dapo math math_dapo_reasoning numina_aops_forum numina_synthetic_math numina_amc_aime numina_synthetic_amc
numina_cn_k12 numina_olympiads codecontests apps codeforces taco hiyouga/geometry3k searchR1_nq searchR1_triviaqa
searchR1_popqa searchR1_hotpotqa searchR1_2wikimultihopqa searchR1_musique searchR1_bamboogle""".split()


@pytest.mark.parametrize("source", [*SPECIFIED, "aime2024", "aime25_x8"])
def test_dispatch(source):
    problem = data_source_problem(source)
    if problem is not None:
        pytest.skip(problem)
    text, truth = RIGHT[scorer_module(source)]
    right = default_compute_score(source, text, truth, extra_info={})
    wrong = default_compute_score(source, "", truth)
    if scorer_module(source) == "math_dapo":
        assert (right["score"], wrong["score"]) == (1.0, -1.0)
    else:
        assert (right, wrong) == (1.0, 0.0) and type(right) is type(wrong) is float


@pytest.mark.parametrize("source", ["HuggingFaceH4/MATH-500", "numina_olympiads", "math_dapo", "searchR1_nq"])
@pytest.mark.parametrize(
    "text", [r"\boxed{", r"\boxed{1", r"\boxed", "<answer>", r"\frac12", r"\text{ ", "{", "Answer:"]
)
def test_a_response_that_repeats_itself_is_scored_at_once(source, text):
    """The time is linear in the length; quadratic time would take a minute here."""
    start = time.process_time()
    score = default_compute_score(source, text * 10_000, {"target": ["3"]} if source == "searchR1_nq" else "3")
    assert score == 0.0 or score["score"] == -1.0
    assert time.process_time() - start < 5


def test_unknown_source():
    assert set(SCORERS) == set(SPECIFIED)
    with pytest.raises(
        NotImplementedError, match=r"no scorer for 'mine': .*custom_reward_function.*known are .*gsm8k.*aime"
    ):
        default_compute_score("mine", "", "")


def test_nothing_heavy_is_imported_before_it_is_needed():
    code = "import sys, verl.utils.reward_score as r; r.default_compute_score('openai/gsm8k', '#### 3', '3');"
    code += "print([m for m in ('torch', 'sympy', 'mpmath', 'numpy', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "[]\n", done.stderr


def test_long_words_in_other_case_are_compared_at_once():
    words = "the quick brown fox " * 15 + "5"
    assert not math_reward.is_equiv(words.replace("q", "Q") + "x", words + "X")
