"""Train a GPT-2, built from a configuration, with Hugging Face's Trainer and its activations on disk.

Needs the `hf` extra.

python examples/hugging_face.py --disk /nvme
"""

import argparse
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from penstock.integrations import PenstockCallback
from penstock.units import format_bytes


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--disk", default=".", help="a directory on an SSD")
    options.add_argument("--budget", default="320MiB", help="bytes of the device; the default is for the default sizes")
    options.add_argument("--layers", type=int, default=6)
    options.add_argument("--width", type=int, default=256)
    options.add_argument("--steps", type=int, default=5)
    flags = options.parse_args()

    config = GPT2Config(vocab_size=512, n_positions=256, n_embd=flags.width, n_layer=flags.layers, n_head=4)
    texts = [{"input_ids": row, "labels": row} for row in torch.randint(512, (64, 256))]
    callback = PenstockCallback(budget=flags.budget, disk=flags.disk)
    with tempfile.TemporaryDirectory() as folder:
        settings = {"max_steps": flags.steps, "logging_steps": 1, "report_to": "none", "save_strategy": "no"}
        arguments = TrainingArguments(folder, learning_rate=3e-4, **settings)
        Trainer(GPT2LMHeadModel(config), arguments, train_dataset=texts, callbacks=[callback]).train()
    summary = callback.summary()
    assert summary is not None
    print(f"{format_bytes(summary.parked_bytes)} moved in {summary.num_cycles} steps")
    print(summary)


if __name__ == "__main__":
    main()
