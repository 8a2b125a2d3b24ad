"""The numeric primitives of a decoder layer behind one interface.

Not here: models, memory ownership, sampling policy. Imports nothing of ours; `engine` and `bench` may import it, and
`deploy/own_machine.py` what looks for compiled ones.
"""
