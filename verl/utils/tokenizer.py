"""Loading of tokenizers and processors, with corrections for training."""

import importlib.util
import json
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import transformers
from transformers import AutoProcessor, AutoTokenizer, PreTrainedTokenizerBase, ProcessorMixin

from verl.errors import TokenizerNotFoundError
from verl.utils.failures import replacing_errors

logger = logging.getLogger(__name__)


@dataclass
class _Turn:
    """The lock of a tokenizer, and the thread that holds it."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    owner: int | None = None


_turns: "WeakKeyDictionary[PreTrainedTokenizerBase, _Turn]" = WeakKeyDictionary()
_of_turns = threading.Lock()


@contextmanager
def one_thread(tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
    """Let one thread at a time use a tokenizer, since each call changes its shared truncation and padding.

    A thread that has the tokenizer may enter again, and takes nothing then: a time limit interrupts a thread anywhere,
    also on its way out of the inner block. A counting lock would keep that count for ever.
    """
    with _of_turns:
        turn = _turns.setdefault(tokenizer, _Turn())
    if turn.owner == threading.get_ident():
        yield
        return
    with turn.lock:
        turn.owner = threading.get_ident()
        try:
            yield
        finally:
            turn.owner = None


def hf_tokenizer(
    name_or_path: str, correct_pad_token: bool = True, correct_gemma2: bool = True, **kwargs: Any
) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a folder or the hub.

    Args:
        correct_pad_token: pad with the end-of-sequence token if there is no padding token.
        correct_gemma2: use ``<end_of_turn>``, which ends a turn in the chat template, as the EOS of gemma-2-2b-it.
        kwargs: options of ``AutoTokenizer.from_pretrained``; ``trust_remote_code`` is False if it is not given.

    Raises: TokenizerNotFoundError when the folder or repository holds no tokenizer.
    """
    kwargs.setdefault("trust_remote_code", False)  # transformers would ask at the terminal
    if correct_gemma2 and "gemma-2-2b-it" in str(name_or_path):
        kwargs |= {"eos_token": "<end_of_turn>", "eos_token_id": 107}
    path = os.path.expanduser(name_or_path)
    looks_local = path.startswith((os.sep, "." + os.sep, ".." + os.sep)) or path != name_or_path
    if looks_local and not os.path.isdir(path):
        raise TokenizerNotFoundError(
            f"model path {name_or_path!r} is not a folder: give a folder that save_pretrained wrote, or a hub id"
        )

    def named(error: Exception) -> TokenizerNotFoundError:
        return TokenizerNotFoundError(
            f"cannot load a tokenizer from {name_or_path!r}: {error}: correct its files, or copy the tokenizer again"
        )

    with replacing_errors(named):  # the libraries raise many kinds for garbage in its files, TypeError for instance
        tokenizer = AutoTokenizer.from_pretrained(path, **kwargs)
    if correct_pad_token and tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise TokenizerNotFoundError(
                f"the tokenizer of {name_or_path!r} has no pad_token, and no eos_token that could pad: write them into "
                "its tokenizer_config.json"
            )
        tokenizer.pad_token_id = tokenizer.eos_token_id
        logger.info("the tokenizer has no padding token: padding with id %s", tokenizer.eos_token_id)
    return tokenizer


def hf_processor(name_or_path: str, **kwargs: Any) -> ProcessorMixin | None:
    """Load the multi-modal processor of a model; None if the model has none.

    Without torchvision, which video processors need, the result takes images only.
    """
    path = os.path.expanduser(name_or_path)
    kwargs.setdefault("trust_remote_code", False)
    try:
        processor = AutoProcessor.from_pretrained(path, **kwargs)
    except ImportError as error:
        if importlib.util.find_spec("torchvision") is not None:
            logger.debug("no processor in %s: %s", name_or_path, error)
            return None
        return _image_processor(path, **kwargs)
    except Exception as error:  # text models raise many kinds of exceptions here, all of them expected
        file = Path(path, "config.json")
        has_vision = file.is_file() and "vision_config" in file.read_text(encoding="utf-8")
        level = logging.WARNING if has_vision else logging.DEBUG
        logger.log(level, "no processor in %s: %s", name_or_path, error)
        return None
    return processor if isinstance(processor, ProcessorMixin) else None


def _image_processor(path: str, **kwargs: Any) -> ProcessorMixin | None:
    """Build the processor of a folder without its video part; None if the folder names no processor."""
    for name in ("processor_config.json", "preprocessor_config.json"):
        file = Path(path, name)
        settings = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        cls = getattr(transformers, settings.get("processor_class") or "", None)
        if cls is not None:
            break
    else:
        return None
    images = transformers.AutoImageProcessor.from_pretrained(path, **kwargs)
    tokenizer = hf_tokenizer(path, trust_remote_code=kwargs["trust_remote_code"])
    logger.warning("torchvision is not installed: the processor of %s takes images but no videos", path)
    images_only = type(cls.__name__, (_ImagesOnly, cls), {})  # same name: the model family is found by class name
    return images_only(images, tokenizer, None, chat_template=tokenizer.chat_template)


class _ImagesOnly:
    """Mixin for a processor without its video part."""

    tokenizer: PreTrainedTokenizerBase
    image_processor: "transformers.BaseImageProcessor"

    def check_argument_for_proper_class(self, name: str, argument: Any) -> type:
        """Accept any part of a processor, also a missing one."""
        return type(argument)

    def save_pretrained(self, save_directory: str, **kwargs: Any) -> None:
        """Save the existing parts and the class name of the processor."""
        self.tokenizer.save_pretrained(save_directory)
        self.image_processor.save_pretrained(save_directory)
        file = Path(save_directory, "preprocessor_config.json")
        settings = json.loads(file.read_text(encoding="utf-8")) | {"processor_class": type(self).__name__}
        file.write_text(json.dumps(settings, indent=2), encoding="utf-8")
