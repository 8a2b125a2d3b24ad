"""The one process that clients talk to.

HTTP API, tokenizing, token log, placement, retry. Not here: torch, KV, blocks. Imports `proto`, `runtime`; nobody imports it.
"""
