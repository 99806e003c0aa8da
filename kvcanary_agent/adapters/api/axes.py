"""From tensors and the names of their axes to a `KVLayout`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvcanary_agent.adapters.api.words import PARTS, axes_of
from kvcanary_agent.canary import KVGroup, KVLayout, KVPart, LayoutError

_LEADING = ("blocks", "tokens")


def layout(
    engine: str,
    *,
    axes: str,
    k: Any = None,
    v: Any = None,
    kv: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    scale_axes: str | None = None,
    block_size: int | None = None,
    null_block: int | None = None,
    window: int | None = None,
    ownership: bool = False,
) -> KVLayout:
    """The layout of a pool whose layers are all alike.

    Args:
        engine: Its name in reports.
        axes: The axes of ``k``, ``v`` and ``kv``, see `kvcanary_agent.adapters.api.words`.
        k, v, kv, k_scale, v_scale: A tensor, or a list with one for each layer. ``kv`` is one of both.
        scale_axes: The axes of the scales.
        block_size: Slots of a block, where ``axes`` has ``slots``; 1 if it is left out. With ``tokens`` it is compared.
        null_block: The block that padding points at, if there is one.
        window: Of sliding-window attention, in tokens.
        ownership: Whether the adapter will tell of every block allocated, shared and freed, and by which request.

    Raises:
        LayoutError: If a tensor does not fit its axes, or the tensors do not fit each other.
        WordsError: If ``axes`` do not say where the slots are.
    """
    buffers = {"k": k, "v": v, "kv": kv, "k_scale": k_scale, "v_scale": v_scale}
    found = {part: value for part, value in buffers.items() if value is not None}
    words = {}
    for part in found:
        text = scale_axes if part.endswith("_scale") else axes
        if text is None:
            raise LayoutError(f"{part} is given without scale_axes; add them, for example 'blocks tokens heads'")
        words[part] = axes_of(text, splits_kv=part == "kv")
    parts = parts_of(found, words, block_size)
    group = KVGroup(
        name="full" if window is None else "sliding_window",
        block_size=parts[0].view.shape[1],
        parts=parts,
        null_block=null_block,
        window=window,
    )
    return KVLayout(engine=engine, groups=(group,), reports_ownership=ownership)


def parts_of(
    buffers: Mapping[str, Any],
    axes: Mapping[str, Sequence[str]],
    block_size: int | None = None,
    names: Sequence[str] | None = None,
) -> tuple[KVPart, ...]:
    """The parts of every layer, in the order of layers.

    Args:
        buffers: By part (`kvcanary_agent.adapters.api.words.PARTS`): a tensor, or a list with one for each layer.
        axes: By part: the names of its axes, the outermost first.
        block_size: Slots of a block, for axes with ``slots``; None: 1. With ``tokens``, which say it, it is compared.
        names: Of the layers; None: ``layers.0``, ``layers.1`` and so on.

    Raises:
        LayoutError: If a tensor does not fit its axes.
    """
    by_layer: dict[int, list[KVPart]] = {}
    for part in sorted(buffers, key=PARTS.index):
        for index, tensor, words in _layers(part, buffers[part], tuple(axes[part])):
            for name, view, rest in _split(part, tensor, words):
                layer = f"layers.{index}" if names is None or index >= len(names) else names[index]
                view = _by_slot(f"{layer}.{name}", view, rest, block_size)
                by_layer.setdefault(index, []).append(KVPart(layer=layer, part=name, view=view))
    if not by_layer:
        raise LayoutError("there are no buffers: neither k, v nor kv is given, or all of them are empty lists")
    return tuple(part for index in sorted(by_layer) for part in by_layer[index])


def _layers(part: str, value: Any, axes: tuple[str, ...]) -> list[tuple[int, torch.Tensor, tuple[str, ...]]]:
    if isinstance(value, torch.Tensor):
        tensors = [value]
    elif isinstance(value, (list, tuple)):
        tensors = list(value)
    else:
        raise LayoutError(f"{part} is a {type(value).__name__}, wanted a tensor, or a list with one for each layer")
    found: list[tuple[int, torch.Tensor, tuple[str, ...]]] = []
    for index, tensor in enumerate(tensors):
        where = f"{part}[{index}]" if len(tensors) > 1 else part
        if not isinstance(tensor, torch.Tensor):
            raise LayoutError(f"{where} is a {type(tensor).__name__}, wanted a tensor")
        if tensor.dim() != len(axes):
            raise LayoutError(
                f"{where} has shape {tuple(tensor.shape)}, which is {tensor.dim()} axes, but {len(axes)} are named: "
                f"{' '.join(axes)}"
            )
        if "layers" not in axes:
            found.append((index, tensor, axes))
            continue
        if len(tensors) > 1:
            raise LayoutError(f"{part} is a list of {len(tensors)} tensors, but its axes have layers: one tensor")
        at = axes.index("layers")
        rest = (*axes[:at], *axes[at + 1 :])
        found += [(layer, tensor.select(at, layer), rest) for layer in range(tensor.shape[at])]
    return found


def _split(part: str, tensor: torch.Tensor, axes: tuple[str, ...]) -> list[tuple[str, torch.Tensor, tuple[str, ...]]]:
    if "kv" not in axes:
        return [(part, tensor, axes)]
    at = axes.index("kv")
    if tensor.shape[at] != 2:
        raise LayoutError(f"{part} has shape {tuple(tensor.shape)}: axis {at}, named kv, has {tensor.shape[at]}, not 2")
    rest = (*axes[:at], *axes[at + 1 :])
    return [("k", tensor.select(at, 0), rest), ("v", tensor.select(at, 1), rest)]


def _by_slot(name: str, view: torch.Tensor, axes: tuple[str, ...], block_size: int | None) -> torch.Tensor:
    """The view as ``[blocks, tokens, payload]``."""
    if "slots" in axes:
        at, size = axes.index("slots"), block_size or 1
        if view.shape[at] % size:
            raise LayoutError(f"{name} has {view.shape[at]} slots, which is no multiple of block_size {size}")
        # unflatten, which the stubs do not type
        view = view.view(*view.shape[:at], view.shape[at] // size, size, *view.shape[at + 1 :])
        axes = (*axes[:at], *_LEADING, *axes[at + 1 :])
    elif "tokens" not in axes:
        at = axes.index("blocks")
        view = view.unsqueeze(at + 1)
        axes = (*axes[: at + 1], "tokens", *axes[at + 1 :])
    order = [axes.index(axis) for axis in _LEADING]
    view = view.permute(*order, *(at for at in range(len(axes)) if at not in order))
    if block_size is not None and view.shape[1] != block_size:
        raise LayoutError(f"{name} has {view.shape[1]} tokens in a block, but block_size is {block_size}")
    return view
