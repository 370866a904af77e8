"""DeepEyes: questions about images in which the model may zoom in; a judge scores the answers.

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
"""Maximum length of an answer in characters; a longer one counts as wrong, because it could address the judge."""
ACCURACY = 0.8
FORMAT = 0.2
LOOKED = 1.2
"""Weights of the reward's parts: accuracy (0 or 1), format (0 or -1), and a right answer after zooming in (0 or 1)."""

PROMPT = """Somebody has answered a question about an image, which you do not see. Compare the answer with the reference: does it say the same? Other words, units or details do not matter; a different object, number, text or option does.

Question: {question}
Reference: {reference}
Answer: {answer}

Reply with one word: CORRECT or WRONG."""  # noqa: E501 (the text of a prompt)


class CustomRLHFDataset(RLHFDataset):
    """Prompts of DeepEyes for ``tool_agent``, whose zoom tool works on the first image of the prompt.

    The attribute ``system`` replaces the system prompt of a row, which describes the tools: the chat template does so.
    """

    system = SYSTEM

    def _build_messages(self, example: Row) -> list[Row]:
        """Remove the messages from a row and return them."""
        asked = [message for message in super()._build_messages(example) if message["role"] != "system"]
        return [{"role": "system", "content": self.system}, *asked] if self.system else asked

    def take_media(self, row: Row) -> Media:
        """Remove the images from a row and return them; the first one also stays in the row, for the tool."""
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
    """The judge could not be reached; as a ``ConnectionError`` it excludes the response from its group's advantages."""


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **options: Any
) -> dict[str, float]:
    """Return the reward of a response and its parts.

    Raises: JudgeError if there is no verdict; the reward manager then gives the row the failure score and counts it.
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
    """Score a batch, with up to ``max_concurrency`` concurrent requests to the judge.

    An empty or too long answer is wrong; the judge is not asked.

    Args: ``options`` are the arguments of ``endpoint``.
    Returns: for each row the reward and its parts, or the JudgeError that says why there is no verdict.
    Raises: WrongInput if no address of a judge is given.
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
    """Combine the parts of the reward; return the sum as ``score``, and the parts.

    Source: DeepEyes, section 3.3: zooming in is rewarded only if the answer is right.
    """
    form = 0.0 if has_right_form else -1.0
    helped = float(looked and right > 0)
    score = ACCURACY * right + FORMAT * form + LOOKED * helped
    return {"score": score, "acc": right, "format": form, "looked": float(looked)}


def num_looks(extra_info: Mapping[str, Any]) -> float:
    """Return the number of regions that the zoom tool has shown, which is its tool reward (``calc_reward``)."""
    return float((extra_info.get("rollout_reward_scores") or {}).get(TOOL) or 0.0)


def answer_of(solution: str) -> str:
    """Return the text of the last ``<answer>`` after the last ``</think>``; empty if there is none."""
    found = re.findall(r"<answer>(.*?)</answer>", solution.rpartition("</think>")[2], re.DOTALL)
    return found[-1].strip() if found else ""


def has_form(solution: str) -> bool:
    """Whether each ``<think>`` is closed, and exactly one answer of allowed length follows the last ``</think>``.

    The first ``<think>`` may be missing: the chat templates of thinking models put it into the prompt.
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
    """Return 1 if the reply's last verdict is CORRECT, 0 if it is WRONG; a JudgeError if it has neither word."""
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
    """Return the client of the judge's server.

    Args: ``base_url`` defaults to the environment variable ``LLM_AS_A_JUDGE_BASE``, ``model`` to the first model that
        the server lists. The variable ``LLM_AS_A_JUDGE_API_KEY`` holds the API key, if the server needs one.
    Raises: WrongInput without an address; JudgeError if the server does not list its models.
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
    """Return the name of the first model that a server lists.

    Raises: JudgeError naming the server if it does not list a model.
    """
    url = f"{base_url.rstrip('/').removesuffix('/v1')}/v1/models"
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(urllib.request.Request(url, headers=headers), timeout=timeout_s) as reply:
            return str(json.load(reply)["data"][0]["id"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise JudgeError(f"{url} names no model: {type(error).__name__}: {error}: set reward_kwargs.model") from error
