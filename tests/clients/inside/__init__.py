"""Scripts that run inside a client's own environment, by their path: they import the client, and of ours what lies beside them."""
