"""What a KV connector brings back is what was stored, or a ``transfer`` violation."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.vllm.harness import MAX_TOKENS, PROMPTS, Engine, Watched, checked
from tests.engines.vllm.test_faults import violations
from tests.otlp_receiver import OtlpReceiver

LAYERS, BLOCK = 3, 32
DIGESTS = "kvcanary-full-0of1.pt"
# The connector loads whole blocks, and never the last token of a prompt: nothing of the first.
LOADED_BLOCKS = [(len(prompt) - 2) // BLOCK for prompt in PROMPTS]
LOADED = sum(LOADED_BLOCKS) * BLOCK * 2 * LAYERS
# A single byte may have changed anywhere; the bytes of a whole block may be those of its next owner.
CAUSES = {"stray_write", "transfer_incomplete", "block_reused_during_transfer"}
EVERYTHING = {(f"layers.{layer}.", part) for layer in range(LAYERS) for part in "kv"}
# What `connectors.Faulty` leaves wrong, by the number of the prompt.
DAMAGE = {2: {("layers.1.", "k")}, 4: {("layers.1.", "k"), ("layers.1.", "v")}, 6: EVERYTHING, 7: EVERYTHING}


def transferred(connector: str, storage: Path) -> dict[str, Any]:
    """Engine options: everything goes through the connector, nothing stays in the engine's own prefix cache."""
    return {
        "enable_prefix_caching": False,
        "max_num_batched_tokens": 2048,
        "kv_transfer_config": {
            "kv_connector": connector,
            "kv_role": "kv_both",
            "kv_connector_module_path": None if connector == "ExampleConnector" else "connectors",
            "kv_connector_extra_config": {"shared_storage_path": str(storage), "prompts": len(PROMPTS)},
        },
    }


def run(engine: Engine, connector: str, storage: Path, **options: Any) -> Watched:
    return engine.watch(**transferred(connector, storage), environment={"KVCANARY_CONTENT": "full"}, **options)


