"""Integrity checks for the KV caches of LLM servers, put in from outside.

This file is read at the start of every instrumented Python process, so it imports nothing at module level.
"""

__version__ = "0.1.0"


def install() -> None:
    """Patch the engines that this process has imported, and those that it will import.

    The explicit door, beside ``python -m kvcanary_agent run`` and the environment variables: it works whether or not
    ``KVCANARY_ENABLED`` is set. Calling it again, or in a process that another door has entered, changes nothing.
    """
    from kvcanary_agent import activation

    activation.install()


def uninstall() -> None:
    """Take everything back: engines get their own function objects again, and no further module is patched.

    The environment stays as it is, so processes started later are instrumented as before.
    """
    from kvcanary_agent import activation

    activation.uninstall()
