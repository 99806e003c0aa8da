"""A program around transformers for the suite to command, with and without the agent: session.py MODELS.

``MODELS`` is the folder of the tiny models. When transformers is imported it prints ``READY``. Each line of its
standard input is a command in JSON, answered by one line, ``RESULT`` and JSON. What a command does is the function of
that name below, its keyword arguments are the rest of the command. Closing the standard input ends it.

``batch`` and ``generate`` take a ``fault``: before the forward whose number is ``at``, something is broken in the
cache, see `_FAULTS`. The layouts are those of the engine, spelled out here independently of how the agent finds them.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

Tokens = list[list[int]]


@functools.cache
def _model(name: str) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(Path(sys.argv[1], name)).eval()


def _inputs(prompts: Tokens) -> dict[str, torch.Tensor]:
    """The prompts in one batch, filled up on the left."""
    longest = max(map(len, prompts))
    return {
        "input_ids": torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts]),
        "attention_mask": torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
    }


Fault = dict[str, Any]


@contextlib.contextmanager
def _broken(model: Any, fault: Fault | None) -> Iterator[None]:
    """Within it, the model's cache is broken once."""
    forwards = 0

    def before_forward(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        nonlocal forwards
        forwards += 1
        if fault is not None and forwards == fault["at"]:
            with torch.inference_mode():
                _FAULTS[fault["kind"]](kwargs["cache"], fault)

    hook = model.register_forward_pre_hook(before_forward, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def _flip(payload: torch.Tensor) -> None:
    payload.view(torch.int32)[0] ^= 1 << 20


def _row_bit(cache: Any, fault: Fault) -> None:
    """One bit of the fourth column of the first row."""
    layer = cache.layers[fault["layer"]]
    _flip((layer.keys if fault["part"] == "k" else layer.values)[0, -1, 3])


def _swap_rows(cache: Any, fault: Fault) -> None:
    """What the first two rows of one layer hold changes places."""
    values = cache.layers[fault["layer"]].values
    values[[0, 1]] = values[[1, 0]]


def _keep_rows(cache: Any, fault: Fault) -> None:
    """From now on one layer does not take part when beams are reordered."""
    cache.layers[fault["layer"]].reorder_cache = lambda beam_idx: None


def _other_rows(cache: Any, _fault: Fault) -> None:
    """From now on beams are reordered the other way round."""
    cache.reorder_cache = lambda beam_idx: type(cache).reorder_cache(cache, beam_idx.flip(0))


def _allocator(cache: Any, fault: Fault) -> Any:
    return cache.layer_to_allocator[fault.get("layer", 0) % cache.config.num_hidden_layers]


def _page_bit(cache: Any, fault: Fault) -> None:
    """One bit of the fourth token of the first page of the first request."""
    allocator = _allocator(cache, fault)
    table = next(iter(allocator.block_table.values()))
    k, v = allocator._kv_token_views[fault["layer"] % cache.config.num_hidden_layers]
    _flip((k if fault["part"] == "k" else v)[table[0] * allocator.block_physical_stride + 3, -1])


def _swap_pages(cache: Any, fault: Fault) -> None:
    """The first two pages of the first request change places in its table."""
    table = next(iter(_allocator(cache, fault).block_table.values()))
    table[0], table[1] = table[1], table[0]


def _free_in_use(cache: Any, fault: Fault) -> None:
    """Every page that requests hold is put among the free ones."""
    allocator = _allocator(cache, fault)
    held = [block for table in allocator.block_table.values() for block in table]
    cache.pool._free_blocks[allocator.index].trees.clear()
    cache.pool._free_blocks[allocator.index]._length = 0
    cache.pool.free_blocks(allocator.index, held)


_FAULTS: dict[str, Callable[[Any, Fault], None]] = {
    "row_bit": _row_bit,
    "swap_rows": _swap_rows,
    "keep_rows": _keep_rows,
    "other_rows": _other_rows,
    "page_bit": _page_bit,
    "swap_pages": _swap_pages,
    "free_in_use": _free_in_use,
}


def batch(
    *,
    model: str,
    prompts: Tokens,
    max_tokens: int,
    answers: int = 1,
    options: dict[str, Any],
    fault: Fault | None = None,
) -> Tokens:
    """Continuous batching: the new tokens of each request."""
    generation = transformers.GenerationConfig(
        max_new_tokens=max_tokens, do_sample=answers > 1, num_return_sequences=answers, eos_token_id=-1
    )
    batching = transformers.ContinuousBatchingConfig(**{"page_size": 16, "num_blocks": 128, "seed": 7, **options})
    built = _model(model)
    with _broken(built, fault), _unpinned():
        outputs = built.generate_batch(
            prompts, generation_config=generation, continuous_batching_config=batching, progress_bar=False
        )
    assert not any(output.error for output in outputs.values())
    return [list(output.generated_tokens) for output in outputs.values()]


@contextlib.contextmanager
def _unpinned() -> Iterator[None]:
    """Within it, memory that is to be pinned is not: there is no device to pin it for, but moving there is the same."""
    empty = torch.empty
    torch.empty = lambda *args, pin_memory=False, **kwargs: empty(*args, **kwargs)
    try:
        yield
    finally:
        torch.empty = empty


def generate(
    *,
    model: str,
    prompts: Tokens,
    max_tokens: int,
    assistant: str | None = None,
    options: dict[str, Any],
    fault: Fault | None = None,
) -> Tokens:
    """Plain ``generate``: the tokens of each sequence."""
    torch.manual_seed(0)
    helper = {} if assistant is None else {"assistant_model": _model(assistant)}
    built = _model(model)
    with _broken(built, fault):
        sequences = built.generate(
            **_inputs(prompts), **helper, max_new_tokens=max_tokens, eos_token_id=-1, pad_token_id=0, **options
        )
    return [[int(token) for token in sequence] for sequence in sequences]


def turns(*, model: str, prompts: Tokens, max_tokens: int, kind: str, copied: bool) -> list[Tokens]:
    """Three turns of a conversation over one cache; ``copied``: each turn goes on with a copy of it."""
    built = _model(model)
    cache = {
        "dynamic": lambda: transformers.DynamicCache(config=built.config),
        "bare": transformers.DynamicCache,
        "static": lambda: transformers.StaticCache(config=built.config, max_cache_len=400),
    }[kind]()
    inputs = _inputs(prompts)
    answers = []
    for turn in range(3):
        cache = copy.deepcopy(cache) if copied else cache
        sequences = built.generate(
            **inputs, past_key_values=cache, max_new_tokens=max_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        answers.append(sequences.tolist())
        more = torch.full((len(prompts), 5), 7 + turn)
        ids = torch.cat([sequences, more], 1)
        mask = torch.cat([inputs["attention_mask"], ids.new_ones(len(prompts), max_tokens + 5)], 1)
        inputs = {"input_ids": ids, "attention_mask": mask}
    return answers


def loop(*, model: str, prompts: Tokens, max_tokens: int) -> Tokens:
    """A loop of the user's own around the model."""
    built = _model(model)
    cache = transformers.DynamicCache(config=built.config)
    ids = torch.tensor(prompts)
    chosen = []
    with torch.inference_mode():
        for _ in range(max_tokens):
            logits = built(input_ids=ids, past_key_values=cache, use_cache=True).logits
            ids = logits[:, -1:].argmax(-1)
            chosen.append(ids)
        # Half of the rows go on, each twice, after the last three tokens were taken back.
        cache.crop(-3)
        cache.batch_select_indices(torch.arange(0, len(prompts), 2))
        cache.batch_repeat_interleave(2)
        ids = chosen[-3][::2].repeat_interleave(2, 0)
        for _ in range(max_tokens):
            logits = built(input_ids=ids, past_key_values=cache, use_cache=True).logits
            ids = logits[:, -1:].argmax(-1)
            chosen.append(ids)
    return [[int(token) for token in tokens.flatten()] for tokens in chosen]


def train(*, model: str, prompts: Tokens) -> list[float]:
    """Three steps of training, and the losses."""
    torch.manual_seed(0)
    built = copy.deepcopy(_model(model)).train()
    optimizer = torch.optim.SGD(built.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        loss = built(input_ids=torch.tensor(prompts), labels=torch.tensor(prompts), use_cache=True).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def compiled(*, model: str, prompts: Tokens, max_tokens: int) -> Tokens:
    """A model whose forward is compiled (for the compiler's own eager backend), with a static cache."""
    built = copy.deepcopy(_model(model))
    built.forward = torch.compile(built.forward, backend="eager", dynamic=True)
    sequences: Tokens = built.generate(
        **_inputs(prompts),
        max_new_tokens=max_tokens,
        cache_implementation="static",
        disable_compile=True,
        do_sample=False,
        eos_token_id=-1,
        pad_token_id=0,
    ).tolist()
    return sequences


def caches() -> int:
    """How many caches are alive."""
    gc.collect()
    return sum(isinstance(each, transformers.Cache) for each in gc.get_objects())


_ACTIONS: dict[str, Callable[..., Any]] = {
    action.__name__: action for action in (batch, generate, turns, loop, train, compiled, caches)
}


def main() -> None:
    _say("READY")
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = _ACTIONS[command.pop("do")](**command)
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        _say(f"RESULT {json.dumps(answer)}")


def _say(line: str) -> None:
    # One write, so that no other thread's output gets in between.
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
