"""One node's inference.

Model, weights, block pool, prefix cache, scheduler, runner, sampler. Not here: sockets, protobuf messages, requests, leases.
Imports `kernels` and `proto.block_key`. Its scheduler, pool and cache import without torch.
"""
