"""What a node process is in any role.

Its loop, runner thread, session server, handoff ends, HTTP pages. Not here: any decision of a role.
Imports `proto`, `runtime`, `engine`, `connector`; only the roles and `bench` may import it.
"""
