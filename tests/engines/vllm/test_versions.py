"""What the adapter relies on is there in every release that it claims, and what it does not know it refuses."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcanary_agent.adapters.vllm import model_runner, v2_model_runner
from kvcanary_agent.adapters.vllm.pool import NotCovered
from kvcanary_agent.adapters.vllm.versions import V1, V2, Minor, refuse_unknown_version
from kvcanary_agent.runtime import unexpected_methods
from tests.engines.vllm.harness import READ_AT_LEAST, Engine, checked
from tests.engines.vllm.releases import runnable, source_of

RELEASES: dict[Minor, str] = {
    (0, 10): "0.10.0",
    (0, 16): "0.16.0",
    (0, 22): "0.22.1",
    (0, 24): "0.24.0",
    (0, 26): "0.26.0",
    (0, 28): "0.28.0",
    (0, 30): "0.30.0",
    (0, 32): "0.32.0",
    (0, 33): "0.33.0",
}

# What a step is described from, besides the methods that are patched: file, class and the names it has to have.
V1_READS = {
    ("v1/worker/gpu_model_runner.py", "GPUModelRunner"): {
        *("compilation_config", "device", "dtype", "enable_prompt_embeds", "input_batch", "input_ids"),
        *("kv_cache_config", "lora_config", "max_num_reqs", "num_computed_tokens", "positions", "query_start_loc"),
        *("requests", "use_async_scheduling", "vllm_config"),
    },
    ("v1/worker/gpu_input_batch.py", "InputBatch"): {
        *("block_table", "num_computed_tokens_cpu", "num_reqs", "num_tokens_no_spec_cpu_tensor", "req_ids"),
        "token_ids_cpu_tensor",
    },
    ("v1/worker/block_table.py", "BlockTable"): {"block_table", "dcp_world_size", "pcp_world_size", "slot_mapping"},
}
V2_READS = {
    ("v1/worker/gpu/model_runner.py", "GPUModelRunner"): {
        *("block_tables", "compilation_config", "dtype", "is_last_pp_rank", "kv_cache_config", "lora_config"),
        *("lora_state", "model_state", "req_states", "speculator", "vllm_config"),
    },
    ("v1/worker/gpu/states.py", "RequestState"): {"all_token_ids", "num_computed_tokens", "total_len"},
    ("v1/worker/gpu/input_batch.py", "InputBatch"): {
        *("idx_mapping", "input_ids", "num_reqs", "num_tokens", "num_tokens_after_padding", "positions"),
        *("query_start_loc", "req_ids"),
    },
    ("v1/worker/gpu/lora_utils.py", "LoraState"): {"lora_requests"},
}
BOTH_READ = {
    ("v1/core/sched/output.py", "SchedulerOutput"): {
        *("finished_req_ids", "scheduled_cached_reqs", "scheduled_new_reqs", "total_num_scheduled_tokens"),
    },
    ("v1/core/sched/output.py", "NewRequestData"): {"block_ids", "num_computed_tokens", "prompt_token_ids", "req_id"},
    ("v1/core/sched/output.py", "CachedRequestData"): {
        *("new_block_ids", "num_computed_tokens", "req_ids", "resumed_req_ids"),
    },
    ("v1/kv_cache_interface.py", "KVCacheConfig"): {"kv_cache_groups", "num_blocks"},
}


def class_of(release: Path, file: str, name: str) -> ast.ClassDef:
    tree = ast.parse((release / "vllm" / file).read_text())
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return found


def names_of(found: ast.ClassDef) -> Iterator[str]:
    """Everything that instances have: methods, fields, and what their methods set on them."""
    for node in ast.walk(found):
        if isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def stand_in(found: ast.ClassDef) -> type:
    """A class with the methods of ``found`` and their parameters, and nothing in them."""

    def method(node: ast.FunctionDef) -> Any:
        arguments = node.args
        kinds = inspect.Parameter
        parameters = [
            kinds(argument.arg, kinds.POSITIONAL_OR_KEYWORD) for argument in [*arguments.posonlyargs, *arguments.args]
        ]

        def empty(self: object) -> None: ...

        empty.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return empty

    return type(found.name, (), {node.name: method(node) for node in found.body if isinstance(node, ast.FunctionDef)})


def missing(release: Path, wanted: dict[tuple[str, str], set[str]]) -> set[str]:
    return {
        f"{name}.{attribute}"
        for (file, name), attributes in wanted.items()
        for attribute in attributes - set(names_of(class_of(release, file, name)))
    }


@pytest.mark.parametrize("minor", [minor for minor in RELEASES if minor in V1])
def test_a_covered_release_has_what_v1_steps_are_described_from(minor: Minor) -> None:
    release = source_of(RELEASES[minor])

    runner = stand_in(class_of(release, "v1/worker/gpu_model_runner.py", "GPUModelRunner"))
    assert unexpected_methods(runner, model_runner.PATCH_POINTS) is None
    assert missing(release, {**V1_READS, **BOTH_READ}) == set()


@pytest.mark.parametrize("minor", [minor for minor in RELEASES if minor in V2])
def test_a_covered_release_has_what_v2_steps_are_described_from(minor: Minor) -> None:
    release = source_of(RELEASES[minor])

    runner = stand_in(class_of(release, "v1/worker/gpu/model_runner.py", "GPUModelRunner"))
    assert unexpected_methods(runner, v2_model_runner.PATCH_POINTS) is None
    assert missing(release, {**V2_READS, **BOTH_READ}) == set()


@pytest.mark.parametrize(
    ("minor", "problem"),
    [
        pytest.param((0, 10), "GPUModelRunner._prepare_inputs takes (scheduler_output), wanted", id="0.10"),
        pytest.param((0, 16), "GPUModelRunner has no method shutdown", id="0.16"),
        pytest.param((0, 22), None, id="0.22"),
    ],
)
def test_an_older_release_is_refused_by_its_methods_or_by_its_version(minor: Minor, problem: str | None) -> None:
    release = RELEASES[minor]
    runner = stand_in(class_of(source_of(release), "v1/worker/gpu_model_runner.py", "GPUModelRunner"))

    found = unexpected_methods(runner, model_runner.PATCH_POINTS)

    assert (found is None) if problem is None else (found is not None and problem in found)
    with pytest.raises(NotCovered, match=rf"vllm {release}: .* knows that of vllm 0\.24 to 0\.33; install one of"):
        refuse_unknown_version(release, "V1 model runner", V1)


@pytest.mark.parametrize("version", ["0.34.0", "0.34.0rc1.dev3+g1234", "1.0.0"])
def test_a_newer_release_is_refused_with_what_to_do(version: str) -> None:
    with pytest.raises(NotCovered, match=r"or a kvcanary-agent that knows this version"):
        refuse_unknown_version(version, "V2 model runner", V2)


@pytest.mark.parametrize("version", ["", "dev"])
def test_a_build_without_a_version_is_refused(version: str) -> None:
    with pytest.raises(NotCovered, match="V2 model runner of vllm"):
        refuse_unknown_version(version, "V2 model runner", V2)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu", "0.32.1", "0.32.0rc2.dev7+gabc"])
def test_every_build_of_a_known_minor_version_is_taken(version: str) -> None:
    refuse_unknown_version(version, "V1 model runner", V1)
    refuse_unknown_version(version, "V2 model runner", V2)


@pytest.mark.parametrize(("generation", "release"), [("V1", "0.27.1"), ("V2", "0.28.0")])
def test_the_oldest_release_that_runs_here_is_checked_without_a_false_report(
    engine: Engine, llama_without_agent: dict[str, Any], generation: str, release: str
) -> None:
    run = engine.watch(
        v2=generation == "V2",
        environment={"PYTHONPATH": str(runnable(release)), "KVCANARY_CONTENT": "full"},
        until=checked("content", 2 * READ_AT_LEAST),
    )

    assert f"of vllm {release}" in run.output
    assert run.result == llama_without_agent
    assert run.violations == []
