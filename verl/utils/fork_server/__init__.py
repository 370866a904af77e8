"""Worker processes of Ray that begin as forks of a process that has imported torch already.

``starter.py`` starts the server in the launching process, ``server.py`` imports and forks, and ``client.py`` is what
Ray executes for each worker: it asks the server for a fork, and if it gets none, executes Ray's own command.
"""
