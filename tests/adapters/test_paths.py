"""The path syntax: what it reads, and that no text makes it do more than that."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcanary_agent.adapters.declared.paths import Path, PathError, Root

ROOTS: tuple[Root, ...] = ("self", "args", "result", "pool", "remembered", "module")
NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,6}", fullmatch=True)
KEYS = st.text(st.characters(blacklist_characters="'\"]", blacklist_categories=["Cs"]), max_size=6)
STEPS = st.lists(st.tuples(st.just("."), NAMES) | st.tuples(st.just("["), st.integers(0, 3) | KEYS), max_size=6)


def built(steps: list[tuple[str, Any]], leaf: object) -> Any:
    """An object in which these steps lead to `leaf`."""
    for kind, name in reversed(steps):
        if kind == ".":
            leaf = SimpleNamespace(**{name: leaf})
        else:
            leaf = [None] * name + [leaf] if isinstance(name, int) else {name: leaf}
    return leaf


@given(STEPS)
def test_a_path_leads_where_its_steps_lead(steps: list[tuple[str, Any]]) -> None:
    text = "self" + "".join(f".{name}" if kind == "." else f"[{name!r}]" for kind, name in steps)
    if "\\" in text:
        return  # repr escapes what the syntax takes as it is
    leaf = object()
    assert Path.parse(text, ROOTS).read(built(steps, leaf)) is leaf


@given(STEPS, STEPS, st.lists(st.integers(), max_size=4), st.booleans())
def test_a_star_reads_the_rest_for_every_item(
    before: list[tuple[str, Any]], after: list[tuple[str, Any]], leaves: list[int], mapping: bool
) -> None:
    def text(steps: list[tuple[str, Any]]) -> str:
        return "".join(f".{name}" if kind == "." else f"[{name!r}]" for kind, name in steps)

    if "\\" in text(before) + text(after):
        return
    items: Any = [built(after, leaf) for leaf in leaves]
    holder = built(before, dict(enumerate(items)) if mapping else items)
    assert Path.parse(f"self{text(before)}[*]{text(after)}", ROOTS).read(holder) == leaves


@given(st.text(max_size=30) | st.text(alphabet="selfargs.[]*'0_():", max_size=20))
def test_any_text_is_a_path_or_an_error_that_quotes_it(text: str) -> None:
    said = ""
    try:
        assert Path.parse(text, ROOTS).text == text
    except PathError as error:
        said = str(error)
    assert not said or repr(text) in said


class Trap:
    """Counts what is done to it beside the reading of attributes and items."""

    called = 0

    def __call__(self) -> None:
        self.called += 1


@pytest.mark.parametrize(
    "text", ["self.trap()", "self.__class__", "self.trap.__call__", "args", "self.a b", "self[", "self[a]", "os.system"]
)
def test_nothing_is_called_and_no_name_with_two_underscores_read(text: str) -> None:
    with pytest.raises(PathError):
        Path.parse(text, ROOTS).read(SimpleNamespace(trap=Trap()))
    assert Trap.called == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("self.kes", "'self.kes': Holder has no attribute 'kes'; did you mean keys?"),
        ("self.keys[7]", "'self.keys[7]': list[7]: IndexError: list index out of range"),
        ("self.keys['a']", "list['a']: TypeError"),
        ("self.size[*]", "'self.size[*]': [*] needs a sequence, not a int"),
        ("self.size.x", "'self.size.x': int has no attribute 'x'"),
    ],
)
def test_a_path_that_leads_nowhere_says_where_it_ends(text: str, said: str) -> None:
    class Holder:
        def __init__(self) -> None:
            self.keys, self.size = ["a", "b"], 3

    with pytest.raises(PathError) as caught:
        Path.parse(text, ROOTS).read(Holder())
    assert said in str(caught.value)


def test_a_module_is_read_and_never_imported() -> None:
    assert Path.parse("math:pi", ROOTS).read_from_module() > 3
    with pytest.raises(PathError, match="the module no_such_module is not imported"):
        Path.parse("no_such_module:x", ROOTS).read_from_module()
    with pytest.raises(PathError, match="there is no module here"):
        Path.parse("math:pi", ("self",))
