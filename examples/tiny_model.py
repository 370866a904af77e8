"""Make a small Qwen2 with random weights and a byte-level tokenizer, for machines without a GPU and without a network.

python examples/tiny_model.py --save-dir ~/models/tiny-qwen2
"""

import argparse
import os

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

SPECIAL_TOKENS = ["<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
VOCAB_MULTIPLE = 16


def byte_tokenizer(chat_template: str = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte, so that every text round-trips; turns end with ``<|end|>``."""
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*bytes_, *SPECIAL_TOKENS])}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|endoftext|>",
        eos_token="<|end|>",
        additional_special_tokens=SPECIAL_TOKENS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def tiny_config(tokenizer: PreTrainedTokenizerFast, hidden_size: int = 128, num_layers: int = 2) -> Qwen2Config:
    """Return a Qwen2 configuration with heads of 32."""
    heads = hidden_size // 32
    return Qwen2Config(
        vocab_size=-(-len(tokenizer) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE,
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )


def make_tiny_model(save_dir: str, hidden_size: int = 128, num_layers: int = 2, seed: int = 0) -> str:
    """Write model and tokenizer into a folder that ``from_pretrained`` reads; returns the folder."""
    save_dir = os.path.expanduser(save_dir)
    tokenizer = byte_tokenizer()
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(tiny_config(tokenizer, hidden_size, num_layers))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(save_dir)
    tokenizer.save_pretrained(save_dir)
    # AutoTokenizer takes the class of some model types over the saved one: see that text still round-trips
    probe = "1 + 1 =\n\té"
    reloaded = AutoTokenizer.from_pretrained(save_dir)
    assert reloaded.decode(reloaded(probe)["input_ids"]) == probe, "the saved tokenizer loses text"
    return save_dir


def main() -> None:
    """Make the model that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save-dir", required=True, help="folder to write")
    parser.add_argument("--hidden-size", type=int, default=128, help="a multiple of 32 (default: 128)")
    parser.add_argument("--num-layers", type=int, default=2, help="default: 2")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights (default: 0)")
    args = parser.parse_args()
    path = make_tiny_model(args.save_dir, args.hidden_size, args.num_layers, args.seed)
    print(f"wrote a Qwen2 of hidden size {args.hidden_size} and {args.num_layers} layers to {path}")


if __name__ == "__main__":
    main()
