"""How the processes are started.

Command line and one-machine launcher. Not here: anything that serves. Imports `proto`, `runtime`; `node_process` alone the roles.
"""
