"""How fast it is, as ratios against a limit or a peer measured in the same run. Imports what it measures; nobody imports it."""
