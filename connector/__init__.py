"""How KV gets from one place to another.

Handoff machines, fence floor, transports, the KV pool's stores. Not here: who sends or stores what when (the roles' cores
decide), tensors' meaning.
Imports `proto`; `node` and the roles may import it.
"""
