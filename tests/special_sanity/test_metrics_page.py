"""The page of metrics names what the code logs, once each; runs are held against it in ``special_e2e``."""

import ast
import re
from pathlib import Path

import pytest
import torch

from tests.metrics_page import metrics, unknown
from verl.trainer.ppo.mismatch_helper import compute_rollout_importance_weights

ROOT = Path(__file__).resolve().parents[2]
LOGGED = re.compile(
    r"(actor|critic|reward|reward_model|response|response_length|training|train|mismatch|weight_sync|perf|timing_s|"
    r"val|val-aux|global_seqlen|multi_modal)/[\w/().@-]*[\w)]"
)
NO_METRICS = {"training/rollout_sums", "val/generations", "critic/score", "critic/rewards", "critic/advantages"} | {
    "critic/returns", "critic/values", "perf/mfu", "val-aux/reward",
}  # fmt: skip
"""Beginnings of names, and a table of texts."""


def test_every_name_stands_once_with_a_definition() -> None:
    names = [metric.name for metric in metrics()]
    assert len(names) > 150 and sorted(names) == sorted(set(names))
    assert all(metric.definition and metric.there for metric in metrics())


def test_names_in_the_code_are_on_the_page() -> None:
    names = set()
    for package in ("verl/trainer", "verl/workers", "recipe"):
        for file in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and LOGGED.fullmatch(node.value):
                    names.add(node.value)
    assert len(names) > 40
    assert unknown(names - NO_METRICS) == set()


@pytest.mark.parametrize("mode", ["truncate", "mask", "clip"])
def test_the_page_names_what_importance_sampling_reports(mode: str) -> None:
    generator = torch.Generator().manual_seed(0)
    old, rollout = -torch.rand(2, 4, 6, generator=generator)
    _, found = compute_rollout_importance_weights(
        old, rollout, torch.ones(4, 6), rollout_is_mode=mode, rollout_is_threshold=1.2, rollout_is_threshold_lower=0.8
    )
    there = {"`rollout_is_threshold`"} | ({"`rollout_is_mode` `mask` or `clip`"} if mode != "truncate" else set())
    there |= {"`rollout_is_mode=clip`"} if mode == "clip" else set()
    assert set(found) == {metric.name for metric in metrics() if metric.there in there}
