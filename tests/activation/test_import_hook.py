"""With the finder in place every import has the outcome that it has without, and each target is announced once."""

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.resources
import importlib.util
import pathlib
import pkgutil
import sys
import tempfile
import threading
import types
import zipfile
import zipimport
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcanary_agent import TargetFinder

Announced = list[tuple[str, Any]]


@contextlib.contextmanager
def hooked(*targets: str, on_import: Callable[[str, object], None] | None = None) -> Iterator[Announced]:
    """The finder first on the meta path; yields the (name, module) pairs it announces."""
    announced: Announced = []

    def note(name: str, module: object) -> None:
        announced.append((name, module))
        if on_import is not None:
            on_import(name, module)

    finder = TargetFinder(frozenset(targets), note)
    sys.meta_path.insert(0, finder)
    try:
        yield announced
    finally:
        sys.meta_path.remove(finder)


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """A folder on sys.path. The modules imported from it are forgotten afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(folder: pathlib.Path, name: str, text: str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    importlib.invalidate_caches()


def assert_no_trace(module: Any, loader: type) -> None:
    assert type(module.__loader__) is loader
    assert module.__spec__.loader is module.__loader__


def test_a_target_is_announced_after_it_ran_and_holds_no_trace_of_the_finder(folder: pathlib.Path) -> None:
    write(folder, "target.py", "import sys\nloader_seen = type(__loader__), type(__spec__.loader)\nlast = 1\n")
    with hooked("target", on_import=lambda _, module: setattr(module, "seen", module.last)) as announced:  # type: ignore[attr-defined]  # of that module
        module = importlib.import_module("target")
    assert announced == [("target", module)]
    assert module.seen == 1
    assert module.loader_seen == (importlib.machinery.SourceFileLoader,) * 2
    assert_no_trace(module, importlib.machinery.SourceFileLoader)


def test_only_exact_names_are_announced(folder: pathlib.Path) -> None:
    for name in ("package/__init__.py", "package/target.py", "package/targets.py", "target.py"):
        write(folder, name, "")
    with hooked("package.target") as announced:
        for name in ("package", "target", "package.targets", "package.target"):
            importlib.import_module(name)
    assert [name for name, _ in announced] == ["package.target"]


def test_a_module_that_does_not_exist_is_the_usual_error(folder: pathlib.Path) -> None:
    with hooked("no_such_target") as announced, pytest.raises(ModuleNotFoundError, match="No module named") as caught:
        importlib.import_module("no_such_target")
    assert caught.value.name == "no_such_target"
    assert announced == []


def test_what_a_module_puts_in_its_place_is_announced(folder: pathlib.Path) -> None:
    write(folder, "target.py", "import sys, types\nsys.modules[__name__] = types.SimpleNamespace(real=True)\n")
    with hooked("target") as announced:
        module = importlib.import_module("target")
    assert announced == [("target", module)]
    assert module.real is True


def test_a_reload_is_announced_again(folder: pathlib.Path) -> None:
    write(folder, "target.py", "class Runner: pass\n")
    with hooked("target") as announced:
        module = importlib.import_module("target")
        runner = module.Runner
        assert importlib.reload(module) is module
    assert announced == [("target", module)] * 2
    assert module.Runner is not runner
    assert_no_trace(module, importlib.machinery.SourceFileLoader)


def test_a_module_that_fails_is_not_announced_and_can_be_imported_again(folder: pathlib.Path) -> None:
    write(folder, "target.py", "import sys\nif not hasattr(sys, '_fixed'): raise OSError('first time')\n")
    with hooked("target") as announced:
        with pytest.raises(OSError, match="first time"):
            importlib.import_module("target")
        assert "target" not in sys.modules
        assert announced == []
        sys._fixed = True  # type: ignore[attr-defined]  # what the module looks for
        try:
            module = importlib.import_module("target")
        finally:
            del sys._fixed  # type: ignore[attr-defined]  # set above
    assert announced == [("target", module)]


@pytest.mark.parametrize("error", [RuntimeError("ours"), SystemExit(3), ImportError("ours")])
def test_what_the_callback_raises_never_reaches_the_import(
    folder: pathlib.Path, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(name: str, module: object) -> None:
        raise error

    write(folder, "target.py", "value = 1\n")
    with hooked("target", on_import=fail):
        assert importlib.import_module("target").value == 1
    assert [(record.name, record.levelname) for record in caplog.records] == [("kvcanary_agent", "WARNING")]


def test_namespace_packages_are_left_alone(folder: pathlib.Path) -> None:
    write(folder, "space/target.py", "")
    with hooked("space", "space.target") as announced:
        module = importlib.import_module("space.target")
    assert ("space.target", module) in announced
    assert list(sys.modules["space"].__path__) == [str(folder / "space")]


def test_resources_data_and_source_of_a_target_can_be_read(folder: pathlib.Path) -> None:
    write(folder, "package/__init__.py", "import pkgutil\nread = pkgutil.get_data(__name__, 'data.txt')\n")
    write(folder, "package/data.txt", "content")
    with hooked("package"):
        spec = importlib.util.find_spec("package")
        assert spec is not None
        loader: Any = spec.loader
        assert loader.is_package("package")
        assert "pkgutil" in loader.get_source("package")
        assert importlib.import_module("package").read == b"content"
        assert pkgutil.get_data("package", "data.txt") == b"content"
        assert (importlib.resources.files("package") / "data.txt").read_text() == "content"


def test_a_target_inside_a_zip_file_is_announced(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(folder / "bundle.zip", "w") as bundle:
        bundle.writestr("zipped.py", "value = 1\n")
    monkeypatch.syspath_prepend(folder / "bundle.zip")
    with hooked("zipped") as announced:
        module = importlib.import_module("zipped")
    assert announced == [("zipped", module)]
    assert_no_trace(module, zipimport.zipimporter)


def test_an_extension_module_and_a_frozen_one_are_announced() -> None:
    extension = next(
        name for name in ("_json", "_bisect", "_heapq", "_random") if importlib.util.find_spec(name) is not None
    )
    original = sys.modules.pop(extension, None)
    try:
        with hooked(extension, "__phello__") as announced:
            importlib.import_module(extension)
            with contextlib.redirect_stdout(None):
                frozen = importlib.import_module("__phello__")
    finally:
        sys.modules.pop("__phello__", None)
        if original is not None:
            sys.modules[extension] = original
    assert [name for name, _ in announced] == [extension, "__phello__"]
    assert frozen.__loader__ is importlib.machinery.FrozenImporter


class OneModuleFinder(importlib.abc.MetaPathFinder):
    """Finds ``custom`` with the loader that it was given."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(fullname, self.loader) if fullname == "custom" else None


