"""Where a value is, in words that a table can hold: ``self.k[*]``, ``args.batch.block_tables``, ``result[0]``.

A path is a root and steps. Roots are ``self`` (the object whose method is called), ``args.NAME`` (an argument of the
call), ``result`` (what it returned), ``pool`` (the object that holds the buffers), ``remembered.NAME`` (see
`kvcanary_agent.adapters.declared`), and ``package.module:NAME``, a name of a module that the engine has imported. Steps
are ``.name``, ``[2]``, ``['key']``, and ``[*]``: the rest of the path for every item of a sequence, or for every value
of a mapping, as a list. Nothing is called, imported or evaluated.
"""

import difflib
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

Root = Literal["self", "args", "result", "pool", "remembered", "module"]

_NAME = r"[^\W\d]\w*"
_MODULE_ROOT = re.compile(rf"({_NAME}(?:\.{_NAME})*):({_NAME})")
_ROOT = re.compile(rf"(self|result|pool|(args|remembered)\.({_NAME}))(?![\w:])")
_STEP = re.compile(rf"\.({_NAME})|\[(-?[0-9]{{1,9}})\]|\[(\*)\]|\[(?:'([^'\]]*)'|\"([^\"\]]*)\")\]")


class PathError(ValueError):
    """A path that cannot be read, or leads nowhere; the message names the path and the place."""


class _All:
    def __repr__(self) -> str:
        return "*"


_EVERY = _All()


@dataclass(frozen=True, slots=True)
class _Attribute:
    name: str


@dataclass(frozen=True, slots=True)
class Path:
    """A parsed path.

    Attributes:
        text: As it was written.
        root: What it starts from.
        name: Of the argument, of what was remembered, or of the module's attribute.
        module: Of a ``module`` root.
    """

    text: str
    root: Root
    name: str
    module: str
    steps: tuple[object, ...]

    @classmethod
    def parse(cls, text: str, roots: tuple[Root, ...]) -> "Path":
        """Read a path. Raises `PathError` for a wrong one, and for one that starts from something not in `roots`."""
        found = _MODULE_ROOT.match(text)
        root: Root
        if found:
            root, module, name = "module", found[1], found[2]
        else:
            found = _ROOT.match(text)
            if not found:
                raise PathError(f"{text!r} starts with none of {_roots_in_words(roots)}")
            module, name = "", found[3] or ""
            root = cast(Root, found[2] or found[1])
        if root not in roots:
            raise PathError(f"{text!r}: there is no {root} here; it must start with {_roots_in_words(roots)}")
        steps: list[object] = []
        at = found.end()
        while at < len(text):
            step = _STEP.match(text, at)
            if not step:
                raise PathError(f"{text!r}: {text[at:]!r} is no step; steps are .name, [2], ['key'] and [*]")
            steps.append(_step(step))
            at = step.end()
        for part in (name, *(step.name for step in steps if isinstance(step, _Attribute))):
            if part.startswith("__"):
                raise PathError(f"{text!r}: names with two underscores in front are not read")
        return cls(text=text, root=root, name=name, module=module, steps=tuple(steps))

    def read(self, start: Any) -> Any:
        """What the path leads to, from its root's value `start`. Raises `PathError` where it leads nowhere."""
        return self._follow(start, 0)

    def read_from_module(self) -> Any:
        """The same for a ``module`` root, whose module must have been imported by now."""
        module = sys.modules.get(self.module)
        if module is None:
            raise PathError(f"{self.text!r}: the module {self.module} is not imported")
        return self._follow(_attribute(module, self.name, self.text), 0)

    def _follow(self, value: Any, at: int) -> Any:
        for index in range(at, len(self.steps)):
            step = self.steps[index]
            if isinstance(step, _Attribute):
                value = _attribute(value, step.name, self.text)
            elif step is _EVERY:
                items = value.values() if isinstance(value, Mapping) else value
                try:
                    return [self._follow(item, index + 1) for item in items]
                except TypeError:
                    raise PathError(f"{self.text!r}: [*] needs a sequence, not a {type(value).__name__}") from None
            else:
                try:
                    value = value[step]
                except (LookupError, TypeError) as error:
                    what = f"{type(value).__name__}[{step!r}]"
                    raise PathError(f"{self.text!r}: {what}: {type(error).__name__}: {error}") from None
        return value


def _step(step: "re.Match[str]") -> object:
    attribute, number, every, single, double = step.groups()
    if attribute is not None:
        return _Attribute(attribute)
    if number is not None:
        return int(number)
    if every is not None:
        return _EVERY
    return single if single is not None else double


def _attribute(value: Any, name: str, text: str) -> Any:
    try:
        return getattr(value, name)
    except AttributeError:
        owner = value.__name__ if isinstance(value, type(sys)) else type(value).__name__
        near = difflib.get_close_matches(name, _names_of(value), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise PathError(f"{text!r}: {owner} has no attribute {name!r}{hint}") from None


def _names_of(value: Any) -> list[str]:
    try:
        return [name for name in dir(value) if not name.startswith("__")]
    except Exception:
        return []


_WORDS: Mapping[Root, str] = {
    "self": "self",
    "args": "args.NAME",
    "result": "result",
    "pool": "pool",
    "remembered": "remembered.NAME",
    "module": "package.module:NAME",
}


def _roots_in_words(roots: tuple[Root, ...]) -> str:
    return ", ".join(_WORDS[root] for root in roots)
