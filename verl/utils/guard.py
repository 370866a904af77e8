"""Kill processes when another one has ended, however it ended.

``python -I -S guard.py HANDLE HANDLE...``: inherited handles (``os.pidfd_open``) of the process whose end counts and of
those to kill. It imports little, so that it starts at once and stays small. See ``processes.end_with_this_process``.
"""

import os
import select
import signal
import sys


def main(handles: list[int]) -> None:
    """Wait for the end of the first process, then kill the others."""
    end = select.poll()
    end.register(handles[0], select.POLLIN)
    end.poll()
    for handle in handles[1:]:
        try:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        except OSError:  # it has ended, or belongs to another user by now
            continue
    os._exit(0)


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]])
