"""The engines' own doors: entry points that vLLM and SGLang load in every process, also where PYTHONPATH is not read.

They are there as soon as the package is installed, so they open for ``KVCANARY_ENABLED=1`` alone.
"""

import os


def load() -> None:
    """Install the agent if ``KVCANARY_ENABLED`` asks for it; never raises."""
    if not os.environ.get("KVCANARY_ENABLED", "").strip():
        return
    try:
        from kvcanary_agent.settings import Settings

        enabled, complaints = Settings.tolerant({"KVCANARY_ENABLED": os.environ["KVCANARY_ENABLED"]})
        if complaints:
            raise ValueError(complaints[0])
        if enabled.enabled:
            import kvcanary_agent

            kvcanary_agent.install()
    except (Exception, SystemExit) as error:
        import logging

        logging.getLogger("kvcanary_agent").warning("kvcanary: not active in this process: %s", error)
