"""Score answers to Geometry3K during the rollout."""

from verl.tools.answer_tool import AnswerTool
from verl.utils.json_types import Json
from verl.utils.reward_score import geo3k


class Geo3kTool(AnswerTool):
    """Tells the model whether its answer, a mathematical expression, is right. Needs the extra ``geo``."""

    default_name = "calc_geo3k_reward"
    default_description = "Score an answer to the question: 1 if it is right, else 0."

    def score(self, answer: str, ground_truth: Json) -> float:
        """Return 1 if the answer is equivalent to the right one, else 0."""
        return geo3k.compute_score(answer, str(ground_truth), use_boxed=False, format_score=0.0)