class LoadModuleOnly:
    """A loader from before ``exec_module``."""

    def load_module(self, name: str) -> types.ModuleType:
        module = sys.modules.setdefault(name, types.ModuleType(name))
        module.__loader__ = self
        module.value = 1  # type: ignore[attr-defined]  # what the test looks for
        return module


class CreatesNothing:
    """A loader that leaves the making of the module to the import system, and looks at the spec while it may."""

    def create_module(self, spec: Any) -> None:
        assert spec.loader is self

    def exec_module(self, module: Any) -> None:
        assert module.__loader__ is module.__spec__.loader is self
        module.value = 1


@pytest.mark.filterwarnings("ignore::ImportWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("make", [LoadModuleOnly, CreatesNothing])
@pytest.mark.usefixtures("folder")
def test_a_loader_of_an_unusual_kind_is_announced(make: type, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = make()
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, OneModuleFinder(loader)])
    with hooked("custom") as announced:
        module: Any = importlib.import_module("custom")
    assert announced == [("custom", module)]
    assert module.value == 1
    assert module.__loader__ is loader
    assert module.__spec__.loader is loader


@pytest.mark.usefixtures("folder")
def test_a_loader_that_python_refuses_is_refused_in_the_same_words(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = types.SimpleNamespace(exec_module=lambda module: None)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, OneModuleFinder(loader)])
    with hooked("custom"), pytest.raises(ImportError, match="must also define create_module"):
        importlib.import_module("custom")


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="Python no longer asks such finders")
@pytest.mark.filterwarnings("ignore::ImportWarning", "ignore::DeprecationWarning")
@pytest.mark.usefixtures("folder")
def test_a_finder_from_before_find_spec_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    old: Any = types.SimpleNamespace(find_module=lambda name, path: CreatesNothing() if name == "custom" else None)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, old])
    with hooked("custom") as announced:
        importlib.import_module("custom")
    assert [name for name, _ in announced] == ["custom"]


@pytest.mark.usefixtures("folder")
def test_a_finder_that_gives_out_one_spec_twice_is_wrapped_once(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.machinery.ModuleSpec("custom", CreatesNothing())  # type: ignore[arg-type]  # a loader by its methods
    same: Any = types.SimpleNamespace(find_spec=lambda name, path, target: spec if name == "custom" else None)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, same])
    with hooked("custom") as announced:
        assert importlib.util.find_spec("custom") is spec
        importlib.import_module("custom")
    assert len(announced) == 1