@pytest.fixture(scope="module")
def expected(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return engine.generate(**transferred("ExampleConnector", tmp_path_factory.mktemp("without")))


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("storage")


@pytest.fixture(scope="module")
def first(engine: Engine, storage: Path) -> Watched:
    """Stores everything in the first round, and loads it in the second."""
    return run(engine, "ExampleConnector", storage, until=checked("transfer", LOADED))


def test_what_comes_back_as_it_was_stored_is_compared_and_not_reported(
    first: Watched, expected: dict[str, Any]
) -> None:
    assert first.violations == []
    assert first.result == expected
    assert "not covering" not in first.output


def test_what_another_process_has_stored_is_compared_and_may_come_layer_by_layer(
    engine: Engine, storage: Path, first: Watched, expected: dict[str, Any]
) -> None:
    second = run(engine, "LayerByLayer", storage, until=checked("transfer", 2 * LOADED))

    assert second.violations == []
    assert second.result == expected


def damage(receiver: OtlpReceiver, round_: int) -> dict[int, set[tuple[str, str]]]:
    """Layers and parts of the violations of a round, by the number of the prompt, all of them of kind ``transfer``."""
    found: dict[int, set[tuple[str, str]]] = {}
    for violation in receiver.events("kvcanary.violation"):
        attributes = violation.attributes
        assert attributes["kvcanary.kind"] == "transfer"
        assert attributes["kvcanary.cause"] in CAUSES
        number = int(attributes["kvcanary.request"].partition("-")[0]) - round_ * len(PROMPTS)
        if 0 <= number < len(PROMPTS):
            layer = attributes["kvcanary.layer"]
            name = next(name for name, _ in EVERYTHING if name in layer)
            found.setdefault(number, set()).add((name, attributes["kvcanary.part"]))
    return found


def test_what_comes_back_otherwise_late_in_part_or_not_at_all_is_reported_before_the_step_is_over(
    engine: Engine, tmp_path: Path
) -> None:
    watched = run(engine, "Faulty", tmp_path, until=lambda receiver: damage(receiver, 1) == DAMAGE)

    assert damage(watched.receiver, 0) == {}
    assert damage(watched.receiver, 1) == DAMAGE
    first_round = MAX_TOKENS
    assert {violation.attributes["kvcanary.step"] for violation in watched.violations} <= {first_round, first_round + 1}


@pytest.mark.parametrize(
    ("options", "environment"),
    [
        pytest.param({"v2": True}, {}, id="v2_runner"),
        pytest.param({}, {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}, id="engine_in_a_process_of_its_own"),
    ],
)
def test_what_comes_back_wrong_is_reported_wherever_the_worker_runs(
    engine: Engine, tmp_path: Path, options: dict[str, Any], environment: dict[str, str]
) -> None:
    watched = engine.watch(
        **transferred("Faulty", tmp_path),
        **options,
        environment={"KVCANARY_CONTENT": "full", **environment},
        until=lambda receiver: damage(receiver, 1) == DAMAGE,
    )

    assert damage(watched.receiver, 0) == {}
    assert damage(watched.receiver, 1) == DAMAGE
    assert "not covering" not in watched.output


def test_digests_of_another_process_are_compared_and_without_them_the_bytes_are_taken_as_they_are(
    engine: Engine, storage: Path, first: Watched, tmp_path: Path
) -> None:
    shutil.copytree(storage, tmp_path, dirs_exist_ok=True)
    # The folder of the second prompt is the one that holds a single block.
    (folder,) = (folder for folder in tmp_path.iterdir() if _blocks_in(folder) == LOADED_BLOCKS[2] == 1)
    (folder / DIGESTS).unlink()

    with_digests = {number: parts for number, parts in DAMAGE.items() if number != 2}

    watched = run(engine, "Faulty", tmp_path, until=lambda receiver: damage(receiver, 0) == with_digests)

    assert damage(watched.receiver, 0) == with_digests


def _blocks_in(folder: Path) -> int:
    """How many blocks were stored in a folder of the connector's."""
    digests = folder / DIGESTS
    return int(torch.load(digests)["fingerprints"].shape[1]) if digests.exists() else 0


def offloaded(**extra: Any) -> dict[str, Any]:
    """Engine options: what a request leaves behind is in a tier of host memory alone."""
    return {
        "enable_prefix_caching": False,
        "kv_transfer_config": {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "spec_name": "HostTier",
                "spec_module_path": "host_tier",
                "cpu_bytes_to_use": 16 << 20,
                **extra,
            },
        },
    }


def test_blocks_that_come_back_from_host_memory_between_steps_are_compared(engine: Engine) -> None:
    expected = engine.generate(**offloaded())

    watched = engine.watch(
        **offloaded(), environment={"KVCANARY_CONTENT": "full"}, until=checked("transfer", BLOCK * 2 * LAYERS)
    )

    assert watched.violations == []
    assert watched.result == expected
    assert "not covering" not in watched.output


def test_a_byte_that_comes_back_from_host_memory_otherwise_is_a_transfer_violation(engine: Engine) -> None:
    watched = engine.watch(**offloaded(wrong_load=1), environment={"KVCANARY_CONTENT": "full"}, until=violations(1))

    assert {violation.attributes["kvcanary.kind"] for violation in watched.violations} == {"transfer"}
    assert {violation.attributes["kvcanary.cause"] for violation in watched.violations} == {"stray_write"}
    (layer,) = {violation.attributes["kvcanary.layer"] for violation in watched.violations}
    assert f"layers.{LAYERS - 1}." in layer


def test_what_an_unknown_connector_brings_is_taken_as_it_comes_and_that_is_said(engine: Engine) -> None:
    # It makes up the K/V of all but the last token of a prompt.
    options = {
        "enable_prefix_caching": False,
        "kv_transfer_config": {"kv_connector": "DecodeBenchConnector", "kv_role": "kv_both"},
    }

    watched = engine.watch(**options, environment={"KVCANARY_CONTENT": "full"}, until=checked("content", 1))

    assert "error" not in watched.result
    assert watched.violations == []
    assert "not covering KV connector DecodeBenchConnector of vllm: what it brings is not compared" in watched.output
