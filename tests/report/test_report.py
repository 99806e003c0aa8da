"""``kvcanary-agent report``: what a terminal shows, what is refused, and what a real browser makes of the page."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvcanary_agent.canary.violation import BlockEvent, Kind, Neighbourhood, SlotState
from kvcanary_agent.incident_files import PREFIX
from kvcanary_agent.report.incident_file import read_incident
from kvcanary_agent.report.page import page
from kvcanary_agent.settings import Settings
from kvcanary_agent.telemetry import Telemetry
from kvcanary_agent.telemetry.pool_facts import GroupFacts, PoolFacts
from tests.telemetry.samples import changed_bytes, finish_pass, violation

ROOT = Path(__file__).parents[2]
BROWSER = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)
HOSTILE = "\x1b[31m</td><script>document.title = 'taken over'</script>&\"'"
TITLE = "1 \N{MULTIPLICATION SIGN} token, 1 \N{MULTIPLICATION SIGN} content in pool kv of demo 1.2"
needs_browser = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium: apt-get install chromium")


@pytest.fixture(scope="module")
def incident(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that the agent itself has written, of a request whose name a client chose with bad intentions."""
    folder = tmp_path_factory.mktemp("incidents")
    group = GroupFacts(
        name="full",
        blocks=64,
        block_size=4,
        null_block=0,
        window=None,
        layers=("model.layers.3.attn",),
        parts=2,
        bytes_per_slot=128,
        dtypes=("bfloat16",),
        device="cpu",
    )
    telemetry = Telemetry(Settings(incident_dir=str(folder)))
    pool = telemetry.open_pool(
        "demo", "1.2", "kv", 1, 2, PoolFacts(groups=(group,), reports_ownership=True, world_size=2)
    )
    states = ["unwritten"] * 4 + ["void"] * 4 + ["written"] * 12
    slots = tuple(
        SlotState(slot=slot, state=state, writer="req-writer" if state == "written" else None, position=slot)
        for slot, state in enumerate(states, start=8)
    )
    pool.look_with(lambda group, block: Neighbourhood(group=group, block=block, slots=slots))
    pool.step_started(9, ["req-reader", HOSTILE], 2)
    events = (BlockEvent(1, "allocated", "req-reader"), BlockEvent(7, "allocated", HOSTILE))
    finish_pass(
        pool,
        violation(Kind.TOKEN, request=HOSTILE, block_history=(HOSTILE, "req-writer"), block_events=events),
        changed_bytes(slot=18, offset=2),
    )
    assert telemetry.shutdown(10)
    (file,) = folder.glob("*.json")
    return file


def report(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvcanary_agent", "report", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_terminal_shows_cause_place_owners_and_what_to_try(incident: Path) -> None:
    result = report(incident)
    assert (result.returncode, result.stderr) == (0, "")
    text = " ".join(result.stdout.split())
    for words in (
        "1 x token, 1 x content in pool kv of demo 1.2",
        "step 9",
        "rank 1 of 2",
        "1. a block was handed out twice (90 %)",
        "What to try next: - log alloc and free of this block",
        "Block 4 (group full) step 1 handed to req-reader step 7 handed to",
    ):
        assert words in text
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "\x1b" not in result.stdout, "a name commands the terminal"


def test_a_report_does_not_wait_for_torch(incident: Path) -> None:
    look = (
        "import sys; from kvcanary_agent.report.command import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", look, str(incident)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert result.stdout.endswith("False\n")


def test_a_folder_stands_for_its_newest_incident(incident: Path) -> None:
    shown = report(incident).stdout
    assert report(incident.parent).stdout == f"{incident}, the only one there\n{shown}"
    older = incident.with_name(f"{PREFIX}older.json")
    older.touch()
    os.utime(older, (1, 1))
    assert report(incident.parent).stdout == f"{incident}, the newest of 2\n{shown}"
    older.unlink()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "cannot be read: No such file or directory"),
        ("{", "is no JSON"),
        ("[1]", "is no incident file: its schema is not 'kvcanary-incident'"),
        ('{"schema": "kvcanary-incident", "version": 2}', "is of version 2, and version 1 is known here"),
    ],
)
def test_a_file_that_is_no_incident_is_an_error_that_names_it(
    tmp_path: Path, content: str | None, complaint: str
) -> None:
    file = tmp_path / "incident.json"
    if content is not None:
        file.write_text(content)
    result = report(file)
    assert (result.returncode, result.stdout) == (2, "")
    assert str(file) in result.stderr
    assert complaint in result.stderr


def test_an_empty_folder_and_an_unwritable_page_are_errors(tmp_path: Path, incident: Path) -> None:
    assert "holds no incident file" in report(tmp_path).stderr
    result = report(incident, "-o", tmp_path / "missing" / "page.html")
    assert result.returncode == 2
    assert "No such file or directory" in result.stderr


