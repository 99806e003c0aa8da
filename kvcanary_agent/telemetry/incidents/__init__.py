"""Incident files: one JSON file for each burst of violations, for people and programs that come later.

What a file holds is in :mod:`.document`, where and how it is written in :mod:`.folder`, and when in :mod:`.recorder`.
"""

from kvcanary_agent.telemetry.incidents.document import Incident
from kvcanary_agent.telemetry.incidents.recorder import IncidentRecorder

__all__ = ["Incident", "IncidentRecorder"]
