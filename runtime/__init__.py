"""The impure shell that all processes share.

Config, clock, control sessions, registry, logs, metrics, signals. Every file does I/O or reads the clock, but for the session's
leaf machine; that is what keeps a utils/ from appearing. Imports `proto`, never torch.
"""
