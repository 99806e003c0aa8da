"""Every way in, in every order, ends with each engine class patched once, and no failure on the way stops a server."""

import itertools
import subprocess
import sys

import pytest

from kvcanary_agent.settings import _PARSERS
from tests.activation.processes import ADAPTER, ENGINE, ROOT, TEMPLATE, Processes

INSTALL = "import kvcanary_agent; kvcanary_agent.install()\n"
UNINSTALL = "import kvcanary_agent; kvcanary_agent.uninstall()\n"
IMPORT = "import stand_in_engine\n"
STEP = "import stand_in_engine\nprint(stand_in_engine.Runner().step(1))\n"


def lines(result: subprocess.CompletedProcess[str]) -> list[str]:
    assert result.stderr == ""
    assert result.returncode == 0
    return result.stdout.splitlines()


def test_through_the_launcher_an_engine_is_patched(stand_in: Processes) -> None:
    assert lines(stand_in.launch("run", "serve.py", KVCANARY_ADAPTERS="./adapter.py")) == ["patched", "around", "2"]


def test_through_the_environment_an_engine_is_patched(stand_in: Processes) -> None:
    assert lines(stand_in.door("serve.py", KVCANARY_ADAPTERS="./adapter.py")) == ["patched", "around", "2"]


@pytest.mark.parametrize("steps", sorted(set(itertools.permutations([INSTALL, IMPORT, INSTALL]))))
@pytest.mark.parametrize("door", [True, False])
def test_installed_in_any_order_and_number_each_class_is_patched_once(
    stand_in: Processes, steps: tuple[str, ...], door: bool
) -> None:
    program = "import sys; sys.path.insert(0, '.')\n" + "".join(steps) + STEP
    environ = {"KVCANARY_ADAPTERS": "./adapter.py"}
    if door:
        printed = lines(stand_in.launch("run", "-c", program, **environ))
    else:
        printed = lines(stand_in.python("-c", program, PYTHONPATH=str(ROOT), **environ))
    assert printed == ["patched", "around", "2"]


def test_an_adapter_that_installs_the_agent_itself_installs_nothing_more(stand_in: Processes) -> None:
    stand_in.write("adapter.py", INSTALL + ADAPTER)
    count = "import sys; print(sum(type(finder).__name__ == 'TargetFinder' for finder in sys.meta_path))\n"
    printed = lines(stand_in.door("-c", STEP + count, KVCANARY_ADAPTERS="./adapter.py"))
    assert printed == ["patched", "around", "2", "1"]


def test_installed_by_sixteen_threads_at_once_there_is_one_hook(stand_in: Processes) -> None:
    program = (
        "import kvcanary_agent, sys, threading; together = threading.Barrier(16)\n"
        "def work(): together.wait(60); kvcanary_agent.install()\n"
        "threads = [threading.Thread(target=work) for _ in range(16)]\n"
        "for thread in threads: thread.start()\n"
        "for thread in threads: thread.join()\n"
        "print(sum(type(finder).__name__ == 'TargetFinder' for finder in sys.meta_path))\n"
    )
    printed = lines(stand_in.python("-c", program + STEP, PYTHONPATH=str(ROOT), KVCANARY_ADAPTERS="./adapter.py"))
    assert printed == ["1", "patched", "around", "2"]


def test_install_works_where_the_environment_does_not_enable_the_agent(stand_in: Processes) -> None:
    environ = {"PYTHONPATH": str(ROOT), "KVCANARY_ENABLED": "0", "KVCANARY_ADAPTERS": "./adapter.py"}
    assert lines(stand_in.python("-c", INSTALL + STEP, **environ)) == ["patched", "around", "2"]


def test_uninstalling_restores_the_function_and_installing_again_patches_it(stand_in: Processes) -> None:
    program = (
        f"{IMPORT}original = stand_in_engine.Base.__dict__['step']\n{INSTALL}{STEP}{UNINSTALL}{STEP}"
        "assert stand_in_engine.Base.__dict__['step'] is original\n"
        f"assert 'step' not in stand_in_engine.Runner.__dict__\n{UNINSTALL}{INSTALL}{STEP}"
    )
    printed = lines(stand_in.python("-c", program, PYTHONPATH=str(ROOT), KVCANARY_ADAPTERS="./adapter.py"))
    assert printed == ["patched", "around", "2", "2", "patched", "around", "2"]


def test_after_uninstalling_a_later_import_is_left_alone(stand_in: Processes) -> None:
    program = f"import sys; before = len(sys.meta_path)\n{UNINSTALL}print(before - len(sys.meta_path))\n{STEP}"
    assert lines(stand_in.door("-c", program, KVCANARY_ADAPTERS="./adapter.py")) == ["1", "2"]


