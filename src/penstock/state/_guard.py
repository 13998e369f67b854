"""Errors in place of null pointers: whoever asks for the memory of a page that has left is told whose it is.

A dispatch mode sees the operators of its own thread. Other threads, kernels that are called by address, DLPack and
queues it does not see, and an emptied storage would give them a null pointer. So its memory is refused
(`penstock.native.refuse_memory`), in every thread. Without a C++ compiler nothing is refused.

The same holds for pages on the device for which something is due, from the end of a step to the next: their bytes are
those of before.
"""

import torch

from penstock.native import allow_memory, refuse_memory
from penstock.state._page import Page, PageKind


def refuse_access(page: Page, storage: torch.UntypedStorage) -> None:
    """Let whoever asks for the memory of a page's storage get an error, unless it is a mere result.

    Results are the step's alone, and code such as DDP's compares the addresses of its buckets, wherever they are.
    """
    if page.kind is PageKind.OTHER:
        return
    why = "is yet to be updated" if page.is_here else "is in another tier now"
    page.is_refused = refuse_memory(
        storage,
        f"{page.label} {why}, and its training did not see that it is used: it sees what runs in the thread that made "
        "the training, and in threads that began later. Elsewhere, or for code that reads memory by address, bring it "
        "to the device first: with training.whole(module): ...",
    )


def allow_access(page: Page, storage: torch.UntypedStorage) -> None:
    """Undo `refuse_access`."""
    if page.is_refused:
        page.is_refused = False
        allow_memory(storage)
