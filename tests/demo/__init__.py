"""The demo model: what it learns from is right, and training does what it says."""