def test_uninstalling_without_having_installed_does_nothing(stand_in: Processes) -> None:
    assert lines(stand_in.python("-c", UNINSTALL + STEP, PYTHONPATH=str(ROOT))) == ["2"]


def test_uninstalling_beneath_another_tools_wrapper_leaves_that_and_says_so(stand_in: Processes) -> None:
    program = (
        f"{STEP}ours = stand_in_engine.Base.step\n"
        "def theirs(self, number): print('theirs'); return ours(self, number)\n"
        f"stand_in_engine.Base.step = theirs\n{UNINSTALL}{STEP}"
    )
    result = stand_in.door("-c", program, KVCANARY_ADAPTERS="./adapter.py")
    assert result.stdout.splitlines() == ["patched", "around", "2", "theirs", "2"]
    assert "stand_in_engine.Base.step was wrapped again by code in <string>" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_reload_patches_the_new_class(stand_in: Processes) -> None:
    program = f"{STEP}import importlib; importlib.reload(stand_in_engine)\n{STEP}"
    printed = lines(stand_in.door("-c", program, KVCANARY_ADAPTERS="./adapter.py"))
    assert printed == ["patched", "around", "2"] * 2


def test_a_module_that_another_thread_is_importing_is_patched_once_it_is_there(stand_in: Processes) -> None:
    stand_in.write("stand_in_engine.py", f"import __main__\n__main__.half_way()\n{ENGINE}")
    program = (
        "import importlib, sys, threading; sys.path.insert(0, '.')\n"
        "begun, finish = threading.Event(), threading.Event()\n"
        "def half_way(): begun.set(); finish.wait(60)\n"
        "def load(): import stand_in_engine\n"
        "thread = threading.Thread(target=load); thread.start(); begun.wait(60)\n"
        # the other thread goes on when install() waits for it, and not before
        "import_module = importlib.import_module\n"
        "def let_go(name): finish.set(); return import_module(name)\n"
        f"importlib.import_module = let_go\n{INSTALL}finish.set(); thread.join()\n{STEP}"
    )
    printed = lines(stand_in.python("-c", program, PYTHONPATH=str(ROOT), KVCANARY_ADAPTERS="./adapter.py"))
    assert printed == ["patched", "around", "2"]


def test_a_target_run_as_the_main_module_has_its_own_loader_and_is_no_engine(stand_in: Processes) -> None:
    stand_in.write("stand_in_engine.py", "print(__name__, type(__loader__).__name__, __spec__.loader is __loader__)\n")
    printed = lines(stand_in.door("-m", "stand_in_engine", KVCANARY_ADAPTERS="./adapter.py"))
    assert printed == ["__main__ SourceFileLoader True"]


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_processes_of_multiprocessing_are_patched(stand_in: Processes, method: str) -> None:
    stand_in.write(
        "pool.py",
        "import multiprocessing\n"
        "def work():\n"
        "    import stand_in_engine\n"
        "    print(stand_in_engine.Runner().step(1), flush=True)\n"
        "if __name__ == '__main__':\n"
        f"    process = multiprocessing.get_context({method!r}).Process(target=work)\n"
        "    process.start(); process.join(); raise SystemExit(process.exitcode)\n",
    )
    assert lines(stand_in.launch("run", "pool.py", KVCANARY_ADAPTERS="./adapter.py")) == ["patched", "around", "2"]


def test_a_python_started_by_another_program_is_patched(stand_in: Processes) -> None:
    command = f"cd / && {sys.executable} {stand_in.folder}/serve.py"
    printed = lines(stand_in.launch("run", "sh", "-c", command, KVCANARY_ADAPTERS="./adapter.py"))
    assert printed == ["patched", "around", "2"]


def test_an_adapter_named_as_module_and_attribute_is_used(stand_in: Processes) -> None:
    stand_in.write(
        "theirs/company/canary.py",
        "class Adapter:\n"
        "    targets = ('stand_in_engine',)\n"
        "    def patch(self, module): print('patched', module.__name__)\n"
        "class Holder:\n"
        "    adapter = Adapter()\n",
    )
    environ = {"PYTHONPATH": f"{TEMPLATE}:{stand_in.folder}/theirs"}
    printed = lines(stand_in.door("serve.py", KVCANARY_ADAPTERS="company.canary:Holder.adapter", **environ))
    assert printed == ["patched stand_in_engine", "2"]


