"""Incident files: what they hold, and that the folder stays private, bounded and harmless."""

from __future__ import annotations

import json
import os
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from kvcanary_agent.canary import ForwardStep, GroupStep, KVGroup, KVLayout, KVPart
from kvcanary_agent.canary.violation import Kind, Neighbourhood, SlotState
from kvcanary_agent.settings import Settings
from kvcanary_agent.telemetry import PoolTelemetry, Telemetry, bursts
from kvcanary_agent.telemetry.incidents import document, folder
from kvcanary_agent.telemetry.pool_facts import PoolFacts
from tests.otlp_receiver import HttpOtlpReceiver
from tests.telemetry.samples import changed_bytes, finish_pass, violation


def opened(path: Path, **settings: Any) -> tuple[Telemetry, PoolTelemetry]:
    telemetry = Telemetry(Settings(incident_dir=str(path), **settings))
    facts = PoolFacts(groups=(), world_size=2)
    return telemetry, telemetry.open_pool("demo", "1.2", "kv", rank=1, world_size=2, facts=facts)


def files(path: Path) -> list[Path]:
    return sorted(path.glob("*.json"))


def only_incident(path: Path) -> Any:
    (file,) = files(path)
    return json.loads(file.read_text())


@pytest.fixture
def each_violation_is_a_burst(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bursts, "QUIET_S", 0.0)


def test_a_burst_is_one_file_with_evidence_diagnosis_and_circumstances(tmp_path: Path) -> None:
    telemetry, pool = opened(tmp_path / "not" / "there yet")
    slots = (SlotState(slot=17, state="written", token="hash:aa", position=1, writer="req-writer", written_step=8),)
    pool.look_with(lambda group, block: Neighbourhood(group=group, block=block, slots=slots))
    pool.step_started(9, ["req-reader", "req-other"], 2)
    finish_pass(pool, violation(), violation(slot=18, offset=2))
    assert telemetry.shutdown(10)

    incident = only_incident(tmp_path / "not" / "there yet")
    assert (incident["schema"], incident["version"]) == ("kvcanary-incident", 1)
    assert incident["summary"]["kinds"] == {"token": 2}
    assert incident["summary"]["slots"] == [17, 18]
    assert incident["diagnosis"][0]["cause"] == "double_allocation"
    assert incident["diagnosis"][0]["next_steps"]
    assert incident["step"] == {
        "step": 9,
        "requests": ["req-reader", "req-other"],
        "num_requests": 2,
        "num_new_tokens": 2,
    }
    assert incident["neighbourhood"]["slots"][0]["writer"] == "req-writer"
    assert incident["violations"][0]["expected"] == "hash:aaaa"
    assert incident["blocks"][0]["owners"] == ["req-reader", "req-writer"]
    assert incident["engine"] == {"name": "demo", "version": "1.2", "rank": 1, "world_size": 2}
    assert incident["libraries"]["torch"]
    assert incident["configuration"]["content"] == "scrub"
    assert incident["process"]["pid"] == os.getpid()


