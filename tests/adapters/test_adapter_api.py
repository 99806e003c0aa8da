"""The public Adapter API: the ways in, and what is said of an adapter that does not fit its engine."""

from __future__ import annotations

import pytest

from kvcanary_agent import adapter as kv
from tests.activation.processes import ROOT, TEMPLATE
from tests.adapters.conftest import StandIns

ENGINE = """
import torch

class Engine:
    def __init__(self):
        self.k, self.v = torch.zeros(2, 4, 8, 16)

    def forward(self, names, tables, tokens, starts):
        for table, token, start in zip(tables, tokens.tolist(), starts):
            self.k[table[start // 8], start % 8] = self.v[table[start // 8], start % 8] = token + 1

def serve():
    engine = Engine()
    for step in range(4):
        engine.forward(["a"], [[2]], torch.tensor([5 + step]), [step])
    engine.k[2, 0, 0] += 1
    engine.forward(["a"], [[2]], torch.tensor([9]), [4])
    print("served")
"""

ADAPTER = """
from kvcanary_agent import adapter as kv

class MyAdapter(kv.Adapter):
    engine = "mine"
    module = "my_engine"

    @kv.opens("Engine.__init__")
    def layout(self, engine):
        return kv.layout(self.engine, k=engine.k, v=engine.v, axes="blocks tokens dim")

    @kv.forward("Engine.forward")
    def step(self, pool, engine, names, tables, tokens, starts):
        return kv.step(pool, requests=names, block_table=tables, token_ids=tokens, prefix_lens=starts)
"""

SEEN = "kvcanary: content violation in mine pool kv: block 2, slot 16"


@pytest.fixture
def engine(stand_ins: StandIns) -> StandIns:
    """A folder on the search path, but not the working directory, that holds ``my_engine``."""
    stand_ins.processes.write("packages/my_engine.py", ENGINE)
    return stand_ins


def serve(engine: StandIns, program: str = "import my_engine; my_engine.serve()", **environ: str) -> str:
    """What it says on standard error."""
    search = f"{TEMPLATE}:{ROOT}:{engine.folder / 'packages'}"
    result = engine.processes.door("-c", program, PYTHONPATH=search, KVCANARY_CONTENT="full", **environ)
    assert (result.returncode, result.stdout) == (0, "served\n"), result.stderr
    return result.stderr


def test_an_adapter_is_loaded_from_a_file(engine: StandIns) -> None:
    engine.processes.write("adapter.py", ADAPTER)
    assert SEEN in serve(engine, KVCANARY_ADAPTERS="./adapter.py")


def test_an_adapter_is_loaded_by_the_name_of_its_class(engine: StandIns) -> None:
    engine.processes.write("packages/my_adapters.py", ADAPTER)
    assert SEEN in serve(engine, KVCANARY_ADAPTERS="my_adapters:MyAdapter")


def entry_point(engine: StandIns, folder: str) -> None:
    engine.processes.write(
        f"{folder}/my_engine-1.0.dist-info/entry_points.txt",
        "[console_scripts]\nmine = my_engine:serve\n\n[kvcanary_agent.adapters]\nmy_engine = my_adapters:MyAdapter\n",
    )


def test_an_adapter_is_found_by_its_entry_point(engine: StandIns) -> None:
    engine.processes.write("packages/my_adapters.py", ADAPTER)
    assert "watching" not in serve(engine)
    entry_point(engine, "packages")
    assert SEEN in serve(engine)
    assert "watching" not in serve(engine, KVCANARY_ADAPTERS="vllm")


def test_an_entry_point_is_found_by_an_agent_that_is_installed_after_the_engine(engine: StandIns) -> None:
    engine.processes.write("packages/my_adapters.py", ADAPTER)
    entry_point(engine, "packages")
    program = "import my_engine, kvcanary_agent; kvcanary_agent.install(); my_engine.serve()"
    assert SEEN in serve(engine, program, KVCANARY_ENABLED="0")


def test_no_entry_point_of_the_working_directory_is_read(engine: StandIns) -> None:
    engine.processes.write("my_adapters.py", "print('imported')\n")
    entry_point(engine, ".")
    program = f"import sys; sys.path.append({str(engine.folder)!r}); import my_engine; my_engine.serve()"
    assert serve(engine, program) == ""


def test_a_process_that_imports_nothing_but_python_reads_no_entry_points(engine: StandIns) -> None:
    entry_point(engine, "packages")
    look = "import sys, json; f = sys.meta_path[0]; print('served' if 'my_engine' not in f._targets else 'read')"
    serve(engine, look)


