"""What keeps strangers out, and what they can do to those who keep them out: keys, certificates, bounds, fuzzing."""
