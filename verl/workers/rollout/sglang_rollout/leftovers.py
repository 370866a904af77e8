"""Remove the files and sockets that SGLang's engine leaves on a machine, however the engine's owner ends."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.utils.temporary import SGLANG, TemporaryFolder, remove_folders_of_the_dead

if TYPE_CHECKING:
    from zmq import Socket

_SHARED_MEMORY = Path("/dev/shm")


class SocketFolder:
    """The folder of the sockets between the processes of an engine.

    ``opened`` are the sockets of this process. ``close`` closes them; it waits for no message, because
    the receiver is gone.

    The folder is removed by ``close``, and by a process that waits for the end of the owner, however that ends. The
    folders of owners that were killed with all their processes are removed when the next one is made.
    """

    def __init__(self) -> None:
        remove_folders_of_the_dead()
        self._folder = TemporaryFolder(SGLANG, is_guarded=True)
        self.path = self._folder.path
        self.instance: str | None = None
        self.opened: list[Socket[Any]] = []

    def note(self, instance: str) -> None:
        """Note SGLang's id of the engine, whose counters in shared memory are removed with the folder."""
        self.instance = instance
        self._folder.note_shared_memory(_counters_of(instance))

    def close(self) -> None:
        """Close the sockets, and remove the folder and the engine's remaining counters."""
        while self.opened:
            self.opened.pop().close(linger=0)
        self._folder.remove()


def _counters_of(instance: str) -> str:
    """Return the prefix of the names of an engine's counters."""
    return f"sglang_loads_{instance}_"


def unlink_shared_memory(pids: Iterable[int], instance: str | None) -> None:
    """Unlink the shared memory of schedulers, which lives while they map it and is freed with them.

    With a name, a killed engine would leave 25 MB for each tensor-parallel group.

    Args: ``instance`` is SGLang's id of the engine, None if a process may still open its counters.
    """
    names = [f"sgl_shm_*_{pid}_*" for pid in pids]
    if instance:
        names.append(f"{_counters_of(instance)}*")
    for name in names:
        for path in _SHARED_MEMORY.glob(name):
            path.unlink(missing_ok=True)
