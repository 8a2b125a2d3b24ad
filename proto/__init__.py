"""What goes over the wire.

The .proto file, the modules generated from it (`make proto`; a test checks that they are fresh), and the two value types
that every party computes alike: `attempt_key` and `block_key`. Imports nothing of ours; every room may import it.
"""
