"""Sockets and files by which processes of vLLM meet, in a folder that is removed however this process ends."""

from functools import cache
from pathlib import Path

from verl.utils import envs
from verl.utils.temporary import VLLM, TemporaryFolder, remove_folders_of_the_dead

_PLACE_VARIABLE = "VLLM_RPC_BASE_PATH"
_FILE = "file://"
_NAME_LENGTH = 37  # a slash and a UUID
_LONGEST_ADDRESS = 107


def collect_sockets() -> None:
    """Let the engines of this process make their sockets in one folder; vLLM never removes them.

    A place that the user has set in the environment stays, and so does vLLM's default if the addresses in the folder
    would become too long.
    """
    if envs.read(_PLACE_VARIABLE) is None:
        remove_folders_of_the_dead()
        place = str(_folder().path)
        if len(place) + _NAME_LENGTH <= _LONGEST_ADDRESS:
            envs.write({_PLACE_VARIABLE: place})


def in_folder(address: str) -> str:
    """Return the address at which the workers of an engine meet, in the folder of its sockets if it is a file.

    vLLM makes it in TMPDIR, where it stays if the engine is killed. Processes of the engine have the variable from the
    one that has made the folder.
    """
    place = Path(envs.read(_PLACE_VARIABLE) or "")
    if not (address.startswith(_FILE) and place.name.startswith(f"verl-{VLLM}-")):
        return address
    return f"{_FILE}{place / Path(address).name}"


@cache
def _folder() -> TemporaryFolder:
    return TemporaryFolder(VLLM, is_guarded=True)
