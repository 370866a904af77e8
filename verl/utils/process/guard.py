"""Kill processes and remove folders when another process has ended, however it ended.

``python -I -S guard.py HANDLE... FOLDER...``: inherited handles (``os.pidfd_open``) of the process whose end counts and
of those to kill, and the paths of folders that hold only files. With ``group`` in place of folders it kills all
processes of its own group, itself too. It imports little, so that it starts at once and stays small. See
``lifetime.end_with_this_process`` and ``lifetime.guarded_group``.
"""

import os
import select
import signal
import sys

GROUP = "group"


def main(handles: list[int], folders: list[str]) -> None:
    """Wait for the end of the first process, then kill the others and remove the folders."""
    end = select.poll()
    end.register(handles[0], select.POLLIN)
    end.poll()
    for handle in handles[1:]:
        try:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        except OSError:  # the process has ended, or its id belongs to another user
            continue
    if folders == [GROUP]:
        os.killpg(0, signal.SIGKILL)
    for folder in folders:
        try:
            for name in os.listdir(folder):
                os.unlink(os.path.join(folder, name))
            os.rmdir(folder)
        except OSError:  # the folder has already been removed
            continue
    os._exit(0)


if __name__ == "__main__":
    words = sys.argv[1:]
    main([int(word) for word in words if word.isdecimal()], [word for word in words if not word.isdecimal()])
