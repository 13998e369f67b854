"""The Trainers' integrations with two processes under DDP: each rank trains as the same two do without offloading."""

import contextlib
import logging
import os
import tempfile
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from loops import EVERYTHING, assert_same_parameters, everything_parked, gpt2, nothing_left, texts
from penstock.integrations import LightningOffload, PenstockCallback, offloading
from penstock.tiers import Budget
from ranks import NUM_RANKS, run_in_ranks


def hugging_face(folder, disk):
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=3, gradient_accumulation_steps=2, per_device_train_batch_size=4,
        ddp_find_unused_parameters=False, use_cpu=True, save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip

    def train(callback):
        trainer = Trainer(gpt2(), arguments, train_dataset=texts(), callbacks=callback and [callback])
        loss = trainer.train().training_loss
        assert isinstance(trainer.model_wrapped, DistributedDataParallel)
        return trainer.model, loss

    plain, expected = train(None)
    callback = PenstockCallback(disk=disk, **EVERYTHING)
    with everything_parked():
        model, loss = train(callback)
    assert loss == expected
    account = Budget(device="1GiB")
    planned, loss = train(PenstockCallback(budget=account, method="remat"))
    assert loss == expected
    assert_same_parameters(plain, planned)
    assert account.peak_bytes("device") > sum(parameter.nbytes for parameter in planned.parameters())
    return plain, model, callback.summary(), 6


def accelerate(folder, disk):
    from accelerate import Accelerator

    def train(around):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = gpt2()
        loader = torch.utils.data.DataLoader(texts(), batch_size=4)
        wrapped, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), loader)
        assert isinstance(wrapped, DistributedDataParallel)
        with around(accelerator, wrapped) as offloader:
            for batch in loader:
                with accelerator.accumulate(wrapped):
                    accelerator.backward(wrapped(**batch).loss)
                    optimizer.step()
                    optimizer.zero_grad()
        return model, offloader

    plain, _ = train(lambda *_: contextlib.nullcontext())
    with everything_parked():
        model, offloader = train(lambda *arguments: offloading(*arguments, disk=disk, **EVERYTHING))
    return plain, model, offloader.summary(), 8


def lightning(folder, disk):
    import lightning.pytorch as lightning

    class Text(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.gpt = gpt2()

        def training_step(self, batch, index):
            return self.gpt(**batch).loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train(*callbacks):
        model = Text()
        trainer = lightning.Trainer(
            accelerator="cpu", devices=NUM_RANKS, strategy="ddp", max_epochs=1, accumulate_grad_batches=2,
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=folder, callbacks=list(callbacks),
        )  # fmt: skip
        trainer.fit(model, torch.utils.data.DataLoader(texts(), batch_size=4))
        assert trainer.world_size == NUM_RANKS
        return model

    plain = train()
    callback = LightningOffload(disk=disk, **EVERYTHING)
    with everything_parked():
        model = train(callback)
    return plain, model, callback.summary(), 8


def _rank(rank, train, folder):
    for logger in ("transformers", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(NUM_RANKS), "LOCAL_WORLD_SIZE": str(NUM_RANKS),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
    }  # fmt: skip
    disk = Path(tempfile.mkdtemp(dir=folder))
    with nothing_left(gpt2(), disk):
        plain, model, summary, num_cycles = train(folder, disk)
    assert_same_parameters(plain, model)
    assert summary.num_cycles == num_cycles
    assert summary.written_to_disk_bytes == summary.parked_bytes > 0
    digest = torch.stack([parameter.detach().double().sum() for parameter in model.parameters()])
    both = [torch.empty_like(digest) for _ in range(NUM_RANKS)]
    torch.distributed.all_gather(both, digest)
    assert torch.equal(*both)


@pytest.mark.parametrize("train", [hugging_face, accelerate, lightning])
def test_two_ranks_train_as_without_it(tmp_path, train):
    pytest.importorskip({"hugging_face": "transformers"}.get(train.__name__, train.__name__))
    run_in_ranks(_rank, train, tmp_path, directory=tmp_path)