def test_a_finder_put_before_ours_that_asks_the_others_sees_a_target_announced(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Delegating:
        asking = False

        def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
            if self.asking or name != "target":
                return None
            self.asking = True
            try:
                return importlib.util.find_spec(name)
            finally:
                self.asking = False

    write(folder, "target.py", "")
    with hooked("target") as announced:
        outer: Any = Delegating()
        sys.meta_path.insert(0, outer)
        try:
            module = importlib.import_module("target")
        finally:
            sys.meta_path.remove(outer)
    assert announced == [("target", module)]
    assert_no_trace(module, importlib.machinery.SourceFileLoader)


def test_a_lazily_loaded_target_stays_lazy_and_is_announced_when_it_runs(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class LazyFinder:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
            spec = importlib.machinery.PathFinder.find_spec(name, path)
            if spec is not None and spec.loader is not None:
                spec.loader = importlib.util.LazyLoader(spec.loader)
            return spec

    write(folder, "target.py", "value = 1\n")
    lazy: Any = LazyFinder()
    monkeypatch.setattr(sys, "meta_path", [lazy, *sys.meta_path])
    with hooked("target") as announced:
        module = importlib.import_module("target")
        assert announced == []
        assert module.value == 1
    assert announced == [("target", module)]
    assert_no_trace(module, importlib.machinery.SourceFileLoader)


def test_the_documented_recipe_for_a_lazy_import_works_on_a_target(folder: pathlib.Path) -> None:
    write(folder, "target.py", "value = 1\n")
    with hooked("target") as announced:
        spec = importlib.util.find_spec("target")
        assert spec is not None
        assert spec.loader is not None
        spec.loader = importlib.util.LazyLoader(spec.loader)
        module = importlib.util.module_from_spec(spec)
        sys.modules["target"] = module
        spec.loader.exec_module(module)
        assert announced == []
        assert module.value == 1
    assert announced == [("target", module)]
    assert_no_trace(module, importlib.machinery.SourceFileLoader)


def test_a_private_copy_is_announced_as_itself(folder: pathlib.Path) -> None:
    write(folder, "target.py", "")
    with hooked("target") as announced:
        imported = importlib.import_module("target")
        spec = importlib.util.find_spec("target")
        assert spec is imported.__spec__
        fresh = importlib.machinery.PathFinder.find_spec("target")
        assert fresh is not None
        found = sys.meta_path[0].find_spec("target", None)
        assert found is not None
        assert found.loader is not None
        copy = importlib.util.module_from_spec(found)
        found.loader.exec_module(copy)
    assert [module is copy for _, module in announced] == [False, True]


def test_sixteen_threads_import_targets_and_their_dependants_at_once(folder: pathlib.Path) -> None:
    write(folder, "pack/__init__.py", "")
    names = [f"pack.m{index}" for index in range(16)]
    for index in range(16):
        imports = "".join(f"import pack.m{other}\n" for other in range(index))
        write(folder, f"pack/m{index}.py", f"{imports}value = {index}\n")
    together, failures = threading.Barrier(16), []

    def work(first: int) -> None:
        together.wait(timeout=60)
        try:
            for name in names[first:] + names[:first]:
                importlib.import_module(name)
        except BaseException as error:
            failures.append(error)

    with hooked(*names[::2]) as announced:
        threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        assert not any(thread.is_alive() for thread in threads), "deadlock"
    assert failures == []
    assert sorted(name for name, _ in announced) == sorted(names[::2])


_BODIES = (
    "value = {index}\n",
    "value = {index}\n__all__ = ['value']\n",
    "import sys, types\nreplacement = types.ModuleType(__name__)\nsys.modules[__name__] = replacement\n",
    "if sys.runs.count(__name__) % 2: raise KeyError({index})\n",
    "del __loader__\n",
    "import sys\ndel sys.modules[__name__]\n",
    "raise ImportError('never', name='elsewhere')\n",
)


@st.composite
def _trees(draw: st.DrawFn) -> tuple[dict[str, str], list[str], list[tuple[str, str]]]:
    """Sources by module name (packages end in ``.__init__``), the targets, and a sequence of operations."""
    names = ["one", "two", "pack", "pack.one", "pack.two", "pack.sub", "pack.sub.one"]
    packages = {"pack", "pack.sub"}
    files = {}
    for index, name in enumerate(names):
        if name in packages and draw(st.integers(0, 3)) == 0:
            continue  # a namespace package
        needed = draw(st.lists(st.sampled_from(names), max_size=2))
        lines = ["import sys", "sys.runs.append(__name__)", *(f"import {other}" for other in needed)]
        body = draw(st.sampled_from(_BODIES if name not in packages else _BODIES[:2])).format(index=index)
        files[f"{name}.__init__" if name in packages else name] = "\n".join(lines) + "\n" + body
    targets = draw(st.lists(st.sampled_from([*names, "absent"]), unique=True))
    operation = st.tuples(st.sampled_from(["import", "import", "reload", "find", "forget"]), st.sampled_from(names))
    return files, targets, draw(st.lists(operation, min_size=1, max_size=6))


def _observe(files: dict[str, str], targets: list[str], operations: list[tuple[str, str]], *, hook: bool) -> list[Any]:
    """Everything that can be seen of `operations` on a new copy of the tree, with the folder's name taken out."""
    before, path = set(sys.modules), list(sys.path)
    runs: list[str] = []
    sys.runs = runs  # type: ignore[attr-defined]  # where the modules say that they ran
    seen: list[Any] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        for name, text in files.items():
            write(pathlib.Path(folder), name.replace(".", "/") + ".py", text)
        pathlib.Path(folder, "pack", "sub").mkdir(parents=True, exist_ok=True)
        sys.path.insert(0, folder)
        if hook:
            stack.enter_context(hooked(*targets))
        try:
            for operation, name in operations:
                try:
                    result: Any = _operate(operation, name)
                except Exception as error:
                    result = type(error), str(error).replace(folder, "")
                modules = sorted(set(sys.modules) - before)
                seen.append((operation, name, result, [(each, _facts(sys.modules[each], folder)) for each in modules]))
        finally:
            sys.path[:] = path
            for name in set(sys.modules) - before:
                del sys.modules[name]
            del sys.runs  # type: ignore[attr-defined]  # set above
    return [seen, runs]


def _operate(operation: str, name: str) -> object:
    if operation == "import":
        return importlib.import_module(name).__name__
    if operation == "reload":
        return importlib.reload(sys.modules[name]).__name__
    if operation == "find":
        spec = importlib.util.find_spec(name)
        return spec is not None and (spec.name, spec.parent, spec.has_location)
    return sys.modules.pop(name, None) is not None


def _facts(module: Any, folder: str) -> list[Any]:
    spec = getattr(module, "__spec__", None)
    facts = [
        sorted(vars(module)),
        type(getattr(module, "__loader__", None)),
        type(getattr(spec, "loader", None)),
        getattr(module, "value", None),
        *(getattr(module, name, None) for name in ("__name__", "__package__", "__file__", "__cached__")),
        *(getattr(spec, name, None) for name in ("name", "origin", "cached", "_initializing", "loader_state")),
        getattr(module, "__path__", None).__class__,  # a namespace's own cannot be listed once its parent is gone
    ]
    return [repr(fact).replace(folder, "") for fact in facts]


@settings(deadline=None, max_examples=60)
@given(_trees())
def test_any_sequence_of_imports_looks_the_same_with_and_without_the_finder(
    example: tuple[dict[str, str], list[str], list[tuple[str, str]]],
) -> None:
    files, targets, operations = example
    assert _observe(files, targets, operations, hook=True) == _observe(files, targets, operations, hook=False)


def test_a_finder_before_ours_is_asked_once(folder: pathlib.Path) -> None:
    class Counts:
        asked = 0

        def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
            self.asked += name == "target"

    write(folder, "target.py", "")
    with hooked("target"):
        before: Any = Counts()
        sys.meta_path.insert(0, before)
        try:
            importlib.import_module("target")
        finally:
            sys.meta_path.remove(before)
    assert before.asked == 1


def test_a_finder_taken_off_the_list_by_another_thread_still_finds(folder: pathlib.Path) -> None:
    write(folder, "target.py", "")
    finder = TargetFinder({"target"}, lambda *_: None)
    spec = finder.find_spec("target")
    assert spec is not None
    assert spec.origin == str(folder / "target.py")


def test_where_the_loader_cannot_be_replaced_the_import_goes_on_unwatched(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(file: str) -> None:
        raise OSError("no such file")

    monkeypatch.setattr("kvcanary_agent.execute", fail)
    write(folder, "target.py", "value = 1\n")
    with hooked("target") as announced:
        assert importlib.import_module("target").value == 1
    assert announced == []
    assert capsys.readouterr().err == "kvcanary-agent: target is not watched: OSError: no such file\n"


def test_two_modules_that_import_each_other_are_announced_once_each_when_whole(folder: pathlib.Path) -> None:
    write(folder, "one.py", "import two\nvalue = 1\n")
    write(folder, "two.py", "import one\nvalue = 2\n")
    seen: list[tuple[str, bool]] = []
    with hooked("one", "two", on_import=lambda name, module: seen.append((name, hasattr(module, "value")))):
        importlib.import_module("one")
    assert seen == [("two", True), ("one", True)]


def test_a_module_with_a_getattr_of_its_own_is_asked_for_nothing_more_than_without(folder: pathlib.Path) -> None:
    body = "asked = []\ndef __getattr__(name):\n    asked.append(name)\n    raise AttributeError(name)\n"
    write(folder, "target.py", body)
    write(folder, "plain.py", body)
    with hooked("target"):
        assert importlib.import_module("target").asked == importlib.import_module("plain").asked
