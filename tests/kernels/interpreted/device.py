"""A CPU that stands for a GPU: what a step launches, copies and allocates is counted, and to wait is an error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction

from kvcanary_agent.canary import claims

WAITS = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "masked_scatter",
    "equal",
    "is_nonzero",
    "unique",
    "_unique2",
    "unique_consecutive",
    "bincount",
    # A tensor made of numbers of the host, which is copied from memory that is not pinned.
    "lift_fresh",
)
WAITS_FOR_A_MASK = ("index", "index_put", "index_put_", "_index_put_impl_")
WAITS_FOR_A_LENGTH = ("repeat_interleave",)


class WaitedForTheDevice(AssertionError):
    """An operation whose result, or whose length, the host would have to wait for."""


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's, unannotated
    """What happens on the device.

    Attributes:
        kernels: Launches of Triton kernels, by name.
        operations: Operations of torch that launch something, by name; views launch nothing.
        copies: Between host and device, both ways.
        allocations: Operations that made new storage.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's, unannotated
        self.kernels: Counter[str] = Counter()
        self.operations: Counter[str] = Counter()
        self.copies = 0
        self.allocations: Counter[str] = Counter()
        self.host: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if name in WAITS:
            raise WaitedForTheDevice(name)
        if name in WAITS_FOR_A_MASK and any(
            isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.bool, torch.uint8) for leaf in tree_leaves(args[1])
        ):
            raise WaitedForTheDevice(f"{name} with a mask")
        if name in WAITS_FOR_A_LENGTH and kwargs.get("output_size") is None:
            raise WaitedForTheDevice(f"{name} without a length")
        result = func(*args, **kwargs)
        aliases = [returned.alias_info for returned in func._schema.returns]
        if any(alias is not None and not alias.is_write for alias in aliases):
            return result
        if any(tensor.data_ptr() in self.host for tensor in tensors):
            self.copies += 1
        else:
            self.operations[name] += 1
        known = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in known:
                self.allocations[name] += 1
        return result


class _Event:
    """The device is never late."""

    def record(self) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        raise WaitedForTheDevice("event")


@contextmanager
def a_device() -> Iterator[Callable[[], Any]]:
    """The CPU counts as a GPU; the value makes a `Watch` over what happens while it is entered."""
    host: set[int] = set()
    kept: list[torch.Tensor] = []
    watches: list[Watch] = []

    def pinned(make: Any) -> Any:
        def maker(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
            if not pin_memory:
                made: torch.Tensor = make(*args, **kwargs)
                return made
            with _disable_current_modes():
                made = make(*args, **kwargs)
            # Kept, so that no other tensor gets its address.
            kept.append(made)
            host.add(made.data_ptr())
            return made

        return maker

    def to(tensor: torch.Tensor, *args: Any, non_blocking: bool = False, **kwargs: Any) -> torch.Tensor:
        if tensor.data_ptr() not in host or not args or isinstance(args[0], torch.dtype):
            return original_to(tensor, *args, **kwargs)
        for watch in watches:
            if not non_blocking:
                raise WaitedForTheDevice("a copy from the host")
            watch.copies += 1
        with _disable_current_modes():
            return tensor.clone()

    def tolist(tensor: torch.Tensor) -> Any:
        if watches and tensor.data_ptr() not in host:
            raise WaitedForTheDevice("tolist")
        return original_tolist(tensor)

    def launch(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        for watch in watches:
            watch.kernels[kernel.fn.__name__] += 1
        with _disable_current_modes():
            return original_run(kernel, *args, **kwargs)

    def on_the_host(work: Any) -> Any:
        def worker(*args: Any, **kwargs: Any) -> Any:
            with _disable_current_modes():
                return work(*args, **kwargs)

        return worker

    @contextmanager
    def watching() -> Iterator[Watch]:
        watch = Watch()
        watch.host = host
        watches.append(watch)
        try:
            with watch:
                yield watch
        finally:
            watches.remove(watch)

    def always(device: torch.device) -> bool:
        return True

    original_to, original_tolist, original_run = torch.Tensor.to, torch.Tensor.tolist, InterpretedFunction.run
    with (
        patch("kvcanary_agent.kernels.transit.is_asynchronous", always),
        patch("kvcanary_agent.kernels.ring.is_asynchronous", always),
        patch("kvcanary_agent.canary.canary.is_asynchronous", always),
        patch.object(claims, "_chains", on_the_host(claims._chains)),
        patch.object(torch, "tensor", pinned(torch.tensor)),
        patch.object(torch, "zeros", pinned(torch.zeros)),
        patch.object(torch, "empty", pinned(torch.empty)),
        patch.object(torch.cuda, "Event", _Event),
        patch.object(torch.Tensor, "to", to),
        patch.object(torch.Tensor, "tolist", tolist),
        patch.object(InterpretedFunction, "run", launch),
    ):
        yield watching
