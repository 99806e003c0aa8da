"""How the axes of a pool's tensors are named: ``layers kv blocks tokens heads dim`` and so on.

====================  ==============================================================================================
``layers``            one index for each layer; without it there is one tensor for each layer, in a list
``kv``                index 0 holds keys, index 1 values
``blocks``            blocks of the pool; ``requests`` where each request has a row of its own: a block as long as that
``tokens``            slots of a block
``slots``             blocks and slots in one: slot s is token ``s % block_size`` of block ``s // block_size``
``heads dim x``       what a slot holds, in any order; every name at most once, none needed
====================  ==============================================================================================
"""

AXES = ("layers", "kv", "blocks", "requests", "tokens", "slots", "heads", "dim", "x")
PARTS = ("k", "v", "kv", "k_scale", "v_scale")


class WordsError(ValueError):
    """Axes that do not say where the slots of a pool are; the message says why, and what is accepted."""


def axes_of(words: str, *, splits_kv: bool) -> tuple[str, ...]:
    """The names in `words`, ``requests`` as ``blocks``.

    Args:
        words: Names of `AXES` with blanks between them, the outermost first.
        splits_kv: Whether the tensor holds keys and values, so that there may be an axis ``kv``.

    Raises:
        WordsError: If a name is unknown or there twice, or the slots cannot be told from it.
    """
    import difflib

    axes = words.split()
    for axis in axes:
        if axis not in AXES:
            near = difflib.get_close_matches(axis, AXES, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise WordsError(f"{axis!r} is no axis; {hint}accepted are {', '.join(AXES)}")
        if axes.count(axis) > 1:
            raise WordsError(f"{axis} is there twice")
    axes = ["blocks" if axis == "requests" else axis for axis in axes]
    if axes.count("blocks") > 1:
        raise WordsError("blocks and requests are the same axis")
    if ("slots" in axes) == ("blocks" in axes):
        raise WordsError("it needs either blocks (or requests) or slots")
    if "slots" in axes and "tokens" in axes:
        raise WordsError("slots are blocks and tokens in one axis: tokens cannot be there as well")
    if "kv" in axes and not splits_kv:
        raise WordsError("an axis kv is for a tensor of both, named by kv instead of keys and values")
    return tuple(axes)
