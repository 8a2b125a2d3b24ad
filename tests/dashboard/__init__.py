"""The dashboard as a browser shows it: headless Chromium on real clusters."""
