"""Other people's clients, unchanged, each in an environment of its own, against a cluster: `make clients`, no part of `make test`.

catalog.py       which clients, in which versions
environments.py  makes an environment and takes it away
programs.py      runs pip, or what a client has to run, and lets nothing of it live on
inside/          what runs there; writes down what the client got, as JSON
asks.py          what the libraries ask, and what plain HTTP gets for the same; served.py is whom it asks
libraries.py, benchmarks.py, evaluation.py    hold what was written against that
test_clients.py  part of `make test`: that they can fail, and leave nothing behind
"""
