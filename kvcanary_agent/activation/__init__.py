"""How the agent gets into a process: launcher, doors, import hook, and the patching of engines' classes.

What runs at the start of every process is not here but in ``kvcanary_agent/__init__.py``.
"""
