"""An incident on a terminal: what a person on call needs first, on one screen."""

from __future__ import annotations

from kvcanary_agent.report.incident_file import Fields
from kvcanary_agent.screen import Screen

_CAUSES = 3
_BLOCKS = 3


def show(incident: Fields, screen: Screen) -> None:
    """Write the summary of an incident."""
    summary, engine = incident.object("summary"), incident.object("engine")
    kinds = ", ".join(f"{count} x {kind}" for kind, count in summary.object("kinds").items())
    screen.heading(f"{kinds} in pool {incident.object('pool').text('name')} of {engine_name(engine)}")
    screen.field("when", f"{incident.text('started')}, step {steps(summary)}")
    screen.field("process", f"pid {incident.object('process').text('pid')}, rank {rank(engine)}")
    for label, name in (("requests", "requests"), ("blocks", "blocks"), ("layers", "layers")):
        values = summary.texts(name)
        if values:
            screen.field(label, shortened(values))
    repeats = incident.object("repeats").number("number")
    if repeats:
        screen.field("repeats", f"{repeats:.0f} more bursts like it, the last at {last_repeat(incident)}")

    causes = incident.objects("diagnosis")
    for rank_of_cause, cause in enumerate(causes[:_CAUSES], start=1):
        screen.heading(f"{rank_of_cause}. {cause.text('title')} ({100 * cause.number('confidence'):.0f} %)")
        screen.paragraph(cause.text("sentence"))
        if rank_of_cause == 1:
            screen.paragraph("What to try next:")
            for step in cause.texts("next_steps"):
                screen.paragraph(f"- {step}")

    for block in incident.objects("blocks")[:_BLOCKS]:
        screen.heading(f"Block {block.text('block')} (group {block.text('group')})")
        events = block.objects("events")
        for event in events:
            screen.field(f"step {event.text('step')}", event_text(event))
        if not events and block.texts("owners"):
            screen.paragraph(f"went to {', then '.join(block.texts('owners'))}")


def engine_name(engine: Fields) -> str:
    return f"{engine.text('name', 'an unknown engine')} {engine.text('version')}".strip()


def rank(engine: Fields) -> str:
    return f"{engine.text('rank', '0')} of {engine.text('world_size', '1')}"


def steps(summary: Fields) -> str:
    """One step, or the first and the last."""
    return " to ".join(dict.fromkeys(summary.texts("steps")))


def shortened(values: list[str], most: int = 8) -> str:
    more = f" and {len(values) - most} more" if len(values) > most else ""
    return ", ".join(values[:most]) + more


def event_text(event: Fields) -> str:
    words = {
        "allocated": "handed to",
        "shared": "shared with",
        "freed": "freed by",
        "cached": "freed, contents kept, by",
        "copied": "copied into",
        "loaded": "loaded from another tier for",
    }
    name = event.text("event")
    request = event.text("request")
    if name == "copied" and not request:
        return "copied into"
    return f"{words.get(name, name)} {request or 'a request that is not known'}"


def last_repeat(incident: Fields) -> str:
    last = incident.object("repeats").objects("last")
    return last[-1].text("started") if last else "an unknown time"
