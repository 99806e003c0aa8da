"""What a patched method keeps, when its around runs, and that everything can be put back."""

import abc
import contextlib
import copy
import enum
import functools
import inspect
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcanary_agent.activation.patching import (
    is_wrapped,
    owner_of,
    patch_method,
    restore_all,
    unwrap_method,
    wrap_method,
)


@pytest.fixture(autouse=True)
def _everything_back() -> Iterator[None]:
    yield
    restore_all()


class Recorder:
    """An around that counts its calls and passes them on."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self, call: Callable[..., Any], receiver: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.seen.append((receiver, args, kwargs))
        return call(*args, **kwargs)


class Engine:
    """At module level, so that it can be pickled."""

    def step(self, number: int, /, *, scale: int = 1) -> int:
        """Advance by one."""
        return (number + 1) * scale


def test_an_around_gets_the_call_the_object_and_the_arguments() -> None:
    around = Recorder()
    wrap_method(Engine, "step", around)
    engine = Engine()
    assert engine.step(1, scale=3) == 6
    assert around.seen == [(engine, (1,), {"scale": 3})]


def test_an_around_may_change_arguments_and_result() -> None:
    wrap_method(Engine, "step", lambda call, self, /, number, **kwargs: -call(number + 10, **kwargs))
    assert Engine().step(1) == -12


def test_instances_and_subclasses_made_before_are_patched() -> None:
    class Derived(Engine):
        pass

    derived, around = Derived(), Recorder()
    wrap_method(Engine, "step", around)
    derived.step(1)
    assert len(around.seen) == 1


def test_unwrapping_puts_the_same_function_object_back() -> None:
    original = Engine.__dict__["step"]
    wrap_method(Engine, "step", Recorder())
    assert is_wrapped(Engine, "step")
    unwrap_method(Engine, "step")
    assert Engine.__dict__["step"] is original
    assert not is_wrapped(Engine, "step")


def test_wrapping_twice_is_refused() -> None:
    wrap_method(Engine, "step", Recorder())
    with pytest.raises(RuntimeError, match=r"Engine\.step is wrapped already"):
        wrap_method(Engine, "step", Recorder())


def test_unwrapping_what_is_not_wrapped_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"Engine\.step is not wrapped"):
        unwrap_method(Engine, "step")


def test_a_missing_method_names_class_method_and_module() -> None:
    with pytest.raises(AttributeError, match=rf"{__name__}\.Engine\.stop does not exist.*{__name__}"):
        wrap_method(Engine, "stop", Recorder())
    with pytest.raises(AttributeError, match=r"Engine\.stop does not exist"):
        patch_method(Engine, "stop", Recorder())


def test_wrapping_an_inherited_method_names_the_class_that_owns_it() -> None:
    class Derived(Engine):
        pass

    with pytest.raises(AttributeError, match=r"Derived\.step is inherited from .*Engine\.step"):
        wrap_method(Derived, "step", Recorder())


def test_a_method_named_on_a_subclass_is_patched_once_on_its_owner() -> None:
    class Derived(Engine):
        pass

    around = Recorder()
    assert owner_of(Derived, "step") is Engine
    assert patch_method(Derived, "step", around) is True
    assert patch_method(Engine, "step", around) is False
    assert "step" not in Derived.__dict__
    Derived().step(1)
    assert len(around.seen) == 1


def test_signature_names_and_documentation_are_kept() -> None:
    original, before = Engine.step, inspect.signature(Engine.step)
    wrap_method(Engine, "step", Recorder())
    assert inspect.signature(Engine.step) == before
    assert inspect.unwrap(Engine.step) is original
    for attribute in ("__name__", "__qualname__", "__module__", "__doc__", "__annotations__"):
        assert getattr(Engine.step, attribute) == getattr(original, attribute)


def test_instances_bound_methods_and_functions_are_pickled() -> None:
    around = Recorder()
    wrap_method(Engine, "step", around)
    assert pickle.loads(pickle.dumps(Engine())).step(1) == 2
    assert pickle.loads(pickle.dumps(Engine().step))(1) == 2
    assert pickle.loads(pickle.dumps(Engine.step)) is Engine.step
    assert len(around.seen) == 2


def test_class_and_static_methods_stay_what_they_are() -> None:
    class Pool:
        @classmethod
        def make(cls, size: int) -> tuple[type, int]:
            return cls, size

        @staticmethod
        def blocks(size: int) -> int:
            return size // 16

    class Derived(Pool):
        pass

    around = Recorder()
    patch_method(Pool, "make", around)
    patch_method(Pool, "blocks", around)
    assert type(Pool.__dict__["make"]) is classmethod
    assert type(Pool.__dict__["blocks"]) is staticmethod
    assert Derived.make(3) == (Derived, 3)
    assert Pool().blocks(32) == Derived.blocks(32) == 2
    assert around.seen == [(Derived, (3,), {}), (Pool, (32,), {}), (Pool, (32,), {})]


def test_an_abstract_method_stays_abstract() -> None:
    class Abstract(abc.ABC):
        @abc.abstractmethod
        def step(self) -> str:
            return "abstract"

    class Concrete(Abstract):
        def step(self) -> str:
            return super().step()

    around = Recorder()
    wrap_method(Abstract, "step", around)
    with pytest.raises(TypeError, match="abstract"):
        Abstract()  # type: ignore[abstract]  # the point
    assert Concrete().step() == "abstract"
    assert len(around.seen) == 1


def test_a_class_with_slots_is_patched() -> None:
    class Slotted:
        __slots__ = ("number",)

        def step(self) -> str:
            return "stepped"

    around = Recorder()
    wrap_method(Slotted, "step", around)
    assert Slotted().step() == "stepped"
    assert len(around.seen) == 1


def test_a_constructor_is_patched() -> None:
    class Pool:
        def __init__(self, size: int) -> None:
            self.size = size

    around = Recorder()
    wrap_method(Pool, "__init__", around)
    assert Pool(size=4).size == 4
    assert around.seen[0][2] == {"size": 4}


def test_callables_that_bind_in_their_own_way_are_patched() -> None:
    class Cached:
        @functools.cache  # noqa: B019  # the point
        def step(self, number: int) -> int:
            return number + 1

        fixed = functools.partialmethod(Engine.step, 5)

    around = Recorder()
    patch_method(Cached, "step", around)
    with pytest.raises(TypeError, match="partialmethod, not a method"):
        patch_method(Cached, "fixed", around)
    assert Cached().step(1) == 2
    assert len(around.seen) == 1


async def _coroutine_function(self: Any) -> None: ...


def _generator_function(self: Any) -> Iterator[None]:
    yield


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        (property(lambda self: 1), "is a property, not a method"),
        (functools.cached_property(lambda self: 1), "is a cached_property, not a method"),
        (Engine, "is a type, not a method"),
        (3, "is a int, not a method"),
        (functools.partial(print), "does not bind to instances"),
        (_coroutine_function, "is a coroutinefunction"),
        (_generator_function, "is a generatorfunction"),
    ],
)
def test_what_is_no_plain_method_is_refused_and_left_alone(entry: Any, complaint: str) -> None:
    owner = type("Owner", (), {"step": entry})
    with pytest.raises(TypeError, match=complaint):
        patch_method(owner, "step", Recorder())
    assert owner.__dict__["step"] is entry


def test_a_class_that_cannot_be_changed_says_so() -> None:
    with pytest.raises(TypeError, match=r"builtins\.list\.append cannot be replaced: TypeError"):
        patch_method(list, "append", Recorder())


class _Refusing(type):
    def __setattr__(cls, name: str, value: object) -> None:
        raise AttributeError("sealed")


class _Ignoring(type):
    def __setattr__(cls, name: str, value: object) -> None:
        pass


class _Altering(type):
    def __setattr__(cls, name: str, value: Any) -> None:
        super().__setattr__(name, value if value is cls._original else lambda self: value(self))  # type: ignore[attr-defined]  # every class of it has one


@pytest.mark.parametrize("metaclass", [_Refusing, _Ignoring, _Altering])
def test_a_metaclass_that_does_not_let_a_method_be_replaced_is_a_clear_error(metaclass: type) -> None:
    def step(self: Any) -> int:
        return 1

    hostile = metaclass("Hostile", (), {"step": step, "_original": step})
    with pytest.raises(TypeError, match=r"Hostile\.step cannot be replaced"):
        wrap_method(hostile, "step", Recorder())
    assert hostile.__dict__["step"] is step
    assert not is_wrapped(hostile, "step")


def test_a_method_of_an_enumeration_is_patched() -> None:
    class Mode(enum.Enum):
        DECODE = 1

        def label(self) -> str:
            return self.name

    around = Recorder()
    wrap_method(Mode, "label", around)
    assert Mode.DECODE.label() == "DECODE"
    assert len(around.seen) == 1


def test_an_override_that_calls_super_is_one_call() -> None:
    class Derived(Engine):
        def step(self, number: int, /, *, scale: int = 1) -> int:
            return super().step(number, scale=scale) + 100

    inner, outer = Recorder(), Recorder()
    patch_method(Engine, "step", inner)
    patch_method(Derived, "step", outer)
    assert Derived().step(1) == 102
    assert (len(outer.seen), len(inner.seen)) == (1, 0)
    assert Engine().step(1) == 2
    assert len(inner.seen) == 1


def test_another_object_reached_from_inside_is_a_call_of_its_own() -> None:
    class Chain:
        def __init__(self, after: "Chain | None" = None) -> None:
            self.after = after

        def step(self) -> int:
            return 1 + (self.after.step() if self.after else 0)

    around = Recorder()
    wrap_method(Chain, "step", around)
    assert Chain(Chain(Chain())).step() == 3
    assert len(around.seen) == 3


def test_another_thread_inside_the_same_object_is_a_call_of_its_own() -> None:
    class Shared:
        def step(self, both_inside: threading.Barrier) -> int:
            return both_inside.wait(timeout=60)

    around, shared, both_inside = Recorder(), Shared(), threading.Barrier(2)
    wrap_method(Shared, "step", around)
    threads = [threading.Thread(target=shared.step, args=(both_inside,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(around.seen) == 2


def test_after_an_exception_the_next_call_is_seen_again() -> None:
    around = Recorder()
    wrap_method(Engine, "step", around)
    with pytest.raises(TypeError):
        Engine().step("text")  # type: ignore[arg-type]  # the point
    engine = Engine()
    with pytest.raises(TypeError):
        engine.step("text")  # type: ignore[arg-type]  # the point
    assert engine.step(1) == 2
    assert len(around.seen) == 3


def _wrap_as_another_tool_would(owner: type, name: str, *, marked: bool = False) -> list[str]:
    """Put a plain closure over whatever the class has, as SGLang's canary does, and return the calls that it sees."""
    inner, calls = owner.__dict__[name], []

    def theirs(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return inner(self, *args, **kwargs)

    if marked:
        theirs._kv_canary_wrapped_by = "kv-canary"  # type: ignore[attr-defined]  # as they do
    setattr(owner, name, theirs)
    return calls


@pytest.fixture
def engine_class() -> Iterator[type]:
    """A class that other tools wrap too; what they left on it goes afterwards, or restore_all() would report it."""
    made = type("Engine", (), {"step": Engine.__dict__["step"]})
    yield made
    made.step = Engine.__dict__["step"]  # type: ignore[attr-defined]  # the attribute is there


def test_another_tools_wrapper_over_ours_is_left_in_place_and_ours_stops(engine_class: type) -> None:
    around = Recorder()
    wrap_method(engine_class, "step", around)
    theirs = _wrap_as_another_tool_would(engine_class, "step", marked=True)
    outermost = engine_class.__dict__["step"]
    assert is_wrapped(engine_class, "step")
    with pytest.raises(RuntimeError, match=r"Engine\.step was wrapped again by kv-canary"):
        unwrap_method(engine_class, "step")
    assert engine_class.__dict__["step"] is outermost
    assert engine_class().step(1) == 2
    assert (len(theirs), len(around.seen)) == (1, 0)


def test_a_wrapper_left_beneath_another_tools_works_again_instead_of_being_stacked(engine_class: type) -> None:
    first, second = Recorder(), Recorder()
    patch_method(engine_class, "step", first)
    _wrap_as_another_tool_would(engine_class, "step")
    assert patch_method(engine_class, "step", second) is False
    assert len(restore_all()) == 1
    assert patch_method(engine_class, "step", second) is True
    engine_class().step(1)
    assert (len(first.seen), len(second.seen)) == (0, 1)


def test_a_wrapper_is_removed_once_the_other_tool_has_removed_its_own(engine_class: type) -> None:
    original = engine_class.__dict__["step"]
    patch_method(engine_class, "step", Recorder())
    ours = engine_class.__dict__["step"]
    _wrap_as_another_tool_would(engine_class, "step")
    assert len(restore_all()) == 1
    engine_class.step = ours  # type: ignore[attr-defined]  # what the other tool found
    assert restore_all() == []
    assert engine_class.__dict__["step"] is original


def test_another_tools_wrapper_beneath_ours_is_put_back_as_it_was(engine_class: type) -> None:
    theirs = _wrap_as_another_tool_would(engine_class, "step", marked=True)
    beneath, around = engine_class.__dict__["step"], Recorder()
    patch_method(engine_class, "step", around)
    assert engine_class().step(1) == 2
    assert (len(theirs), len(around.seen)) == (1, 1)
    unwrap_method(engine_class, "step")
    assert engine_class.__dict__["step"] is beneath


def test_a_patch_that_somebody_else_undid_can_be_made_again(engine_class: type) -> None:
    original, around = engine_class.__dict__["step"], Recorder()
    for _ in range(8):
        assert patch_method(engine_class, "step", around) is True
        engine_class.step = original  # type: ignore[attr-defined]  # the attribute is there
        assert not is_wrapped(engine_class, "step")
        assert restore_all() == []
    assert patch_method(engine_class, "step", around) is True
    engine_class().step(1)
    assert len(around.seen) == 1
    assert restore_all() == []
    assert engine_class.__dict__["step"] is original


# In one hierarchy a name is a class method everywhere or nowhere, as in any real one.
_NAMES = ("execute", "from_config")


@st.composite
def _hierarchies(draw: st.DrawFn) -> tuple[list[type], list[tuple[int, str]]]:
    """Classes whose methods return the labels of the implementations that ran, and which of them to patch."""
    classes: list[type] = []
    for index in range(draw(st.integers(1, 6))):
        bases = tuple(draw(st.lists(st.sampled_from(classes), unique=True, max_size=3))) if classes else ()
        namespace: dict[str, Any] = {}
        with contextlib.suppress(TypeError):  # an order of bases that has no method resolution order
            made = type(f"C{index}", bases, namespace)
            for name in _NAMES:
                if draw(st.booleans()):
                    setattr(made, name, _implementation(made, name, calls_super=draw(st.booleans())))
            classes.append(made)
    patches = draw(st.lists(st.tuples(st.integers(0, len(classes) - 1), st.sampled_from(_NAMES)), max_size=8))
    return classes, patches


def _implementation(owner: type, name: str, *, calls_super: bool) -> Any:
    def implementation(receiver: Any) -> list[str]:
        beneath = getattr(super(owner, receiver), name, None) if calls_super else None
        return [owner.__name__, *(beneath() if beneath else [])]

    return classmethod(implementation) if name == "from_config" else implementation


@given(_hierarchies())
def test_in_any_hierarchy_a_call_has_one_around_and_afterwards_every_class_is_as_before(
    example: tuple[list[type], list[tuple[int, str]]],
) -> None:
    classes, patches = example
    before = [dict(cls.__dict__) for cls in classes]

    def outcomes() -> list[Any]:
        found = []
        for cls in classes:
            for name in _NAMES:
                around.seen.clear()
                try:
                    found.append((getattr(cls(), name)(), len(around.seen)))
                except (AttributeError, TypeError) as error:
                    found.append((type(error), 0))
        return found

    around = Recorder()
    unpatched = outcomes()
    for index, name in patches:
        with contextlib.suppress(AttributeError):
            patch_method(classes[index], name, around)
    wrapped = {(cls.__name__, name) for cls in classes for name in _NAMES if is_wrapped(cls, name)}
    for (labels, _), (patched_labels, arounds), name in zip(unpatched, outcomes(), _NAMES * len(classes), strict=True):
        assert patched_labels == labels
        ran = labels if isinstance(labels, list) else []
        assert arounds == any((label, name) in wrapped for label in ran)
    assert restore_all() == []
    for cls, entries in zip(classes, before, strict=True):
        assert list(cls.__dict__.items()) == list(entries.items())
        assert all(cls.__dict__[key] is value for key, value in entries.items() if key in _NAMES)


def test_under_torch_compile_a_patched_method_adds_nothing_to_the_graph() -> None:
    torch = pytest.importorskip("torch")

    class Model(torch.nn.Module):  # type: ignore[misc, name-defined]  # torch is imported here, if it is there
        def inner(self, x: Any) -> Any:
            return x * 2

        def forward(self, x: Any) -> Any:
            return self.inner(x) + 1

    def break_the_graph(call: Callable[..., Any], self: Any, /, *args: Any) -> Any:
        torch._dynamo.graph_break()
        return call(*args)

    patch_method(Model, "inner", break_the_graph)
    patch_method(Model, "forward", break_the_graph)
    compiled = torch.compile(Model(), fullgraph=True, backend="eager")
    assert compiled(torch.ones(2)).tolist() == [3.0, 3.0]


def test_around_a_compiled_region_a_patched_method_causes_no_recompilation() -> None:
    torch = pytest.importorskip("torch")
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    class Layer(torch.nn.Module):  # type: ignore[misc, name-defined]  # as above
        def forward(self, x: Any) -> Any:
            return x * 2

    class Runner:
        def __init__(self) -> None:
            self.layer = torch.compile(Layer(), fullgraph=True, backend=backend)

        def step(self, x: Any) -> Any:
            return self.layer(x) + 1

    around = Recorder()
    patch_method(Runner, "step", around)
    patch_method(Layer, "forward", around)
    runner = Runner()
    for _ in range(3):
        assert runner.step(torch.ones(2)).tolist() == [3.0, 3.0]
    assert len(around.seen) == 3  # outside of the region, and not inside
    assert len(graphs) == 1
    unwrap_method(Runner, "step")
    assert runner.step(torch.ones(2)).tolist() == [3.0, 3.0]
    assert len(graphs) == 1


def test_a_patched_class_is_copied_and_subclassed_as_before() -> None:
    wrap_method(Engine, "step", Recorder())
    engine = Engine()
    engine.state = [1]  # type: ignore[attr-defined]  # of this instance
    assert copy.copy(engine).state is engine.state  # type: ignore[attr-defined]  # copied
    assert copy.deepcopy(engine).state == [1]  # type: ignore[attr-defined]  # copied
    assert copy.deepcopy(engine.step)(1) == 2
    assert copy.copy(Engine.step) is Engine.step

    class Derived(Engine):
        def step(self, number: int, /, *, scale: int = 1) -> int:
            return super().step(number, scale=scale) + 100

    assert Derived().step(1) == 102
    assert inspect.getsource(Engine.step) == inspect.getsource(inspect.unwrap(Engine.step))
