"""The prefill role: computes a prompt's KV cache, sends it where the router says.

Not here: sockets, threads, torch (see `node`). Imports `node` and what that may import; only `deploy` imports it.
"""
