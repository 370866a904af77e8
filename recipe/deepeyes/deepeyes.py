"""DeepEyes: questions about images that the model may look at more closely, and their reward by a judge.

Set ``data.custom_cls`` and ``custom_reward_function`` to this file, as ``configs/deepeyes_multiturn_grpo.yaml`` does.

Source: DeepEyes (arXiv:2505.14362).
"""

import json
import re
import urllib.request
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from verl.errors import WrongInput
from verl.utils import envs
from verl.utils.chat_endpoint import ChatEndpoint, EndpointError
from verl.utils.dataset.files import Row
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.dataset.vision_utils import Media
from verl.utils.unavailable import is_unavailable

JUDGE_VARIABLE = "LLM_AS_A_JUDGE_BASE"
API_KEY_VARIABLE = "LLM_AS_A_JUDGE_API_KEY"
TOOL = "image_zoom_in_tool"
SYSTEM = (
    "You answer questions about an image. Where a detail is too small to be sure of it, zoom in on its region first. "
    "Think inside <think> and </think>, and give your answer inside <answer> and </answer>."
)
MOST_ANSWER_CHARS = 1000
"""Longer answers are wrong: they could address the judge instead of the question."""
ACCURACY = 0.8
FORMAT = 0.2
LOOKED = 1.2
"""Weights of a right answer, of a broken form (-1), and of a right answer that a look at a region has helped."""

PROMPT = """Somebody has answered a question about an image, which you do not see. Compare the answer with the reference: does it say the same? Other words, units or details do not matter; a different object, number, text or option does.

Question: {question}
Reference: {reference}
Answer: {answer}

Reply with one word: CORRECT or WRONG."""  # noqa: E501 (the text of a prompt)


class CustomRLHFDataset(RLHFDataset):
    """Prompts of DeepEyes: each may zoom in on its first image, and goes to ``tool_agent``.

    The system prompt of a row is replaced by ``system``, since the chat template describes the tools.
    """

    system = SYSTEM

    def _build_messages(self, example: Row) -> list[Row]:
        """Take the messages out of a row."""
        asked = [message for message in super()._build_messages(example) if message["role"] != "system"]
        return [{"role": "system", "content": self.system}, *asked] if self.system else asked

    def take_media(self, row: Row) -> Media:
        """Take the images out of a row, and leave the first one for the tool."""
        images = row.get(self.image_key) or []
        media = super().take_media(row)
        if media.images:
            row["tools_kwargs"] = {TOOL: {"create_kwargs": {"image": images[0]}}}
        return media

    def _with_extra_info(self, item: int, row: Row) -> Row:
        of_image = row.pop("tools_kwargs", {})
        row = super()._with_extra_info(item, row)
        row["tools_kwargs"] = {**of_image, **row["tools_kwargs"]}
        row.setdefault("agent_name", "tool_agent")
        return row


# ---- the reward


class JudgeError(RuntimeError):
    """The judge could not be reached, or gave no verdict."""


class JudgeUnavailableError(JudgeError, ConnectionError):
    """The judge could not be reached: a ``ConnectionError``, so that the response leaves its group."""


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **options: Any
) -> dict[str, float]:
    """Return the reward of a response and its parts.

    Raises: JudgeError without a verdict; the reward manager gives such a row its failure score and counts it.
    """
    (score,) = compute_score_batch([data_source], [solution_str], [ground_truth], [extra_info], **options)
    if isinstance(score, JudgeError):
        raise score
    return score


def compute_score_batch(
    data_sources: Sequence[str],
    solution_strs: Sequence[str],
    ground_truths: Sequence[str],
    extra_infos: Sequence[Mapping[str, Any] | None],
    batch_timeout_s: float = 1500.0,
    prompt: str = PROMPT,
    **options: Any,
) -> list[dict[str, float] | JudgeError]:
    """Score a batch; the judge gets up to ``max_concurrency`` requests at a time.

    An empty or too long answer is wrong without a judge.

    Args: ``options`` are those of ``endpoint``.
    Returns: the reward of each row and its parts; a row without a verdict gets the JudgeError that says why.
    Raises: WrongInput without the address of a judge.
    """
    judge = endpoint(**options)
    answers = [answer_of(solution) for solution in solution_strs]
    asked = [row for row, answer in enumerate(answers) if answer and len(answer) <= MOST_ANSWER_CHARS]
    conversations = []
    for row in asked:
        question = (extra_infos[row] or {}).get("question") or ""
        text = prompt.format(question=question, reference=ground_truths[row], answer=answers[row])
        conversations.append([{"role": "user", "content": text}])
    verdicts = dict(zip(asked, map(verdict, judge.ask_all(conversations, batch_timeout_s)), strict=True))
    scores: list[dict[str, float] | JudgeError] = []
    for row, solution in enumerate(solution_strs):
        right = verdicts.get(row, 0.0)
        looked = num_looks(extra_infos[row] or {}) > 0
        scores.append(right if isinstance(right, JudgeError) else reward(right, has_form(solution), looked))
    return scores


