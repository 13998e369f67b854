"""A small GPT in plain PyTorch, which the demo, the tests and the benchmarks train."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from penstock.arguments import checked


class GPT(nn.Module):
    """A decoder of ``num_layers`` pre-norm blocks, over bytes by default; ``forward`` returns the mean cross-entropy.

    ``tokens`` and ``targets`` are ``int64`` of shape ``[batch, length]`` with ``length <= context``. ``checkpointed``
    recomputes every block in backward instead of saving its activations.
    """

    @checked(
        "GPT(num_layers=2, width=64, num_heads=4, context=128)",
        num_layers=0,
        width=1,
        num_heads=1,
        context=1,
        vocabulary=1,
    )
    def __init__(
        self,
        *,
        num_layers: int,
        width: int,
        num_heads: int,
        context: int,
        vocabulary: int = 256,
        checkpointed: bool = False,
    ):
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(GPTBlock(width, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.checkpointed = checkpointed

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss, a scalar."""
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class GPTBlock(nn.Module):
    """A block of attention and a feed-forward layer of four times the width, each after a layer norm."""

    def __init__(self, width: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output: ``[batch, length, width]``, the shape of ``x``."""
        x = x + self.projection(self._attention(self.norm1(x)))
        expanded: torch.Tensor = functional.gelu(self.expand(self.norm2(x)))
        contracted: torch.Tensor = self.contract(expanded)
        return x + contracted

    def _attention(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = self.qkv(x).view(batch, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, length, width)
