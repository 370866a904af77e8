"""Score answers to GSM8K during the rollout."""

from verl.tools.answer_tool import AnswerTool
from verl.utils.json_types import Json
from verl.utils.reward_score import gsm8k


class Gsm8kTool(AnswerTool):
    """Tells the model whether its answer, a number, is right."""

    default_name = "calc_gsm8k_reward"
    default_description = "Score an answer to the question: 1 if it is right, else 0."

    def score(self, answer: str, ground_truth: Json) -> float:
        """Return 1 if the last number of the answer is the right one, else 0."""
        return gsm8k.compute_score(answer, str(ground_truth), method="flexible")
