"""docs/by_hand.md and deploy/systemd, really run: hosts are network namespaces, and units are started as systemd would."""
