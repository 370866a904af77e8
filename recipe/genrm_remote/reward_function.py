"""A scorer that asks a generative reward model on an OpenAI-compatible server whether a solution is right.

Set ``custom_reward_function.path`` to this file, and the scorer's options in ``custom_reward_function.reward_kwargs``.
"""

from typing import Any

from verl.utils import envs
from verl.utils.chat_endpoint import ChatEndpoint, EndpointError
from verl.utils.reward_score import default_compute_score
from verl.utils.reward_score.math_reward import last_boxed_only_string, remove_boxed
from verl.utils.unavailable import is_unavailable

API_KEY_VARIABLE = "GENRM_API_KEY"

PROMPT = r"""Below are a problem, its reference answer, and a solution that someone has proposed.

Go through the solution step by step and look for mistakes. Then decide whether it arrives at the reference answer by steps that hold. End with your verdict, which is True or False, inside \boxed{{}}.

[Problem]
{problem}

[Reference answer]
{reference}

[Solution]
{solution}"""  # noqa: E501 (the text of a prompt)


class JudgeError(RuntimeError):
    """The judge could not be reached, or gave no verdict."""


class JudgeUnavailableError(JudgeError, ConnectionError):
    """The judge could not be reached; as a ``ConnectionError`` it excludes the response from its group's advantages."""


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **options: Any
) -> float:
    """Return 1 if the judge says that the solution is right, else 0; rows of the test split are scored by a rule.

    Raises: JudgeError if there is no verdict; the reward manager then gives the row the failure score and counts it.
    """
    (score,) = compute_score_batch([data_source], [solution_str], [ground_truth], [extra_info], **options)
    if isinstance(score, JudgeError):
        raise score
    return score


def compute_score_batch(
    data_sources: list[str],
    solution_strs: list[str],
    ground_truths: list[str],
    extra_infos: list[dict[str, Any] | None],
    batch_timeout_s: float = 1500.0,
    prompt: str = PROMPT,
    **options: Any,
) -> list[float | JudgeError]:
    """Score a batch, with up to ``max_concurrency`` concurrent requests to the judge.

    Args: ``options`` are the arguments of ``endpoint``.
    Returns: for each row a score, or the JudgeError that says why there is no verdict.
    """
    judge = endpoint(**options)
    scores: list[float | JudgeError] = [JudgeError("not asked")] * len(solution_strs)
    asked: list[int] = []
    conversations = []
    for row, extra_info in enumerate(extra_infos):
        info = extra_info or {}
        if info.get("split") == "test":
            scores[row] = _rule(data_sources[row], solution_strs[row], ground_truths[row], info)
        elif not info.get("question"):
            scores[row] = JudgeError("the row has no extra_info.question for the judge")
        else:
            asked.append(row)
            text = prompt.format(problem=info["question"], reference=ground_truths[row], solution=solution_strs[row])
            conversations.append([{"role": "user", "content": text}])
    for row, answer in zip(asked, judge.ask_all(conversations, batch_timeout_s), strict=True):
        scores[row] = verdict(answer)
    return scores


def endpoint(
    base_url: str = "http://localhost:30000",
    model: str = "genrm-demo",
    temperature: float = 0.7,
    top_p: float = 0.8,
    max_tokens: int = 4096,
    timeout_s: float = 600.0,
    max_attempts: int = 3,
    retry_delay_s: float = 2.0,
    max_concurrency: int = 32,
) -> ChatEndpoint:
    """Return the client of the judge's server; the variable ``GENRM_API_KEY`` holds the API key, if it needs one."""
    return ChatEndpoint(
        base_url=base_url,
        model=model,
        api_key=envs.read(API_KEY_VARIABLE, "") or "",
        sampling={"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens},
        timeout_s=timeout_s,
        max_attempts=max_attempts,
        retry_delay_s=retry_delay_s,
        max_concurrency=max_concurrency,
    )


def verdict(answer: str | EndpointError) -> float | JudgeError:
    r"""Return 1 if the answer's last ``\boxed`` is ``True``, 0 if it is ``False``; otherwise a JudgeError."""
    if isinstance(answer, EndpointError):
        return (JudgeUnavailableError if is_unavailable(answer) else JudgeError)(str(answer))
    boxed = last_boxed_only_string(answer)
    word = "" if boxed is None else remove_boxed(boxed).strip().removeprefix(r"\text{").rstrip("}").strip().lower()
    if word not in ("true", "false"):
        return JudgeError(f"the judge gave no verdict in \\boxed{{}}; its answer ends with {answer[-200:]!r}")
    return float(word == "true")


def _rule(data_source: str, solution: str, ground_truth: str, info: dict[str, Any]) -> float:
    result = default_compute_score(data_source, solution, ground_truth, info)
    return float(result["score"] if isinstance(result, dict) else result)
