"""Which attributes of a pool are its buffers, and what their axes are: from a live object, or from a class's source."""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import dataclass
from typing import Any

_MAKERS = ("zeros", "empty", "full", "ones", "rand", "randn")
# Fragments of the names that engines give to sizes, most telling first, and the axis that each means.
_NAMES = (
    ("head_dim", "dim"),
    ("head_size", "dim"),
    ("layer", "layers"),
    ("num_block", "blocks"),
    ("n_block", "blocks"),
    ("num_page", "blocks"),
    ("n_page", "blocks"),
    ("block_size", "tokens"),
    ("page_size", "tokens"),
    ("tokens_per_block", "tokens"),
    ("slot", "slots"),
    ("request", "requests"),
    ("batch", "requests"),
    ("row", "requests"),
    ("max_len", "tokens"),
    ("max_seq", "tokens"),
    ("seq_len", "tokens"),
    ("longest", "tokens"),
    ("head", "heads"),
    ("dim", "dim"),
    ("block", "tokens"),
    ("page", "tokens"),
    ("blocks", "blocks"),
    ("pages", "blocks"),
    ("token", "slots"),
)
_KEYS = ("key", "k_", "_k")
_VALUES = ("value", "v_", "_v")


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """An attribute that holds tensors.

    path: of the tensors, from the object.
    axes: a word for each axis, ``?`` where nothing tells.
    part: keys, values or kv, by its name.
    shown: its shape, in figures or in words of the source.
    """

    path: str
    axes: tuple[str, ...]
    part: str
    shown: str


def buffers_of(found: Any) -> list[Buffer]:
    """The buffers of a class, or of an object with tensors in it."""
    return _from_source(found) if isinstance(found, type) else _from_object(found)


def axis_of(name: str) -> str:
    """The axis that a size of this name is the length of; ``?`` if it does not say."""
    words = name.lower().rpartition(".")[2].removeprefix("self.")
    if words in ("blocks", "pages", "num_blocks", "num_pages"):
        return "blocks"
    return next((axis for fragment, axis in _NAMES if fragment in words), "?")


def _from_object(found: Any) -> list[Buffer]:
    import torch

    sizes: dict[int, list[str]] = {}
    values = _attributes(found).values()
    for holder in (found, *(value for value in values if type(value).__module__ == type(found).__module__)):
        for name, value in _attributes(holder).items():
            if isinstance(value, int) and not isinstance(value, bool):
                sizes.setdefault(value, []).append(name)
    buffers: list[Buffer] = []
    for path, value in _tensors(found, "self", 2):
        tensor = value[0] if isinstance(value, (list, tuple)) else value
        assert isinstance(tensor, torch.Tensor), "only tensors and lists of them are found"
        buffers.append(
            Buffer(
                path=f"{path}[*]" if isinstance(value, (list, tuple)) else path,
                axes=_plausible([_axis_of_size(size, sizes) for size in tensor.shape], splits_kv=_part(path) == "kv"),
                part=_part(path),
                shown=str(tuple(tensor.shape)),
            )
        )
    from_source = {buffer.path: buffer for buffer in _from_source(type(found))}
    return [
        from_source[buffer.path] if "?" in buffer.axes and buffer.path in from_source else buffer for buffer in buffers
    ]


def _attributes(found: Any) -> dict[str, Any]:
    return {name: value for name, value in getattr(found, "__dict__", {}).items() if not name.startswith("__")}


def _tensors(found: Any, path: str, depth: int) -> list[tuple[str, Any]]:
    """Paths of tensors of at least two axes, and of lists of them."""
    import torch

    tensors: list[tuple[str, Any]] = []
    for name, value in _attributes(found).items():
        at = f"{path}.{name}"
        if isinstance(value, torch.Tensor):
            tensors += [(at, value)] if value.dim() > 1 else []
        elif isinstance(value, (list, tuple)) and value and all(isinstance(each, torch.Tensor) for each in value):
            tensors += [(at, value)] if value[0].dim() > 1 else []
        elif depth and hasattr(value, "__dict__") and not isinstance(value, type):
            tensors += _tensors(value, at, depth - 1)
    return tensors


def _axis_of_size(size: int, sizes: dict[int, list[str]]) -> str:
    axes = {axis_of(name) for name in sizes.get(size, ())} - {"?"}
    return axes.pop() if len(axes) == 1 else "?"


def _from_source(cls: type) -> list[Buffer]:
    """What a class assigns to ``self`` that looks like a tensor, or a list of them."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):
        return []
    names: dict[str, ast.expr] = {}
    buffers: dict[str, Buffer] = {}
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Name):
                names[target.id] = node.value
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
                path, value = f"self.{target.attr}", node.value
                if isinstance(value, ast.ListComp):
                    path, value = f"{path}[*]", value.elt
                sizes = _sizes(value, names)
                if len(sizes) > 1:
                    part = _part(path)
                    axes = ["kv" if size == "2" else axis_of(size) for size in sizes]
                    buffers[path] = Buffer(
                        path=path,
                        axes=_plausible(axes, splits_kv=part == "kv"),
                        part=part,
                        shown=f"({', '.join(sizes)})",
                    )
    return list(buffers.values())


def _sizes(value: ast.expr, names: dict[str, ast.expr]) -> list[str]:
    """The sizes, as the source writes them, of the tensor that an expression makes."""
    if not isinstance(value, ast.Call):
        return []
    function = value.func
    if not isinstance(function, ast.Attribute) or function.attr not in _MAKERS:
        return []
    arguments = value.args[:1] or [keyword.value for keyword in value.keywords if keyword.arg == "size"]
    if not arguments:
        return []
    first = arguments[0]
    if isinstance(first, ast.Name) and first.id in names:
        first = names[first.id]
    if isinstance(first, (ast.Tuple, ast.List)):
        return [ast.unparse(size) for size in first.elts]
    return [ast.unparse(size) for size in value.args] if len(value.args) > 1 else []


def _part(path: str) -> str:
    name = path.rpartition(".")[2].removesuffix("[*]").lower()
    if any(both in name for both in ("kv", "key_value")):
        return "kv"
    if name in ("k", "ks") or any(fragment in name for fragment in _KEYS):
        return "keys"
    if name in ("v", "vs") or any(fragment in name for fragment in _VALUES):
        return "values"
    return "kv"


def _plausible(axes: list[str], *, splits_kv: bool) -> tuple[str, ...]:
    """The same without what cannot be: an axis twice, slots beside tokens, keys and values in a tensor of one."""
    found: list[str] = []
    for axis in axes:
        twice = axis in found
        if axis == "slots" and "blocks" in axes:
            axis = "tokens"
        if axis == "kv" and not splits_kv:
            axis = "?"
        found.append("?" if twice else axis)
    return tuple(found)
