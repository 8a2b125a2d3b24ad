"""Other people's clients, unchanged, each in an environment of its own, against a cluster: `make clients`, no part of `make test`.

catalog.py       which clients, in which versions
environments.py  makes an environment and takes it away
inside/          what runs there; prints what the client got, as JSON
asks.py          what the libraries ask, and what plain HTTP gets for the same
libraries.py, benchmarks.py, evaluation.py    hold what was printed against that
"""
