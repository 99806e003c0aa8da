"""Adapters that are wrong, and pools that do what pools should not: a clear line, and the server answers as before."""

from __future__ import annotations

import pytest

from tests.adapters.conftest import STAND_INS, StandIns, answers


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            '"self.keys[*]"',
            '"self.keyz[*]"',
            "kvcanary: not covering the pool of KVCache of layered: switched off after PathError: 'self.keyz[*]'",
        ),
        ('"self.keys[*]"', '"self.unused"', "LayoutError: k[0] is a int, wanted a tensor"),
        (
            '"blocks heads tokens dim"',
            '"blocks tokens dim"',
            "LayoutError: k[0] has shape (16, 2, 4, 8), which is 4 axes, but 3 are named: blocks tokens dim",
        ),
        (
            '"blocks heads tokens dim"',
            '"blocks tokens heads dim"\nblock_size = 4',
            "LayoutError: layers.0.k has 2 tokens in a block, but block_size is 4",
        ),
        ("null_block = 0", "null_block = 99", "null_block 99 is outside its 16 blocks"),
        ("null_block = 0", 'block_size = "self.keys"', "[pool] block_size is a list, "),
        (
            'class = "KVCache"',
            'class = "KVCaches"',
            "not covering layered.KVCaches of layered: layered was to define a class KVCaches, which is not there",
        ),
        (
            '"KVCache.take"',
            '"KVCache.taek"',
            "not covering layered.KVCache of layered: [[event]] 1 hooks KVCache.taek, but there is no such method",
        ),
        (
            '"args.blocks"',
            '"args.block"',
            "[[event]] 2 asks for the argument 'block', but KVCache.give_back takes (blocks)",
        ),
        (
            '"args.batch.tables"',
            '"args.batch.table"',
            "PathError: [[step]]: 'args.batch.table': Batch has no attribute 'table'; did you mean tables?",
        ),
        (
            '"args.batch.tables"',
            '"args.batch.tables[0][0]"',
            "not covering pool kv of layered: switched off after StepError: [[step]]: block_table has shape (), ",
        ),
        (
            'blocks = "args.blocks"',
            "blocks = 99",
            "ValueError: [[event]] 2: blocks: 99 is no block of the pool",
        ),
        (
            '"args.batch.counts"',
            '"args.batch.names"',
            "StepError: [[step]]: query_lens is a list that is no tensor of integers: ",
        ),
        ('query_lens = "args.batch.counts"', "query_lens = 7", "StepError: [[step]]: query_lens add up to 21"),
    ],
)
def test_a_wrong_table_is_named_and_the_server_unharmed(stand_ins: StandIns, old: str, new: str, said: str) -> None:
    result = stand_ins.serve("layered", adapter=stand_ins.adapter("layered.toml", (old, new)), KVCANARY_MODE="raise")
    assert answers(result) == answers(stand_ins.serve("layered"))
    assert said in result.stderr
    assert "violation" not in result.stderr


SERVED = """
def serve(engine, name):
    engine.add(name, [1, 2, 3, 4, 5], 4)
    while engine.running:
        engine.step()
"""


def lines(stand_ins: StandIns, script: str, adapter: str = "layered.toml", **environ: str) -> tuple[str, list[str]]:
    environ = {"KVCANARY_MODE": "raise", "KVCANARY_CONTENT": "full", **environ}
    result = stand_ins.script(SERVED + script, STAND_INS / adapter, **environ)
    assert result.returncode == 0, result.stderr
    return result.stdout, result.stderr.splitlines()


def test_buffers_that_are_allocated_anew_are_watched_where_they_are(stand_ins: StandIns) -> None:
    printed, said = lines(
        stand_ins,
        """
import layered
engine = layered.Engine(4)
request = engine.add("a", [1, 2, 3, 4, 5], 12)
engine.step()
engine.cache.grow()
for _ in range(4):
    engine.step()
engine.cache.keys[0][request.blocks[-1], 0, 0, 0] += 1
try:
    engine.step()
except RuntimeError as error:
    print({str(violation.kind) for violation in error.violations})
""",
    )
    assert printed == "{'content'}\n"
    assert [line for line in said if "watching" in line] == [
        "kvcanary: watching pool kv of layered: 2 layers, 16 slots, mode raise, content full",
        "kvcanary: watching pool kv of layered: 2 layers, 32 slots, mode raise, content full",
    ]


def test_buffers_that_move_at_every_step_are_named_as_not_covered(stand_ins: StandIns) -> None:
    printed, said = lines(
        stand_ins,
        """
import layered
engine = layered.Engine()
engine.add("a", [1, 2, 3, 4, 5], 8)
while engine.running:
    engine.step()
    engine.cache.keys = [tensor.clone() for tensor in engine.cache.keys]
print("served")
""",
    )
    assert printed == "served\n"
    assert any("not covering pool kv of layered: switched off after BuffersMove: " in line for line in said)
    assert not any("violation" in line for line in said)


