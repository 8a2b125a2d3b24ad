"""The mixed role: prefill and decode in one process, over one engine and one pool of KV.

Not here: what either role decides (`prefill_node`, `decode_node`, whose cores it is given). Imports `node` and what that may
import; only `deploy` imports it.
"""
