"""Real faults on real processes: killed, stopped, told to go, cut off, under a load whose answers are known.

`make soak` draws faults for half an hour (`python -m tests.chaos`); the tests here are the directed ones and those of the harness.
"""
