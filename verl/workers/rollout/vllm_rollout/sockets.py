"""The sockets between the processes of vLLM, in a folder that is removed however this process ends."""

from functools import cache

from verl.utils import envs
from verl.utils.temporary import VLLM, TemporaryFolder, remove_folders_of_the_dead

_PLACE_VARIABLE = "VLLM_RPC_BASE_PATH"
_NAME_LENGTH = 37  # a slash and a UUID
_LONGEST_ADDRESS = 107


def collect_sockets() -> None:
    """Let the engines of this process make their sockets in one folder; vLLM never removes them.

    They stay where they are if the variable is set, or if their addresses would become too long.
    """
    if envs.read(_PLACE_VARIABLE) is None:
        remove_folders_of_the_dead()
        place = str(_folder().path)
        if len(place) + _NAME_LENGTH <= _LONGEST_ADDRESS:
            envs.write({_PLACE_VARIABLE: place})


@cache
def _folder() -> TemporaryFolder:
    return TemporaryFolder(VLLM, is_guarded=True)