@pytest.mark.parametrize("installed", ["before", "after"])
def test_an_adapter_in_the_engines_own_code_registers_itself(engine: StandIns, installed: str) -> None:
    own = ADAPTER.replace('"my_engine"', "__name__").replace("class MyAdapter", "@kv.register\nclass MyAdapter")
    engine.processes.write("packages/my_engine.py", ENGINE + own)
    if installed == "before":
        assert SEEN in serve(engine)
    else:
        program = "import my_engine, kvcanary_agent; kvcanary_agent.install(); my_engine.serve()"
        assert SEEN in serve(engine, program, KVCANARY_ENABLED="0")


def test_a_registered_adapter_does_nothing_where_the_agent_is_off(engine: StandIns) -> None:
    own = ADAPTER.replace('"my_engine"', "__name__").replace("class MyAdapter", "@kv.register\nclass MyAdapter")
    engine.processes.write("packages/my_engine.py", ENGINE + own)
    assert serve(engine, KVCANARY_ENABLED="0") == ""


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('engine = "mine"', "", "cannot be loaded: HookError: MyAdapter has no engine; add engine = "),
        ('module = "my_engine"', "", "MyAdapter.layout: in which module is Engine? Add module = "),
        ('@kv.opens("Engine.__init__")', "", "MyAdapter opens no pool; decorate the method that describes it"),
        ('"Engine.forward"', '"forward"', "'forward' is neither 'Class.method' nor 'module:Class.method'"),
        ('"Engine.forward"', '"Engine.run"', "MyAdapter.step hooks Engine.run, but there is no such method"),
        ('"Engine.forward"', '"Engines.forward"', "my_engine was to define a class Engines, which is not there"),
        (
            "names, tables, tokens, starts):",
            "ids, tables, tokens, starts, names=()):",
            "MyAdapter.step asks for the argument 'ids', but Engine.forward takes (names, tables, tokens, starts)",
        ),
        (
            "names, tables, tokens, starts):",
            "names, tables, tokens, starts):\n        1 / 0",
            "not covering pool kv of mine: switched off after ZeroDivisionError",
        ),
    ],
)
def test_an_adapter_that_does_not_fit_says_what_is_missing_and_where(
    engine: StandIns, old: str, new: str, said: str
) -> None:
    assert old in ADAPTER
    engine.processes.write("adapter.py", ADAPTER.replace(old, new))
    heard = serve(engine, KVCANARY_ADAPTERS="./adapter.py")
    assert said in heard
    assert "violation" not in heard


def test_a_pool_is_not_watched_while_a_module_that_acts_on_it_is_not_patched(engine: StandIns) -> None:
    hook = '    @kv.after("my_scheduler:Scheduler.free")\n    def freed(self, pool, scheduler): pass\n'
    engine.processes.write("adapter.py", ADAPTER + hook)
    heard = serve(engine, KVCANARY_ADAPTERS="./adapter.py")
    assert "my_scheduler.Scheduler.free is not patched, so that its calls would be missed" in heard
    assert "watching" not in heard


def test_arguments_are_found_by_name_however_they_are_given(engine: StandIns) -> None:
    engine.processes.write("adapter.py", ADAPTER)
    calls = ENGINE.replace('engine.forward(["a"], [[2]], torch', 'engine.forward(["a"], tables=[[2]], tokens=torch')
    calls = calls.replace(", [step])", ", starts=[step])").replace(", [4])", ", starts=[4])")
    engine.processes.write("packages/my_engine.py", calls)
    assert SEEN in serve(engine, KVCANARY_ADAPTERS="./adapter.py")


def test_a_hook_on_an_object_that_cannot_be_followed_says_so(engine: StandIns) -> None:
    slots = ENGINE.replace("class Engine:", "class Engine:\n    __slots__ = ('k', 'v')")
    engine.processes.write("packages/my_engine.py", slots)
    engine.processes.write("adapter.py", ADAPTER)
    heard = serve(engine, KVCANARY_ADAPTERS="./adapter.py")
    assert "Engine has __slots__ without __weakref__, so that the agent cannot follow it" in heard


def test_importing_the_api_imports_no_torch(engine: StandIns) -> None:
    engine.processes.write("adapter.py", ADAPTER)
    look = "import sys; print('served' if 'torch' not in sys.modules else 'torch')"
    assert serve(engine, look, KVCANARY_ADAPTERS="./adapter.py") == ""


def test_the_api_names_what_it_offers() -> None:
    for name in kv.__all__:
        assert getattr(kv, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = kv.nothing