def reward(right: float, has_right_form: bool, looked: bool) -> dict[str, float]:
    """Return the reward and its parts.

    Source: DeepEyes, section 3.3: a look is only rewarded where the answer is right.
    """
    form = 0.0 if has_right_form else -1.0
    helped = float(looked and right > 0)
    score = ACCURACY * right + FORMAT * form + LOOKED * helped
    return {"score": score, "acc": right, "format": form, "looked": float(looked)}


def num_looks(extra_info: Mapping[str, Any]) -> float:
    """Return how many regions the tool has shown, as its ``calc_reward`` counts them."""
    return float((extra_info.get("rollout_reward_scores") or {}).get(TOOL) or 0.0)


def answer_of(solution: str) -> str:
    """Return the text in the last ``<answer>`` after all thoughts; empty without one."""
    found = re.findall(r"<answer>(.*?)</answer>", solution.rpartition("</think>")[2], re.DOTALL)
    return found[-1].strip() if found else ""


def has_form(solution: str) -> bool:
    """Whether every thought is closed, and one answer, which is not too long, follows the last of them.

    The prompt may have opened the first thought, as the templates of thinking models do.
    """
    said = solution.rpartition("</think>")[2]
    first, end, _ = solution.partition("</think>")
    thoughts = solution.count("<think>") + (bool(end) and "<think>" not in first)
    return (
        thoughts == solution.count("</think>")
        and said.count("<answer>") == said.count("</answer>") == 1
        and 0 < len(answer_of(solution)) <= MOST_ANSWER_CHARS
    )


def verdict(reply: str | EndpointError) -> float | JudgeError:
    """Return 1 for CORRECT, 0 for WRONG, by the last of these words; a JudgeError for anything else."""
    if isinstance(reply, EndpointError):
        return (JudgeUnavailableError if is_unavailable(reply) else JudgeError)(str(reply))
    words = re.findall(r"\b(CORRECT|WRONG)\b", reply.upper())
    if not words:
        return JudgeError(f"the judge replied neither CORRECT nor WRONG; its reply ends with {reply[-200:]!r}")
    return float(words[-1] == "CORRECT")


def endpoint(
    base_url: str = "",
    model: str = "",
    temperature: float = 0.0,
    max_tokens: int = 512,
    timeout_s: float = 300.0,
    max_attempts: int = 3,
    retry_delay_s: float = 2.0,
    max_concurrency: int = 64,
) -> ChatEndpoint:
    """Return the server of the judge.

    Args: ``base_url`` is by default that of the environment variable ``LLM_AS_A_JUDGE_BASE``; ``model`` the first one
        that the server has. ``LLM_AS_A_JUDGE_API_KEY`` holds its key if it needs one.
    Raises: WrongInput without an address; JudgeError if the server does not say which models it has.
    """
    address = base_url or envs.read(JUDGE_VARIABLE, "") or ""
    if not address:
        raise WrongInput(
            f"the reward of DeepEyes asks a judge, and {JUDGE_VARIABLE} is not set: start an OpenAI-compatible server, "
            f"and set {JUDGE_VARIABLE}=http://host:port/v1 in the process that starts the run, or "
            "custom_reward_function.reward_kwargs.base_url"
        )
    key = envs.read(API_KEY_VARIABLE, "") or ""
    return ChatEndpoint(
        base_url=address,
        model=model or served_model(address, key, timeout_s),
        api_key=key,
        sampling={"temperature": temperature, "max_tokens": max_tokens},
        timeout_s=timeout_s,
        max_attempts=max_attempts,
        retry_delay_s=retry_delay_s,
        max_concurrency=max_concurrency,
    )


@lru_cache
def served_model(base_url: str, api_key: str, timeout_s: float) -> str:
    """Return the name of the first model of a server.

    Raises: JudgeError naming the server.
    """
    url = f"{base_url.rstrip('/').removesuffix('/v1')}/v1/models"
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(urllib.request.Request(url, headers=headers), timeout=timeout_s) as reply:
            return str(json.load(reply)["data"][0]["id"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise JudgeError(f"{url} names no model: {type(error).__name__}: {error}: set reward_kwargs.model") from error
