"""What adapters for a user's own engine are made of; `kvcanary_agent.adapter` is its public face.

Importing it, or `hooks`, `pools` and `words`, does not import torch: adapters are loaded as processes start.
"""
