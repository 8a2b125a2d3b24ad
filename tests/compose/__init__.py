"""deploy/compose.yaml, really started: `make compose-test`, apart from `make test` because it needs a Docker engine."""
