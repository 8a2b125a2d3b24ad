"""Scripts that run inside a client's own environment, by their path: they import the client and nothing of ours."""