def test_a_pool_that_is_freed_and_built_anew_is_watched_again_and_its_memory_let_go(stand_ins: StandIns) -> None:
    printed, said = lines(
        stand_ins,
        """
import layered, weakref
for number in range(3):
    engine = layered.Engine()
    serve(engine, f"request {number}")
    first = weakref.ref(engine.cache.keys[0])
    engine.cache.release()
    print(first() is None)
    engine.cache.__init__(16)
    serve(engine, f"request {number}, again")
""",
    )
    assert printed == "True\nTrue\nTrue\n"
    # A new one is built before the old one is dropped, so that it is named kv-2.
    assert len([line for line in said if "watching pool kv" in line]) == 6
    assert not [line for line in said if "watching" not in line]


TWO = """
import layered
engines = [layered.Engine(), layered.Engine()]
for number, engine in enumerate(engines):
    serve(engine, f"request {number}")
print("served")
"""


def test_two_pools_of_one_class_need_the_names_of_who_uses_them(stand_ins: StandIns) -> None:
    printed, said = lines(stand_ins, TWO)
    assert printed == "served\n"
    assert (
        "kvcanary: not covering Model.forward of layered: this Model could act on any of several pools: "
        "name the objects that use a pool (used_by)" in said
    )
    assert not any("violation" in line for line in said)


def test_two_pools_whose_users_are_named_are_both_watched(stand_ins: StandIns) -> None:
    table = stand_ins.adapter(
        "layered.toml",
        ('class = "KVCache"', 'class = "Engine"\nused_by = ["self.model", "self.cache"]'),
        ('closed_by = "release"\n', ""),
        ('"self.keys[*]"', '"self.cache.keys[*]"'),
        ('"self.values[*]"', '"self.cache.values[*]"'),
    )
    result = stand_ins.script(SERVED + TWO, table, KVCANARY_MODE="raise", KVCANARY_CONTENT="full")
    assert (result.returncode, result.stdout) == (0, "served\n"), result.stderr
    assert [line.partition(":")[2].strip()[:24] for line in result.stderr.splitlines()] == [
        "watching pool kv of laye",
        "watching pool kv-2 of la",
    ]
    request = "request = engines[1].add('late', [1, 2, 3, 4, 5], 3)\nengines[1].step()\n"
    broken = TWO + request + "engines[1].cache.keys[0][request.blocks[0]] += 1\nengines[1].step()\n"
    result = stand_ins.script(SERVED + broken, table, KVCANARY_CONTENT="full")
    assert "content violation in layered pool kv-2" in result.stderr


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            "keys[:] = values[:] = [tensor.to('meta') for tensor in keys]",
            "is on the meta device: it has no bytes",
        ),
        ("keys[1] = keys[1].to('meta')", "is on meta, the first part on cpu"),
        ("keys[1] = keys[1][:, :, :2]", "view has shape (16, 2, 2, 8), wanted [num_blocks, block_size=4, ...]"),
        ("keys[1] = keys[1][:8]", "8 blocks, but 16 in the first part"),
        ("keys[1] = None", "k[1] is a NoneType, wanted a tensor"),
        ("keys[1] = keys[1][0].expand(16, 2, 4, 8)", "is an expanded view (stride 0): slots share their bytes"),
    ],
)
def test_a_pool_that_cannot_be_watched_is_named_with_the_reason(stand_ins: StandIns, change: str, reason: str) -> None:
    stand_ins.processes.write(
        "spoilt.py",
        f"""
import torch
class KVCache:
    def __init__(self):
        keys, values = ([torch.zeros(16, 2, 4, 8) for _ in range(2)] for _ in range(2))
        {change}
        self.keys, self.values = keys, values
class Model:
    def forward(self, batch): pass
""",
    )
    table = stand_ins.processes.write(
        "spoilt.toml",
        """
engine = "spoilt"
module = "spoilt"
[pool]
class = "KVCache"
keys = "self.keys"
values = "self.values"
layout = "blocks heads tokens dim"
[step]
method = "Model.forward"
requests = "args.batch"
block_table = "args.batch"
token_ids = "args.batch"
""",
    )
    result = stand_ins.script("import spoilt\nspoilt.KVCache()\nprint('served')", table)
    assert (result.returncode, result.stdout) == (0, "served\n")
    assert f"{reason}" in result.stderr
    assert result.stderr.startswith("kvcanary: not covering ")


@pytest.mark.parametrize("keep", [True, False])
def test_a_pool_that_could_not_be_watched_is_in_the_way_of_another_only_while_it_lives(
    stand_ins: StandIns, keep: bool
) -> None:
    trial = "trial = layered.KVCache(16, device='meta')\n" + ("" if keep else "del trial\n")
    printed, said = lines(stand_ins, f"import layered\n{trial}serve(layered.Engine(), 'a')\nprint('served')\n")
    assert printed == "served\n"
    assert any("is on the meta device" in line for line in said)
    assert any("could act on any of several pools" in line for line in said) == keep
    assert any("watching pool kv of layered" in line for line in said)
