"""Check whether a model can be loaded from a hub, before the hub's client retries for a minute.

The hub is Hugging Face, or with ``VERL_USE_MODELSCOPE=true`` ModelScope.
"""

import importlib.util
import os
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator

from verl.utils import envs

HUB_TIMEOUT_S = 10.0
_MODELSCOPE = "VERL_USE_MODELSCOPE"
_COPY = "copy the model to this machine and name its folder"


def modelscope_problem() -> str | None:
    """Return why ``VERL_USE_MODELSCOPE`` cannot be followed; None if it can, or is not set.

    Raises: ValueError when its value is no boolean.
    """
    if envs.flag(_MODELSCOPE) and importlib.util.find_spec("modelscope") is None:
        return (
            f"environment variable {_MODELSCOPE}={envs.read(_MODELSCOPE)} needs the package modelscope, which is not "
            "installed: install it, or unset the variable"
        )
    return None


def model_folder(path: str) -> str:
    """Return the folder of a hub id that ModelScope serves, downloading it; any other path comes back unchanged.

    Raises: ImportError when the package modelscope is not installed.
    """
    if _is_local(path) or not envs.flag(_MODELSCOPE):
        return path
    if problem := modelscope_problem():
        raise ImportError(problem)
    from modelscope import snapshot_download

    return str(snapshot_download(path))


def _is_local(path: str) -> bool:
    return "://" in path or os.path.isdir(os.path.expanduser(path))


def cached_folder(path: str) -> str | None:
    """Return the folder of this machine that holds a model: the path itself, or that of a hub id in the cache."""
    folder = os.path.expanduser(path)
    if os.path.isdir(folder):
        return folder
    if "://" in path or envs.flag(_MODELSCOPE):
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(path, "config.json")
    except HFValidationError:
        return None
    return os.path.dirname(found) if isinstance(found, str) else None


def hub_problems(path: str) -> Iterator[str]:
    """Yield why a hub id cannot be loaded; local folders and cached models are not checked."""
    if _is_local(path):
        return
    if envs.flag(_MODELSCOPE):
        problem = modelscope_problem()
        if problem is not None:
            yield problem
        return
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = [try_to_load_from_cache(path, name) for name in ("config.json", "tokenizer_config.json")]
    except HFValidationError:
        yield "is neither a folder nor a hub id such as Qwen/Qwen2.5-0.5B: write one of them"
        return
    if any(isinstance(file, str) for file in found):
        return
    if constants.HF_HUB_OFFLINE:
        yield (
            f"is not in the hub's cache {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE=1 forbids a download: {_COPY}, or "
            "unset HF_HUB_OFFLINE"
        )
        return
    reason = unreachable(constants.ENDPOINT)
    if reason is not None:
        yield (
            f"is not in the hub's cache {constants.HF_HUB_CACHE}, and {constants.ENDPOINT} cannot be reached "
            f"({reason}): {_COPY}, or connect this machine"
        )


def unreachable(address: str, timeout_s: float = HUB_TIMEOUT_S) -> str | None:
    """Return why no server answers at an address; None if a server answers, with any status.

    A thread asks, because the name server may take longer than any time limit of a connection.
    """
    reasons = [f"no answer within {timeout_s:g} s"]
    asking = threading.Thread(target=_ask, args=(address, timeout_s, reasons), daemon=True)
    asking.start()
    asking.join(timeout_s)
    return reasons[-1] if reasons else None


def _ask(address: str, timeout_s: float, reasons: list[str]) -> None:
    """Clear ``reasons`` if a server answers, otherwise add one."""
    try:
        urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=timeout_s).close()
    except urllib.error.HTTPError:
        reasons.clear()
    except OSError as error:
        cause = getattr(error, "reason", error)
        if isinstance(cause, ssl.SSLError):  # the hub's client may know other certificates
            reasons.clear()
        else:
            reasons.append(str(cause))
    else:
        reasons.clear()
