"""The decode role: leases blocks to senders, generates what was committed or, where asked, what it computes itself.

Not here: sockets, threads, torch (see `node`). Imports `node` and what that may import; only `deploy` imports it.
"""
