"""An incident as one HTML page without scripts, images or anything to fetch."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from importlib.resources import files

from kvcanary_agent.report.incident_file import Fields
from kvcanary_agent.report.summary import engine_name, event_text, last_repeat, rank, shortened, steps

_MAX_ROWS = 200
_TIMES = "\N{MULTIPLICATION SIGN}"
_SYMBOLS = {"hit": _TIMES, "written": "", "void": "o", "unwritten": "·", "unknown": "?"}
_STATES = {
    "hit": "violated",
    "written": "written",
    "void": "written before its block was handed out last",
    "unwritten": "never written",
    "unknown": "came from elsewhere",
}
_COLUMNS = (
    ("kind", "kind"),
    ("step", "step"),
    ("block", "block"),
    ("slot", "slot"),
    ("request", "request"),
    ("position", "position"),
    ("layer", "layer"),
    ("part", "part"),
    ("expected", "expected"),
    ("found", "found"),
    ("writer", "writer"),
    ("written_step", "written at step"),
    ("detail", "detail"),
)


def page(incident: Fields) -> str:
    """The whole page."""
    summary, engine, pool = incident.object("summary"), incident.object("engine"), incident.object("pool")
    kinds = ", ".join(f"{count} {_TIMES} {kind}" for kind, count in summary.object("kinds").items())
    title = f"{kinds} in pool {pool.text('name')} of {engine_name(engine)}"
    facts = [
        ("When", f"{incident.text('started')} to {incident.text('updated')}, step {steps(summary)}"),
        ("Process", f"pid {incident.object('process').text('pid')}, rank {rank(engine)}"),
        ("Requests", shortened(summary.texts("requests"))),
        ("Blocks", shortened(summary.texts("blocks"))),
        ("Layers", shortened(summary.texts("layers"))),
        ("The step", _step(incident.object("step"))),
        ("Repeats", _repeats(incident)),
    ]
    sections = [
        f"<h1>{escape(title)}</h1>",
        _definitions((name, value) for name, value in facts if value),
        _section("Probable causes", _diagnosis(incident.objects("diagnosis"))),
        _section("The pool around the fault", _map(incident)),
        _section("Who had the blocks", "".join(map(_timeline, incident.objects("blocks")))),
        _section("Evidence", _evidence(incident)),
        _section("Circumstances", _circumstances(incident)),
    ]
    style = files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(section for section in sections if section)
        + "\n</main>\n</body>\n</html>\n"
    )


def _section(heading: str, content: str) -> str:
    return f"<section>\n<h2>{escape(heading)}</h2>\n{content}\n</section>" if content else ""


def _definitions(items: Iterable[tuple[str, str]]) -> str:
    rows = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in items)
    return f"<dl>{rows}</dl>"


def _step(step: Fields) -> str:
    if not step:
        return ""
    return (
        f"step {step.text('step')}: {step.text('num_requests')} requests ({shortened(step.texts('requests'))}), "
        f"{step.text('num_new_tokens')} new tokens"
    )


def _repeats(incident: Fields) -> str:
    number = incident.object("repeats").number("number")
    return f"{number:.0f} more bursts like it, the last at {last_repeat(incident)}" if number else ""


def _diagnosis(causes: list[Fields]) -> str:
    entries = []
    for index, cause in enumerate(causes):
        percent = max(0, min(100, round(100 * cause.number("confidence"))))
        next_steps = "".join(f"<li>{escape(step)}</li>" for step in cause.texts("next_steps"))
        entries.append(
            f'<li><details{" open" if index == 0 else ""}><summary><span class="title">{escape(cause.text("title"))}'
            f'</span> <meter min="0" max="100" value="{percent}"></meter> <span class="percent">{percent} %</span>'
            f'</summary><p>{escape(cause.text("sentence"))}</p><p class="next">What to try next</p>'
            f"<ul>{next_steps}</ul></details></li>"
        )
    return f'<ol class="causes">{"".join(entries)}</ol>' if entries else ""


def _map(incident: Fields) -> str:
    """One row for each block, one cell for each slot, as the records were when the first violation was found."""
    around = incident.object("neighbourhood")
    slots = around.objects("slots")
    if not slots:
        return ""
    group = around.text("group")
    size = next(
        (
            int(facts.number("block_size", 1))
            for facts in incident.object("pool").objects("groups")
            if facts.text("name") == group
        ),
        1,
    )
    hit = {
        found.text("slot"): found.text("kind")
        for found in reversed(incident.objects("violations"))
        if found.text("group") == group
    }
    rows: dict[int, list[str]] = {}
    for slot in slots:
        number = int(slot.number("slot"))
        rows.setdefault(number // max(1, size), []).append(_cell(slot, hit.get(slot.text("slot"))))
    table = "".join(
        f'<tr{" class=fault" if str(block) == around.text("block") else ""}><th scope="row">block {block}</th>'
        f'<td><div class="slots">{"".join(cells)}</div></td></tr>'
        for block, cells in rows.items()
    )
    legend = "".join(
        f'<span><i class="slot {state}">{_SYMBOLS[state]}</i> {escape(text)}</span>' for state, text in _STATES.items()
    )
    return (
        f'<table class="map"><caption>Group {escape(group)}, {size} slots in a block; rest the pointer on a slot for '
        f'its record</caption>{table}</table><p class="legend">{legend}</p>'
    )


def _cell(slot: Fields, kind: str | None) -> str:
    state = slot.text("state")
    words = [f"slot {slot.text('slot')}", _STATES.get(state, state)]
    if kind is not None:
        words.insert(1, f"{kind} violation")
    for name, label in (("writer", "by"), ("position", "position"), ("token", "token"), ("written_step", "at step")):
        value = slot.text(name)
        if value:
            words.append(f"{label} {value}")
    text = escape(", ".join(words))
    symbol = _SYMBOLS["hit"] if kind is not None else _SYMBOLS.get(state, "?")
    classes = f"slot {escape(state)}" + (" hit" if kind is not None else "")
    return f'<i class="{classes}" title="{text}" role="img" aria-label="{text}">{symbol}</i>'


def _timeline(block: Fields) -> str:
    events = "".join(
        f'<li><span class="at">step {escape(event.text("step"))}</span> {escape(event_text(event))}</li>'
        for event in block.objects("events")
    )
    if not events:
        events = "".join(f"<li>{escape(owner)}</li>" for owner in block.texts("owners"))
    if not events:
        return ""
    heading = f"Block {escape(block.text('block'))}, group {escape(block.text('group'))}"
    return f'<h3>{heading}</h3><ol class="timeline">{events}</ol>'


def _evidence(incident: Fields) -> str:
    violations = incident.objects("violations")
    shown = violations[:_MAX_ROWS]
    columns = [(name, label) for name, label in _COLUMNS if any(found.text(name) for found in shown)]
    head = "".join(f'<th scope="col">{label}</th>' for _, label in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(found.text(name))}</td>" for name, _ in columns) + "</tr>" for found in shown
    )
    total = int(incident.object("summary").number("violations", len(violations)))
    note = f"<p>{len(shown)} of {total} violations</p>" if total > len(shown) else ""
    return f'{note}<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _circumstances(incident: Fields) -> str:
    parts = []
    for name in ("engine", "process", "libraries", "configuration"):
        items = list(incident.object(name).items())
        if items:
            parts.append(f"<h3>{name.capitalize()}</h3>{_definitions(items)}")
    parts += [
        f"<h3>Group {escape(group.text('name'))} of the pool</h3>{_definitions(group.items())}"
        for group in incident.object("pool").objects("groups")
    ]
    return "".join(parts)
