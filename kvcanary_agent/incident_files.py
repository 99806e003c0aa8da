"""What writers and readers of incident files agree on. It imports nothing, so that a reader need not wait for torch."""

SCHEMA = "kvcanary-incident"
VERSION = 1
PREFIX = "kvcanary-incident-"
"""How the name of every incident file begins; it ends in ``.json``."""
