"""The page of all launch scripts lists what there is, and says "ran" only of what did."""

import re

import pytest

from tests.special_sanity.examples_page import PAGE, RAN, describe, page
from tests.special_sanity.test_examples import ROOT, SCRIPTS


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == page(), "write it again: python -m tests.special_sanity.examples_page"


def test_every_script_says_what_it_runs():
    for script in SCRIPTS:
        title, _, devices, state = describe(script)
        assert 10 < len(title) < 250, script
        assert "$" not in devices and (devices or state == "not run"), (script, devices)


@pytest.mark.parametrize("script", RAN)
def test_a_run_is_one_of_a_script_for_cpu_and_its_page_shows_the_result(script):
    assert (ROOT / script).is_file() and "_cpu" in script, script
    numbers = set(re.findall(r"\d+(?:\.\d+)?", RAN[script].result))
    lines = (ROOT / RAN[script].page).read_text().splitlines()
    assert numbers and any(numbers <= set(re.findall(r"\d+(?:\.\d+)?", line)) for line in lines), numbers


def test_a_script_for_cpu_without_a_run_is_composed():
    for script in SCRIPTS:
        name = script.relative_to(ROOT).as_posix()
        state = describe(script)[3]
        assert state.startswith("ran: ") == (name in RAN), name
        if "_cpu" in name and name not in RAN:
            assert state == "composed", name


def test_rows_by_hand():
    folder = ROOT / "examples"
    assert describe(folder / "grpo_trainer/run_qwen3-32b_npu.sh")[1:] == (
        "`gsm8k.py`",
        "2 x 16 Ascend devices",
        "composed",
    )
    assert describe(folder / "grpo_trainer/run_gptoss_20b.sh")[3] == "composed"
    assert describe(folder / "grpo_trainer/run_qwen2_5_vl-7b-sglang.sh")[3] == "composed"
    assert describe(folder / "grpo_trainer/run_deepseek671b_math_megatron_96gb.sh")[2] == "12 x 8 GPUs"
    assert describe(folder / "split_placement/run_tiny_cpu.sh")[2:] == (
        "2 CPU workers",
        "ran: accuracy 0.36, after 40 steps 0.96 (`examples/split_placement/README.md`)",
    )
    turns = folder / "sglang_multiturn"
    assert describe(turns / "run_qwen2.5-3b_gsm8k_multiturn_4xgpu_server.sh")[2] == "4 GPUs"  # 2 train, 2 generate
    assert describe(folder / "sft/run_tiny_vl_cpu.sh")[3] == "composed"
    assert describe(folder / "grpo_trainer/run_tiny_cpu.sh")[3].endswith("0.99 ([algo/baseline.md](algo/baseline.md))")
    assert describe(ROOT / "recipe/dapo/run_dapo_qwen2.5_32b_npu.sh")[2] == "2 x 16 Ascend devices"
    assert describe(folder / "sft/gsm8k/run_qwen_05_peft.sh")[2] == "2 GPUs"
    assert describe(ROOT / "recipe/dapo/prepare_dapo_data.sh")[3] == "not run"
    assert describe(ROOT / "recipe/prime/run_prime_qwen.sh")[1] == "`gsm8k.py`, `math_dataset.py`"
    assert describe(ROOT / "recipe/prime/run_prime_qwen_code.sh")[1] == ""  # other data than the script that it runs
