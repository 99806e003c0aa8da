"""Other releases: those that the adapter knows run under the agent, and of the others it says what is not covered."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest

from kvcanary_agent.adapters.transformers import generation, paged_events, paged_runner
from kvcanary_agent.runtime import unexpected_methods
from tests.engines.transformers.harness import MAX_TOKENS, PROMPTS, Engine
from tests.engines.transformers.releases import unpacked

FOUR = PROMPTS[:4]
_BATCHING = "generation/continuous_batching"


@pytest.mark.parametrize("version", ["5.18.0", "5.22.2"])
def test_a_release_that_is_known_runs_under_the_agent(engine: Engine, version: str) -> None:
    environment = {"KVCANARY_CONTENT": "full", "PYTHONPATH": str(unpacked(version))}
    with engine.session(agent=True, environment=environment) as session:
        for model in ("llama", "gemma3_hybrid"):
            batch: dict[str, Any] = {
                "do": "batch",
                "model": model,
                "prompts": FOUR,
                "max_tokens": MAX_TOKENS,
                "options": {},
            }
            assert len(session.do(batch)) == len(FOUR)
            generate = {**batch, "do": "generate", "options": {"do_sample": False, "num_beams": 3}}
            assert len(session.do(generate)) == len(FOUR)

        session.wait_for(lambda receiver: session.checked("content", "kv") > 5000)
        session.wait_for(lambda receiver: session.checked("content", "generate") > 5000)
        session.wait_for(lambda receiver: session.checked("token", "generate") > 500)
        assert session.violations == []
        versions = session.receiver.points_of("kvcanary.checks")
        assert {point.resource["kvcanary.engine.version"] for point in versions} == {version}


def stand_in(release: Path, file: str, name: str) -> type:
    """A class with the methods of one of a release, and their parameters, and nothing in them."""
    tree = ast.parse((release / "transformers" / file).read_text())
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)

    def method(node: ast.FunctionDef) -> Any:
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD

        def empty(self: object) -> None: ...

        signature = inspect.Signature([inspect.Parameter(argument.arg, kind) for argument in node.args.args])
        empty.__signature__ = signature  # type: ignore[attr-defined]
        return empty

    return type(name, (), {node.name: method(node) for node in found.body if isinstance(node, ast.FunctionDef)})


@pytest.mark.parametrize("version", ["5.18.0", "5.20.2", "5.22.2", "5.24.0"])
def test_a_release_that_is_known_has_what_is_patched(version: str) -> None:
    release = unpacked(version)

    problems = [
        unexpected_methods(stand_in(release, "cache_utils.py", "Cache"), generation.CACHE),
        unexpected_methods(stand_in(release, f"{_BATCHING}/cache.py", "PagedAttentionCache"), paged_runner.CACHE),
        unexpected_methods(stand_in(release, f"{_BATCHING}/model_runner.py", "ModelRunner"), paged_runner.RUNNER),
        *(
            unexpected_methods(stand_in(release, f"{_BATCHING}/{file}.py", name), paged_events.EVENTS[name][0])
            for file, name in (
                ("cache_allocators/cache_allocator", "CacheAllocator"),
                ("cache_allocators/full_attention", "FullAttentionCacheAllocator"),
                ("offloading_manager", "OffloadingManager"),
            )
        ),
    ]
    assert problems == [None] * 6


@pytest.mark.parametrize(
    ("version", "problem"),
    [
        ("5.0.0", "Cache.crop takes (max_length), wanted (tokens_to_remove, ...)"),
        ("5.16.1", None),
        ("5.17.0", None),
    ],
)
def test_of_an_older_release_the_caches_of_generate_are_told_by_their_methods(
    version: str, problem: str | None
) -> None:
    cache = stand_in(unpacked(version), "cache_utils.py", "Cache")

    assert unexpected_methods(cache, generation.CACHE) == problem


@pytest.mark.parametrize("version", ["5.0.0", "5.12.1", "5.17.0"])
def test_of_an_older_release_continuous_batching_is_refused(version: str) -> None:
    release = unpacked(version)

    allocator = stand_in(release, f"{_BATCHING}/cache_manager.py", "CacheAllocator")

    assert unexpected_methods(allocator, paged_events.EVENTS["CacheAllocator"][0]) is not None
