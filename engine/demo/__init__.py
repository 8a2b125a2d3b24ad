"""The demo model: a small Llama that answers, the text it learns from, and how it is trained.

Everything is made here from a seed: exercises (talk.py and the modules it draws from), a tokenizer, weights. Nothing of it runs
in a node: what it makes is an ordinary model directory.
"""