def test_an_adapters_module_is_not_taken_from_the_working_directory(stand_in: Processes) -> None:
    result = stand_in.door("-c", STEP, KVCANARY_ADAPTERS="adapter:patch")
    assert result.stdout == "2\n"
    assert "the adapter adapter:patch of KVCANARY_ADAPTERS cannot be loaded: ModuleNotFoundError" in result.stderr


@pytest.mark.parametrize("name", ["adapter", "pack"])
def test_not_even_when_python_itself_searches_it_first(stand_in: Processes, name: str) -> None:
    stand_in.write("pack/__init__.py", "print('imported')\n")
    program = f"import sys; assert '' in sys.path\n{INSTALL}{STEP}"
    result = stand_in.python("-c", program, PYTHONPATH=str(ROOT), KVCANARY_ADAPTERS=f"{name}:patch")
    assert result.stdout == "2\n"
    assert f"{name} lies in the working directory; name it as a file, ./{name}.py, or install it" in result.stderr


HOSTILE = [
    "trap",
    "trap.py",
    "trap.toml",
    "trap:adapter",
    "../trap.py",
    "%s",
    "__import__('trap')",
    "os:system",
    "a" * 100_000,
    "\n",
]


@pytest.mark.parametrize("variable", [f"KVCANARY_{field.upper()}" for field in _PARSERS])
def test_no_value_of_a_setting_has_a_file_of_the_working_directory_imported(stand_in: Processes, variable: str) -> None:
    for name in ("trap", "kvcanary_agent", "settings", "targets", "logging_trap"):
        stand_in.write(f"{name}.py", "print('imported')\n")
    for value in HOSTILE:
        result = stand_in.door("-c", STEP, **{variable: value})
        assert (result.returncode, result.stdout) == (0, "2\n"), value


@pytest.mark.parametrize(
    ("adapter", "reason"),
    [
        ("raise OSError('no such device')", "cannot be loaded: OSError: no such device"),
        ("raise SystemExit(7)", "cannot be loaded: SystemExit: 7"),
        ("targets = ['stand_in_engine']", "cannot be loaded: TypeError: it has no function patch(module)"),
        ("targets = 'stand_in_engine'\ndef patch(module): pass", "must be an iterable of module names"),
        ("def patch(module): pass", "it has no targets"),
        ("targets = ['stand_in_engine']\ndef patch(module): module.Renamed", "did not patch stand_in_engine"),
        ("targets = ['stand_in_engine']\ndef patch(module): raise SystemExit(7)", "did not patch stand_in_engine"),
    ],
)
def test_an_adapter_that_fails_is_one_warning_and_the_server_goes_on(
    stand_in: Processes, adapter: str, reason: str
) -> None:
    stand_in.write("adapter.py", adapter)
    stand_in.write("second.py", "targets = ['stand_in_engine']\ndef patch(module): print('second')\n")
    result = stand_in.door("serve.py", KVCANARY_ADAPTERS="./adapter.py,./second.py")
    assert (result.returncode, result.stdout) == (0, "second\n2\n")
    assert reason in result.stderr
    assert result.stderr.count("\n") == 1


def test_an_adapter_file_that_does_not_exist_is_one_warning(stand_in: Processes) -> None:
    result = stand_in.door("serve.py", KVCANARY_ADAPTERS="/no/such/adapter.py")
    assert (result.returncode, result.stdout) == (0, "2\n")
    assert "/no/such/adapter.py of KVCANARY_ADAPTERS cannot be loaded: FileNotFoundError" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_wrong_list_of_adapters_is_one_warning_and_the_built_in_ones(stand_in: Processes) -> None:
    program = "import sys; finder = sys.meta_path[0]; print(sorted(finder._targets) == sorted(builtin))"
    look = f"from kvcanary_agent.adapters.targets import BUILTIN as builtin; {program}"
    result = stand_in.door("-c", look, KVCANARY_ADAPTERS="vlm")
    assert (result.returncode, result.stdout) == (0, "True\n")
    assert "KVCANARY_ADAPTERS='vlm'" in result.stderr
    assert result.stderr.count("\n") == 1


def test_built_in_adapters_can_be_restricted_to_some(stand_in: Processes) -> None:
    look = (
        "import sys; from kvcanary_agent.adapters.targets import BUILTIN\n"
        "chosen = [name for name, adapter in BUILTIN.items() if adapter == 'kvcanary_agent.adapters.vllm']\n"
        "print(sorted(sys.meta_path[0]._targets) == sorted(chosen) != [])"
    )
    assert lines(stand_in.door("-c", look, KVCANARY_ADAPTERS="vllm")) == ["True"]