def test_files_and_folder_are_the_users_alone(tmp_path: Path) -> None:
    telemetry, pool = opened(tmp_path / "incidents")
    pool.violation(violation())
    assert telemetry.shutdown(10)
    assert stat.S_IMODE((tmp_path / "incidents").stat().st_mode) == 0o700
    (file,) = (tmp_path / "incidents").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_burst_that_goes_on_stays_one_file(tmp_path: Path) -> None:
    telemetry, pool = opened(tmp_path)
    pool.violation(changed_bytes())
    assert telemetry.flush(10)
    assert only_incident(tmp_path)["diagnosis"][0]["cause"] == "stray_write"
    for slot in range(18, 28):
        pool.violation(changed_bytes(slot=slot, block=slot // 4))
    assert telemetry.shutdown(10)
    incident = only_incident(tmp_path)
    assert incident["summary"]["violations"] == 11
    assert incident["diagnosis"][0]["cause"] == "many_blocks_overwritten"


@pytest.mark.usefixtures("each_violation_is_a_burst")
def test_repeats_are_counted_in_the_first_file(tmp_path: Path, receiver: HttpOtlpReceiver) -> None:
    telemetry, pool = opened(tmp_path)
    for step in range(30):
        pool.violation(violation(step=step))
        assert telemetry.flush(10)
    pool.violation(violation(Kind.NAMESPACE))
    assert telemetry.shutdown(10)
    first, other = (json.loads(file.read_text()) for file in sorted(files(tmp_path), key=lambda f: f.stat().st_ino))
    if first["summary"]["kinds"] != {"token": 1}:
        first, other = other, first
    assert other["summary"]["kinds"] == {"namespace": 1}
    assert first["repeats"]["number"] == 29
    assert [repeat["step"] for repeat in first["repeats"]["last"]] == list(range(14, 30))
    assert receiver.latest("kvcanary.incidents", kvcanary_outcome="written") == 2
    assert receiver.latest("kvcanary.incidents", kvcanary_outcome="repeated") == 29


def test_a_file_that_somebody_has_removed_is_written_anew(tmp_path: Path, each_violation_is_a_burst: None) -> None:
    telemetry, pool = opened(tmp_path)
    pool.violation(violation())
    assert telemetry.flush(10)
    files(tmp_path)[0].unlink()
    pool.violation(violation(step=10))
    assert telemetry.shutdown(10)
    assert only_incident(tmp_path)["violations"][0]["step"] == 10


def test_a_file_stays_within_its_bound_and_keeps_the_first_and_the_last(tmp_path: Path) -> None:
    telemetry, pool = opened(tmp_path)
    for slot in range(3000):
        pool.violation(violation(slot=slot, block=slot // 4, detail="x" * 2000))
    assert telemetry.shutdown(30)
    (file,) = files(tmp_path)
    assert file.stat().st_size <= document.MAX_BYTES
    incident = json.loads(file.read_text())
    assert incident["summary"]["violations"] == 3000
    slots = [found["slot"] for found in incident["violations"]]
    assert (slots[0], slots[-1]) == (0, 2999)


@pytest.mark.usefixtures("each_violation_is_a_burst")
@pytest.mark.parametrize(("bound", "value"), [("MAX_FILES", 3), ("MAX_FOLDER_BYTES", 12_000)])
def test_a_full_folder_takes_no_more_and_says_so_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    receiver: HttpOtlpReceiver,
    bound: str,
    value: int,
) -> None:
    monkeypatch.setattr(folder, bound, value)
    telemetry, pool = opened(tmp_path)
    kinds = (Kind.TOKEN, Kind.NAMESPACE, Kind.EPOCH, Kind.INDEX, Kind.RANK, Kind.LOST_WRITE, Kind.UNWRITTEN)
    for kind in kinds:
        pool.violation(violation(kind))
        assert telemetry.flush(10)
    assert telemetry.shutdown(10)
    written = len(files(tmp_path))
    assert 0 < written < len(kinds)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= folder.MAX_FOLDER_BYTES
    assert len([message for message in caplog.messages if "remove those that you have read" in message]) == 1
    assert receiver.latest("kvcanary.incidents", kvcanary_outcome="dropped") == len(kinds) - written
    assert len(receiver.events("kvcanary.violation")) == len(kinds)


@pytest.mark.parametrize("obstacle", ["a file in its place", "no such device"])
def test_a_folder_that_cannot_be_written_loses_no_violation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, receiver: HttpOtlpReceiver, obstacle: str
) -> None:
    path = Path("/dev/null/incidents")
    if obstacle == "a file in its place":
        path = tmp_path / "file"
        path.write_text("")
    telemetry, pool = opened(path)
    finish_pass(pool, violation())
    assert telemetry.shutdown(10)
    assert len(receiver.events("kvcanary.violation")) == 1
    assert [message for message in caplog.messages if message.startswith("kvcanary: writing incidents failed")]


def test_a_disk_that_hangs_holds_up_neither_reports_nor_steps(tmp_path: Path, receiver: HttpOtlpReceiver) -> None:
    os.mkfifo(tmp_path / "pipe")
    # Nobody reads from the pipe, so that whoever opens it waits: as on a network file system that is gone.
    telemetry, pool = opened(tmp_path)
    from kvcanary_agent.telemetry.incidents.folder import IncidentFolder

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(IncidentFolder, "write", lambda *_: open(tmp_path / "pipe", "w").close())
        start = time.monotonic()
        for step in range(100):
            finish_pass(pool, violation(step=step), step=step)
        assert time.monotonic() - start < 5
        assert receiver.wait_for(lambda received: len(received.events("kvcanary.violation")) == 100)
        assert not telemetry.shutdown(0.5)
        with open(tmp_path / "pipe") as pipe:
            pipe.read()


def test_without_the_variable_nothing_is_written_and_no_records_are_looked_at(tmp_path: Path) -> None:
    telemetry = Telemetry(Settings())
    pool = telemetry.open_pool("demo", "1.2", "kv", rank=0, world_size=1)
    pool.look_with(lambda *_: pytest.fail("looked at the records"))
    pool.violation(violation())
    assert telemetry.shutdown(10)
    assert not files(tmp_path)


def test_token_ids_are_hashes_unless_revealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from kvcanary_agent import runtime

    token = 123456789
    runtime.shut_down()  # settings that an earlier pool of this process has been opened with
    for reveal in ("0", "1"):
        monkeypatch.setenv("KVCANARY_INCIDENT_DIR", str(tmp_path / reveal))
        monkeypatch.setenv("KVCANARY_REVEAL_TOKENS", reveal)
        data = torch.zeros(4, 4, 8)
        group = KVGroup(name="full", block_size=4, parts=(KVPart(layer="0", part="kv", view=data),))
        canary = runtime.open_canary(KVLayout(engine="test", groups=(group,)))
        assert canary is not None
        for prefix, new in ((0, 3), (3, 1)):
            canary.before_forward(
                ForwardStep(
                    requests=["a"],
                    prefix_lens=torch.tensor([prefix]),
                    query_offsets=torch.tensor([0, new]),
                    token_ids=torch.full((new,), token),
                    positions=torch.arange(prefix, prefix + new),
                    groups=[
                        GroupStep(
                            block_table=torch.tensor([[1 if new == 3 else 2]]),
                            write_slots=4 + torch.arange(prefix, prefix + new),
                        )
                    ],
                )
            )
            data[1] += torch.arange(4 * 8).view(4, 8)
            canary.after_forward()
        runtime.shut_down()
        # On a busy machine the writer may still be at it when the shutdown no longer waits.
        until = time.monotonic() + 30
        while not files(tmp_path / reveal) and time.monotonic() < until:
            time.sleep(0.01)
        text = files(tmp_path / reveal)[0].read_text()
        assert (str(token) in text) == (reveal == "1")
        written = [slot for slot in json.loads(text)["neighbourhood"]["slots"] if slot["state"] == "written"]
        assert [slot["position"] for slot in written[:3]] == [0, 1, 2]
