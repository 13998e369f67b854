"""Hooks on saved tensors that step aside while ``torch.func`` differentiates."""

import contextlib
import threading
from collections.abc import Iterator

import torch
from torch.autograd import graph

_mine = threading.local()
_lock = threading.Lock()
_threads: set[int] = set()
"""Threads that have such hooks; each has one pair at a time."""
_own = graph.disable_saved_tensors_hooks


class HooksBesideFunctional(graph.saved_tensors_hooks):
    """Hooks for all tensors that autograd saves in this thread, but for what ``torch.func`` differentiates.

    ``torch.func.grad`` and its kind refuse to run where any hooks are. While such hooks are open in the process,
    PyTorch's function by which it asks for their absence is replaced by one that takes ours off, and puts them back.
    """

    def __enter__(self) -> None:
        with _lock:
            _threads.add(threading.get_ident())
            graph.disable_saved_tensors_hooks = _without_ours
        super().__enter__()
        _mine.hooks = self.pack_hook, self.unpack_hook

    def __exit__(self, *error: object) -> None:
        _mine.hooks = None
        super().__exit__(*error)
        with _lock:
            _threads.discard(threading.get_ident())
            if not _threads and graph.disable_saved_tensors_hooks is _without_ours:
                graph.disable_saved_tensors_hooks = _own


def is_wrapped(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is one of functorch's, which has no memory of its own."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


@contextlib.contextmanager
def _without_ours(error_message: str) -> Iterator[None]:
    hooks = getattr(_mine, "hooks", None)
    if hooks is None or torch._C._autograd._top_saved_tensors_default_hooks(True) != hooks:  # type: ignore[attr-defined]
        with _own(error_message):  # none of ours, or others on top of them, which PyTorch refuses
            yield
        return
    torch._C._autograd._pop_saved_tensors_default_hooks()
    _mine.hooks = None
    try:
        with _own(error_message):
            yield
    finally:
        torch._C._autograd._push_saved_tensors_default_hooks(*hooks)
        _mine.hooks = hooks
