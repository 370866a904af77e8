"""The page of all launch scripts lists what there is, and says "ran" only of what did."""

import re

import pytest

from tests.special_sanity.examples_page import PAGE, RAN, devices_of, page
from tests.special_sanity.test_examples import ROOT, SCRIPTS


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == page(), "write it again: python -m tests.special_sanity.examples_page"


def test_every_script_says_what_it_runs():
    for script in SCRIPTS:
        comments = [line for line in script.read_text().splitlines()[1:] if line.startswith("# ")]
        assert comments and len(comments[0]) > 20, script
        assert script.name.startswith("prepare_") or devices_of(script), script


@pytest.mark.parametrize("script", RAN)
def test_a_run_is_one_of_a_script_for_cpu_and_its_page_shows_the_result(script):
    assert (ROOT / script).is_file() and "_cpu" in script, script
    numbers = set(re.findall(r"\d+(?:\.\d+)?", RAN[script].result))
    lines = (ROOT / RAN[script].page).read_text().splitlines()
    assert numbers and any(numbers <= set(re.findall(r"\d+(?:\.\d+)?", line)) for line in lines), numbers


def test_devices_by_hand():
    folder = ROOT / "examples"
    assert devices_of(folder / "grpo_trainer/run_qwen3-32b_npu.sh") == "2 x 16 Ascend devices"
    assert devices_of(folder / "grpo_trainer/run_deepseek671b_math_megatron_96gb.sh") == "12 x 8 GPUs"
    assert devices_of(folder / "split_placement/run_tiny_cpu.sh") == "2 CPU workers"
    server = folder / "sglang_multiturn/run_qwen2.5-3b_gsm8k_multiturn_4xgpu_server.sh"
    assert devices_of(server) == "4 GPUs"  # 2 train, 2 generate
    assert devices_of(ROOT / "recipe/dapo/run_dapo_qwen2.5_32b_npu.sh") == "2 x 16 Ascend devices"
    assert devices_of(folder / "sft/gsm8k/run_qwen_05_peft.sh") == "2 GPUs"
