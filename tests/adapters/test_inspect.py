"""``kvcanary-agent inspect``: what it proposes is what an engineer would write, with ? for what it cannot tell."""

from __future__ import annotations

import pytest

from kvcanary_agent.adapters.declared.declaration import Declaration, DeclarationError
from kvcanary_agent.adapters.declared.toml_file import tables_of
from kvcanary_agent.inspecting.buffers import axis_of
from tests.activation.processes import ROOT
from tests.adapters.conftest import STAND_INS, StandIns


def proposed(stand_ins: StandIns, name: str) -> str:
    result = stand_ins.processes.launch("inspect", name, PYTHONPATH=f"{ROOT}:{STAND_INS}")
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


@pytest.mark.parametrize(
    ("name", "buffers", "layout"),
    [
        ("nano:ModelRunner", {"kv": "self.kv_cache"}, "kv layers blocks tokens heads dim"),
        ("layered:KVCache", {"keys": "self.keys[*]", "values": "self.values[*]"}, "blocks heads tokens dim"),
        ("contiguous:Cache", {"keys": "self.k", "values": "self.v"}, "layers requests heads tokens dim"),
        ("kvcanary_agent.demo.kv_pool:KVPool", {"kv": "self.data"}, "layers kv blocks tokens heads dim"),
    ],
)
def test_the_buffers_and_axes_of_a_class_are_read_from_its_source(
    stand_ins: StandIns, name: str, buffers: dict[str, str], layout: str
) -> None:
    pool = tables_of(proposed(stand_ins, name))["pool"]
    assert {key: pool[key] for key in buffers} == buffers
    assert pool["layout"] == layout


def test_a_class_of_whose_pool_the_writes_are_known_is_proposed_ready_for_use(stand_ins: StandIns) -> None:
    table = proposed(stand_ins, "kvcanary_agent.demo.kv_pool:KVPool")
    declared = Declaration.parse(tables_of(table))
    assert [write.place.method for write in declared.writes] == ["write"]
    assert set(declared.writes[0].values) == {"slots", "layer"}


def test_what_could_not_be_told_has_to_be_filled_in(stand_ins: StandIns) -> None:
    table = proposed(stand_ins, "layered:KVCache")
    assert 'requests = "args.batch.?"' in table
    with pytest.raises(DeclarationError, match=r"\[\[step\]\] requests: 'args.batch.\?': '.\?' is no step"):
        Declaration.parse(tables_of(table))


def test_a_live_object_tells_its_axes_by_their_sizes(stand_ins: StandIns) -> None:
    stand_ins.processes.write(
        "theirs/their_engine.py",
        """
import torch
class Config:
    num_layers, num_blocks, block_size, num_heads, head_dim = 3, 10, 16, 4, 32
class Pool:
    def __init__(self, config):
        self.config, self.num_layers = config, config.num_layers
        self.num_blocks, self.block_size = config.num_blocks, config.block_size
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        order = [self.num_layers, self.num_blocks, self.num_heads, self.block_size, self.head_dim]
        self.storage = {}
        for name in ("key", "value"):
            setattr(self, f"{name}_cache", torch.zeros(order))
pool = Pool(Config)
""",
    )
    result = stand_ins.processes.launch(
        "inspect", "their_engine:pool", PYTHONPATH=f"{ROOT}:{stand_ins.folder / 'theirs'}"
    )
    pool = tables_of(result.stdout)["pool"]
    assert (pool["keys"], pool["values"]) == ("self.key_cache", "self.value_cache")
    assert pool["layout"] == "layers blocks heads tokens dim"


@pytest.mark.parametrize(
    ("name", "status", "said"),
    [
        ("layered", 2, "'layered' is not of the form MODULE:NAME"),
        ("no_such_engine:Pool", 1, "No module named 'no_such_engine'"),
        ("layered:Pool", 1, "has no attribute 'Pool'"),
        ("layered:Request", 1, "layered.Request has no attribute that looks like a pool's buffers"),
    ],
)
def test_what_cannot_be_inspected_is_one_line(stand_ins: StandIns, name: str, status: int, said: str) -> None:
    result = stand_ins.processes.launch("inspect", name, PYTHONPATH=f"{ROOT}:{STAND_INS}")
    assert (result.returncode, result.stdout) == (status, "")
    assert said in result.stderr


@pytest.mark.parametrize(
    ("name", "axis"),
    [
        ("self.num_kv_heads", "heads"),
        ("config.head_dim", "dim"),
        ("head_size", "dim"),
        ("num_blocks", "blocks"),
        ("n_pages", "blocks"),
        ("page_size", "tokens"),
        ("max_seq_len", "tokens"),
        ("max_batch_size", "requests"),
        ("num_slots", "slots"),
        ("xyz", "?"),
    ],
)
def test_names_of_sizes_tell_their_axis(name: str, axis: str) -> None:
    assert axis_of(name) == axis
