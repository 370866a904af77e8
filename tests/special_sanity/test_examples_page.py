"""The page of all launch scripts lists what there is."""

from tests.special_sanity.examples_page import PAGE, describe, page
from tests.special_sanity.test_examples import ROOT, SCRIPTS


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == page(), "write it again: python -m tests.special_sanity.examples_page"


def test_every_script_says_what_it_runs():
    for script in SCRIPTS:
        title, _, devices, state = describe(script)
        assert 10 < len(title) < 250, script
        assert "$" not in devices and (devices or state == "not run"), (script, devices)


def test_rows_by_hand():
    folder = ROOT / "examples"
    assert describe(folder / "grpo_trainer/run_qwen3-32b_npu.sh")[1:] == (
        "`gsm8k.py`",
        "2 x 16 Ascend devices",
        "composed",
    )
    assert describe(folder / "grpo_trainer/run_gptoss_20b.sh")[3] == "waits for SGLang"
    assert describe(folder / "grpo_trainer/run_deepseek671b_math_megatron_96gb.sh")[2] == "12 x 8 GPUs"
    assert describe(folder / "split_placement/run_tiny_cpu.sh")[2:] == ("2 CPU workers", "ran")
    assert describe(ROOT / "recipe/dapo/run_dapo_qwen2.5_32b_npu.sh")[2] == "2 x 16 Ascend devices"
    assert describe(folder / "sft/gsm8k/run_qwen_05_peft.sh")[2] == "2 GPUs"
    assert describe(ROOT / "recipe/dapo/prepare_dapo_data.sh")[3] == "not run"