def mangled(value: Any) -> list[Any]:
    """The same with one field after the other gone, or of another type."""
    variants: list[Any] = []
    odd: tuple[Any, ...] = (None, 7, "text", [3], {"a": []})
    if isinstance(value, dict):
        for name in value:
            if name in ("schema", "version"):
                continue
            rest = {other: kept for other, kept in value.items() if other != name}
            variants += [rest, *({**rest, name: wrong} for wrong in odd)]
            variants += [{**rest, name: variant} for variant in mangled(value[name])]
    elif isinstance(value, list) and value:
        variants += [[variant] for variant in mangled(value[0])]
    return variants


def test_an_incident_with_fields_missing_or_odd_is_shown_as_far_as_it_goes(incident: Path, tmp_path: Path) -> None:
    from io import StringIO

    from kvcanary_agent.report.summary import show
    from kvcanary_agent.screen import Screen

    file = tmp_path / "incident.json"
    variants = mangled(json.loads(incident.read_text()))
    assert len(variants) > 300
    for variant in variants:
        file.write_text(json.dumps(variant))
        content = read_incident(file)
        assert page(content).endswith("</html>\n")
        show(content, Screen(StringIO(), {}))


# The browser

MEASURE = """
<script>
function luminance(colour) {
  const [r, g, b] = colour.match(/[\\d.]+/g).map(Number).map(
    v => v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
function background(element) {
  for (let e = element; e; e = e.parentElement) {
    const colour = getComputedStyle(e).backgroundColor;
    if (!colour.startsWith("rgba(0, 0, 0, 0")) return colour;
  }
  return "rgb(255, 255, 255)";
}
let worst = 21;
document.querySelectorAll("details").forEach(d => d.open = true);
for (const element of document.querySelectorAll("main *")) {
  const own = [...element.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
  if (!own) continue;
  const [a, b] = [luminance(getComputedStyle(element).color), luminance(background(element))];
  worst = Math.min(worst, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05));
}
const result = {
  dark: matchMedia("(prefers-color-scheme: dark)").matches,
  page: getComputedStyle(document.body).backgroundColor,
  contrast: worst,
  overflow: document.documentElement.scrollWidth - innerWidth,
  hit: document.querySelectorAll(".map .slot.hit").length,
  slots: document.querySelectorAll(".map .slot").length,
  faultRow: document.querySelector(".map .fault th").textContent,
  rows: document.querySelectorAll("tbody tr").length,
  fetched: performance.getEntriesByType("resource").length,
  title: document.title,
};
document.body.innerHTML = "<pre id=result></pre>";
document.getElementById("result").textContent = JSON.stringify(result);
</script>
"""


def in_browser(file: Path, *options: str) -> str:
    """The document as Chromium has it after loading."""
    assert BROWSER is not None
    return subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", *options, "--dump-dom", file.as_uri()],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout


@needs_browser
@pytest.mark.parametrize("scheme", ["dark", "light"])
@pytest.mark.parametrize("width", [400, 1200])
def test_the_page_is_readable_in_a_real_browser(incident: Path, tmp_path: Path, scheme: str, width: int) -> None:
    measured = tmp_path / "measured.html"
    # A copy that may run a script: the page itself forbids every script.
    text = page(read_incident(incident))
    text = re.sub("<meta http-equiv=.*?>", "", text).replace("</body>", f"{MEASURE}</body>")
    measured.write_text(text)
    setting = f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}"
    dom = in_browser(measured, setting, f"--window-size={width},900")
    found = re.search('<pre id="result">(.*?)</pre>', dom)
    assert found, dom[:500]
    result = json.loads(found[1].replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">"))
    assert result["dark"] == (scheme == "dark")
    assert result["contrast"] >= 4.5, "WCAG AA for text"
    assert result["overflow"] <= 0, "the page itself scrolls sideways"
    assert (result["slots"], result["hit"], result["faultRow"]) == (20, 2, "block 4")
    assert result["rows"] == 2 + 5
    assert result["fetched"] == 0
    assert (
        result["title"] == "1 \N{MULTIPLICATION SIGN} token, 1 \N{MULTIPLICATION SIGN} content in pool kv of demo 1.2"
    )


@needs_browser
def test_names_in_an_incident_are_text_in_the_page_and_scripts_do_not_run(incident: Path, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    assert report(incident, "-o", file).returncode == 0
    file.write_text(file.read_text().replace("</body>", "<script>document.title = 'a script ran'</script></body>"))
    dom = in_browser(file)
    assert "&lt;script&gt;document.title = 'taken over'" in dom
    assert re.findall("<title>(.*?)</title>", dom) == [TITLE]


def test_the_page_names_no_other_place(incident: Path) -> None:
    text = page(read_incident(incident))
    assert not re.search(r"https?://|url\(|@import|src=|<link|<img", text)
