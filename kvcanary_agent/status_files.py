"""What writers and readers of status files agree on. It imports nothing, so that a reader need not wait for torch."""

PREFIX = "kvcanary-status-"
"""How the name of every status file begins; then comes the process id, and ``.json``."""
