"""The engine: requests in, tokens out, one step at a time."""

from collections.abc import Sequence as List
from dataclasses import dataclass
from itertools import count

from kvcanary_agent.demo.block_manager import BlockManager
from kvcanary_agent.demo.config import EngineConfig
from kvcanary_agent.demo.model_runner import ModelRunner
from kvcanary_agent.demo.scheduler import Scheduler
from kvcanary_agent.demo.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A finished request: `outputs[i]` are the tokens of its i-th continuation."""

    request_id: str
    outputs: tuple[tuple[int, ...], ...]


class Engine:
    """Continuous batching over one model and one KV pool. Not thread-safe: use it from one thread.

    Decoding is greedy. Of a request for `n` continuations, the i-th begins with the i-th likeliest token.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.block_manager = BlockManager(config.num_blocks, config.block_size)
        self.scheduler = Scheduler(
            self.block_manager, max_num_seqs=config.max_num_seqs, max_batched_tokens=config.max_batched_tokens
        )
        self.runner = ModelRunner(config)
        self._numbers = count()
        # Of each unfinished request, the tokens of each continuation, None until that is finished.
        self._outputs: dict[str, list[tuple[int, ...] | None]] = {}

    @property
    def is_idle(self) -> bool:
        return not self._outputs

    def add_request(self, prompt: List[int], *, max_tokens: int, n: int = 1, request_id: str | None = None) -> str:
        """Queue a request and return its id, which is made up if none is given.

        Raises ValueError for a prompt or a number that the engine cannot serve, for the id of an unfinished request,
        and for an id with a "/", which marks the ids of continuations.
        """
        config = self.config
        if not prompt or not all(0 <= token < config.model.vocab_size for token in prompt):
            raise ValueError(f"prompt must be one or more token ids from 0 to {config.model.vocab_size - 1}")
        if max_tokens < 1 or len(prompt) + max_tokens > config.max_model_len:
            raise ValueError(
                f"{len(prompt)} prompt tokens and max_tokens={max_tokens}; max_tokens must be at least 1, and both "
                f"together at most {config.max_model_len}"
            )
        if not 1 <= n <= config.max_num_seqs:
            raise ValueError(f"n is {n}, but must be from 1 to {config.max_num_seqs}")
        if request_id is None:
            request_id = f"request-{next(self._numbers)}"
        if "/" in request_id:
            raise ValueError(f'request id {request_id!r} contains "/"; choose another id')
        if request_id in self._outputs:
            raise ValueError(f"request {request_id!r} is not finished yet; choose another id")
        self._outputs[request_id] = [None] * n
        self.scheduler.add(
            Sequence(
                request_id=request_id,
                root_id=request_id,
                token_ids=list(prompt),
                num_prompt_tokens=len(prompt),
                max_tokens=max_tokens,
                n=n,
            )
        )
        return request_id

    def step(self) -> list[RequestOutput]:
        """Run the model once, and return the requests that this finished."""
        schedule = self.scheduler.schedule()
        if not schedule.rows:
            return []
        if schedule.block_copies:
            self.runner.copy_blocks(schedule.block_copies)
        logits = self.runner.forward(self.runner.build_batch(schedule.rows))
        ranked_tokens = logits.topk(max(seq.n for seq, _ in schedule.rows)).indices.tolist()
        finished = []
        for seq in self.scheduler.update(schedule, ranked_tokens):
            self._outputs[seq.root_id][seq.sample_index] = tuple(seq.output_ids)
            outputs = tuple(tokens for tokens in self._outputs[seq.root_id] if tokens is not None)
            if len(outputs) == len(self._outputs[seq.root_id]):
                del self._outputs[seq.root_id]
                finished.append(RequestOutput(request_id=seq.root_id, outputs=outputs))
        return finished

    def generate(self, prompts: List[List[int]], *, max_tokens: int, n: int = 1) -> list[RequestOutput]:
        """Serve `prompts` to the end, together with whatever else is queued, and return their outputs in order."""
        request_ids = [self.add_request(prompt, max_tokens=max_tokens, n=n) for prompt in prompts]
        finished: dict[str, RequestOutput] = {}
        while not all(request_id in finished for request_id in request_ids):
            finished |= {output.request_id: output for output in self.step()}
        return [finished[request_id] for request_id in request_ids]

    def abort(self, request_id: str) -> None:
        """Drop a request with all its continuations. A request that is unknown or finished is left alone."""
        if self._outputs.pop(request_id, None) is not None:
            self.scheduler.remove(request_id)

    def abort_all(self) -> None:
        """Drop every request and every cached prefix: after a failed step nothing in the pool can be relied on."""
        for request_id in list(self._outputs):
            self.abort(request_id)
        self.block_manager.reset_prefix_cache()
