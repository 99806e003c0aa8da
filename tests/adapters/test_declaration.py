"""A table that is wrong is an error of `run`, and one warning in a process that cannot be stopped any more."""

from __future__ import annotations

import pytest

from kvcanary_agent.adapters.declared.declared_adapter import declared_adapter
from tests.activation.processes import ROOT, TEMPLATE
from tests.adapters.conftest import STAND_INS, StandIns, answers


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        ("layered.toml", 'engine = "layered"', "", "the table has no engine"),
        ("layered.toml", 'engine = "layered"', "engine = 7", "engine = 7; it is the name of the engine in reports"),
        (
            "layered.toml",
            'module = "layered"',
            'module = "my engine"',
            "module = 'my engine' is not the name of",
        ),
        ("layered.toml", "[[step]]", "[[steps]]", "the table has no key 'steps'; did you mean step?"),
        ("layered.toml", "closed_by =", "close_by =", "[pool] has no key 'close_by'; did you mean closed_by?"),
        ("layered.toml", '"self.keys[*]"', '"keys[*]"', "[pool] keys: 'keys[*]' starts with none of self, "),
        ("layered.toml", '"self.keys[*]"', "3", "[pool] keys = 3 is no path, such as 'self.keys'"),
        ("layered.toml", "heads tokens", "head tokens", "[pool] layout = 'blocks head tokens dim': 'head' is no axis"),
        ("layered.toml", "null_block = 0", "null_block = -1", "[pool] null_block = -1; accepted is a whole number"),
        ("layered.toml", '"freed"', '"released"', "[[event]] 2 kind = 'released'; accepted are allocated, shared, "),
        ("layered.toml", 'blocks = "result"', "", "[[event]] 1 has no blocks; add the path of it"),
        (
            "layered.toml",
            'blocks = "args.blocks"',
            'blocks = "result"',
            "[[event]] 2 blocks: 'result': there is no",
        ),
        ("layered.toml", '"Model.forward"', '"forward"', "[[step]] method = 'forward' is neither Class.method nor"),
        ("layered.toml", 'requests = "args.batch.names"', "", "[[step]] has no requests; add the path of it"),
        (
            "nano.toml",
            'name = "seqs"',
            'name = "sequences"',
            "nothing is remembered under that name; add",
        ),
        (
            "nano.toml",
            "added = true",
            'when = "before"\nadded = true',
            "[[event]] 2 added compares the list before",
        ),
        ("layered_pool_only.toml", "[[write]]", "[[step]]", "[[step]] has no key 'slots'"),
        ("layered.toml", "[pool]", "[pool", "it is no TOML: "),
    ],
)
def test_a_wrong_table_is_one_line_before_anything_runs(
    stand_ins: StandIns, name: str, old: str, new: str, said: str
) -> None:
    adapter = stand_ins.adapter(name, (old, new))
    result = stand_ins.serve("layered", adapter=adapter)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"kvcanary-agent: KVCANARY_ADAPTERS names {str(adapter)!r}: ")
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


def test_in_a_child_a_wrong_table_is_one_warning(stand_ins: StandIns) -> None:
    adapter = stand_ins.adapter("layered.toml", ("[[step]]", "[[steps]]"))
    result = stand_ins.processes.door("-c", "print('served')", KVCANARY_ADAPTERS=str(adapter))
    assert (result.returncode, result.stdout) == (0, "served\n")
    assert result.stderr.count("\n") == 1
    assert f"the adapter {adapter} of KVCANARY_ADAPTERS cannot be loaded: DeclarationError: the table" in result.stderr


def test_a_table_is_loaded_without_torch(stand_ins: StandIns) -> None:
    look = "import sys; print('torch' in sys.modules, 'layered' in sys.meta_path[0]._targets)"
    adapter = STAND_INS / "layered.toml"
    result = stand_ins.processes.door("-c", look, KVCANARY_ADAPTERS=str(adapter))
    assert (result.stdout, result.stderr) == ("False True\n", "")


def test_a_pyproject_holds_the_table_as_well(stand_ins: StandIns) -> None:
    table = (STAND_INS / "layered.toml").read_text()
    for name in ("pool", "step", "event"):
        table = table.replace(f"[{name}]", f"[tool.kvcanary_agent.{name}]")
    adapter = stand_ins.processes.write("pyproject.toml", f"[tool.kvcanary_agent]\n{table}")
    result = stand_ins.serve("layered", adapter=adapter)
    assert answers(result) == answers(stand_ins.serve("layered"))
    assert "watching pool kv of layered" in result.stderr
    adapter.write_text("[project]\nname = 'mine'\n")
    assert "it has no table [tool.kvcanary_agent]" in stand_ins.serve("layered", adapter=adapter).stderr


def test_a_python_without_a_reader_of_toml_is_told_which_to_install(stand_ins: StandIns) -> None:
    hide = "import sys; sys.modules['tomllib'] = sys.modules['tomli'] = None\n"
    command = f"{hide}import kvcanary_agent; kvcanary_agent.install(); print('served')"
    result = stand_ins.processes.python(
        "-c", command, PYTHONPATH=f"{ROOT}:{TEMPLATE}", KVCANARY_ADAPTERS=str(STAND_INS / "layered.toml")
    )
    assert (result.returncode, result.stdout) == (0, "served\n")
    assert "pip install tomli, or use Python 3.11 or newer" in result.stderr


@pytest.mark.parametrize(
    ("name", "changes", "follows"),
    [
        ("nano.toml", [], (True, False)),
        ("nano.toml", [('shared_tokens = "args.seq.num_cached_tokens"\n', "")], (False, False)),
        ("layered.toml", [], (False, True)),
        ("layered.toml", [('blocks = "args.blocks"', 'blocks = "args.blocks"\ncached = true')], (False, False)),
        ("layered.toml", [('kind = "allocated"', 'kind = "shared"')], (False, False)),
        ("layered_pool_only.toml", [], (False, False)),
    ],
)
def test_who_holds_a_block_is_followed_only_where_the_events_tell_all_of_it(
    stand_ins: StandIns, name: str, changes: list[tuple[str, str]], follows: tuple[bool, bool]
) -> None:
    adapter = declared_adapter(str(stand_ins.adapter(name, *changes)))
    assert (adapter._ownership, adapter._occupancy) == follows
