"""A model with a known distribution of response lengths, so that two frameworks can be compared: it counts down.

Most words belong to groups of equal size, numbered by the remaining length. The prompt is followed by a word of a
random group between the shortest and the longest length, a word of group c by a word of group c - 1, and group 1 by the
end of the response. Words of a group are equally likely. So lengths are uniformly distributed, while the model computes
as much as any Qwen2 of its size. With groups above the response limit every response has the length of the limit.
"""

import json
import random
import re
from pathlib import Path
from typing import Any

PAD = 0
START = 1
END = 2
SPECIAL_WORDS = ["<pad>", "<start>", "<end>"]
CERTAINTY = 18.0
"""Logit of the words that may follow; the logits of the others are about 0."""


def make_inputs(folder: Path, sizes: Any, steps: int) -> None:
    """Write the model, its tokenizer and the prompts of a case into ``folder``.

    Args: ``sizes`` has ``hidden, layers, vocab, prompts, prompt_length, shortest, longest, limit, seed``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = word_tokenizer(sizes.vocab)
    tokenizer.save_pretrained(folder / "model")
    countdown_model(sizes).save_pretrained(folder / "model")
    write_prompts(folder, sizes, sizes.prompts * (steps + 1))


def word_tokenizer(vocab: int) -> Any:
    """Return a tokenizer with one token per word.

    Words are added tokens, because the class that AutoTokenizer loads for a Qwen2 keeps these, but no other way to
    split a text.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = SPECIAL_WORDS + [f"<w{i}>" for i in range(len(SPECIAL_WORDS), vocab)]
    backend = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    backend.add_tokens([AddedToken(word, normalized=False) for word in words])
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<end>", padding_side="left"
    )
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return tokenizer


def countdown_model(sizes: Any) -> Any:
    """Return the model; a word's embedding encodes its group, and the head favours the next lower group."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(sizes.seed)
    heads = sizes.hidden // 64
    config = Qwen2Config(
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        intermediate_size=4 * sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=PAD,
        dtype="float32",
    )
    model = Qwen2ForCausalLM(config)
    groups = sizes.longest  # after a word of group c come c more words and the end
    directions = torch.linalg.qr(torch.randn(sizes.hidden, groups))[0].T  # row 0 is the direction of the start
    group_of = word_groups(sizes.vocab, groups)
    scale = sizes.hidden**0.5
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        head = model.get_output_embeddings().weight
        for word, group in enumerate(group_of):
            if group:
                embedding[word] += scale * directions[group]
                head[word] += CERTAINTY / scale * directions[group + 1 if group + 1 < groups else 0]
                if sizes.shortest - 1 <= group < groups - 1:
                    head[word] += CERTAINTY / scale * directions[0]
        embedding[START] += scale * directions[0]
        head[END] += CERTAINTY / scale * directions[1]
    model.generation_config.eos_token_id = END
    model.generation_config.pad_token_id = PAD
    return model


def word_groups(vocab: int, groups: int) -> list[int]:
    """Return the group of each word, from 1 to ``groups - 1`` and of equal size; 0 for words that are never sampled."""
    size = (vocab - len(SPECIAL_WORDS)) // (groups - 1)
    grouped = [0] * len(SPECIAL_WORDS) + [group for group in range(1, groups) for _ in range(size)]
    return grouped + [0] * (vocab - len(grouped))


def write_prompts(folder: Path, sizes: Any, count: int) -> None:
    """Write prompts of random words, as a parquet file for ``verl`` and as JSON lines for other frameworks."""
    import pandas

    rng = random.Random(sizes.seed)
    rows = [
        "".join([*(f"<w{rng.randrange(3, sizes.vocab)}>" for _ in range(sizes.prompt_length - 1)), "<start>"])
        for _ in range(count)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows), encoding="utf-8")
    pandas.DataFrame(
        {
            "data_source": "countdown",
            "prompt": [[{"role": "user", "content": row}] for row in rows],
            "reward_model": [{"style": "rule", "ground_truth": ""}] * count,
        }
    ).to_parquet(folder / "prompts.parquet")


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Return the share of words with an even number, a reward that does not depend on the length."""
    numbers = [int(number) for number in re.findall(r"<w(\d+)>", solution_str)]
    return sum(number % 2 == 0 for number in numbers) / max(1, len(numbers))
