"""Trains a GPT-2 built from a configuration with its activations on disk. Needs the `hf` extra.

python examples/hugging_face.py --disk /nvme
"""

import argparse
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import penstock
from penstock.units import format_bytes


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--disk", default=tempfile.gettempdir(), help="a directory on an SSD")
    options.add_argument("--layers", type=int, default=6)
    options.add_argument("--width", type=int, default=256)
    options.add_argument("--steps", type=int, default=5)
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = options.parse_args()

    config = GPT2Config(vocab_size=512, n_positions=256, n_embd=given.width, n_layer=given.layers, n_head=4)
    model = GPT2LMHeadModel(config).to(given.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    offloader = penstock.offload.activations(model, disk=given.disk)
    for step in range(given.steps):
        tokens = torch.randint(512, (8, 256), device=given.device)
        with offloader:
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        did = offloader.statistics()
        moved = f"{format_bytes(did.parked_bytes)} of {format_bytes(did.saved_bytes)} moved"
        print(f"step {step}: loss {loss.item():.3f}, {moved}")
    offloader.close()


if __name__ == "__main__":
    main()
