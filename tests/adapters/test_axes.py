"""Axes in words: for any order of them, what a slot's view holds is what the pool holds for that slot."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcanary_agent.adapters.api.axes import layout, parts_of
from kvcanary_agent.adapters.api.words import AXES, WordsError, axes_of
from kvcanary_agent.canary import LayoutError

SIZES = {"layers": 3, "kv": 2, "blocks": 5, "tokens": 4, "slots": 20, "heads": 6, "dim": 7, "x": 8}


@st.composite
def axes(draw: st.DrawFn) -> tuple[str, ...]:
    """Axes in which the slots of a pool can be found."""
    place = draw(st.sampled_from([("blocks", "tokens"), ("slots",), ("blocks",)]))
    more = draw(st.sets(st.sampled_from(["layers", "kv", "heads", "dim", "x"])))
    return tuple(draw(st.permutations([*place, *sorted(more)])))


@given(axes())
def test_every_slot_is_seen_with_all_that_it_holds(words: tuple[str, ...]) -> None:
    pool = torch.arange(torch.Size([SIZES[word] for word in words]).numel()).view([SIZES[word] for word in words])
    block_size = 4 if "slots" in words else None
    assert axes_of(" ".join(words), splits_kv=True) == words
    parts = parts_of({"kv": pool}, {"kv": words}, block_size)
    layers, halves = SIZES["layers"] if "layers" in words else 1, 2 if "kv" in words else 1
    assert [part.name for part in parts] == [
        f"layers.{layer}.{part}" for layer in range(layers) for part in (("k", "v") if halves == 2 else ("kv",))
    ]
    for index, part in enumerate(parts):
        blocks, size = part.view.shape[:2]
        assert size == (1 if words and "tokens" not in words and "slots" not in words else 4)
        for slot in range(blocks * size):
            seen = set(part.view[slot // size, slot % size].flatten().tolist())
            place = {"blocks": slot // size, "tokens": slot % size, "slots": slot}
            place |= {"layers": index // halves, "kv": index % halves}
            here = pool[tuple(place.get(word, slice(None)) for word in words)]
            assert seen == set(here.flatten().tolist())
        assert part.view.untyped_storage().data_ptr() == pool.untyped_storage().data_ptr()


@given(st.lists(st.sampled_from([*AXES, "block", "head"]), max_size=7))
def test_any_words_are_axes_or_an_error(words: list[str]) -> None:
    try:
        found = axes_of(" ".join(words), splits_kv=True)
    except WordsError:
        return
    assert ("blocks" in found) != ("slots" in found)
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("blocks tokens head dim", "'head' is no axis; did you mean heads?"),
        ("blocks blocks", "blocks is there twice"),
        ("blocks requests", "blocks and requests are the same axis"),
        ("tokens dim", "it needs either blocks (or requests) or slots"),
        ("blocks slots", "it needs either blocks (or requests) or slots"),
        ("slots tokens", "slots are blocks and tokens in one axis"),
        ("kv blocks tokens", "an axis kv is for a tensor of both"),
    ],
)
def test_wrong_words_say_what_is_accepted(words: str, said: str) -> None:
    with pytest.raises(WordsError) as caught:
        axes_of(words, splits_kv=False)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            {"k": torch.zeros(6, 2), "axes": "slots dim", "block_size": 4},
            "6 slots, which is no multiple of block_size",
        ),
        ({"kv": torch.zeros(3, 4, 2), "axes": "kv blocks dim"}, "axis 0, named kv, has 3, not 2"),
        ({"k": [torch.zeros(2, 4, 2)] * 2, "axes": "layers blocks dim"}, "its axes have layers: one tensor"),
        ({"k": torch.zeros(4, 2), "axes": "blocks dim", "k_scale": torch.zeros(4)}, "without scale_axes"),
        ({"axes": "blocks dim"}, "there are no buffers"),
    ],
)
def test_tensors_that_do_not_fit_their_axes_are_an_error(more: dict[str, object], said: str) -> None:
    with pytest.raises(LayoutError) as caught:
        layout("e", **more)  # type: ignore[arg-type]
    assert said in str(caught.value)


def test_scales_have_axes_of_their_own() -> None:
    described = layout(
        "e",
        k=[torch.zeros(4, 2, 8)] * 2,
        k_scale=[torch.zeros(4, 2)] * 2,
        axes="blocks tokens dim",
        scale_axes="blocks tokens",
    )
    names = [part.name for part in described.groups[0].parts]
    assert names == ["layers.0.k", "layers.0.k_scale", "layers.1.k", "layers.1.k_scale"]
