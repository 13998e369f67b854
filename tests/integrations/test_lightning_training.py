"""LightningOffload(method="training"): a model whose state exceeds the budget trains as without it."""

import gc

import pytest
import torch

from loops import assert_same_parameters, texts
from penstock import probe
from penstock.integrations import LightningOffload

lightning = pytest.importorskip("lightning.pytorch")
pytest.importorskip("transformers")
from test_lightning import ByHand, Text, _quiet, disk, pytestmark  # noqa: E402, F401  # fixtures


def fit(module, folder, *callbacks, resume=None, **options):
    torch.manual_seed(0)
    trainer = lightning.Trainer(
        max_steps=6,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=list(callbacks),
        **{"enable_checkpointing": False, "limit_val_batches": 0, **options},
    )
    rows = torch.utils.data.DataLoader(texts(), batch_size=4)
    trainer.fit(module, rows, torch.utils.data.DataLoader(texts(8), batch_size=4), ckpt_path=resume)
    return trainer


def callback_for(module, disk, size_kib=2300):  # noqa: F811
    gc.collect()
    own_bytes = sum(parameter.nbytes for parameter in module.parameters())
    return LightningOffload(budget=probe.held_bytes("cpu") - own_bytes + size_kib * 1024, disk=disk, method="training")


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Text, {}),
        (Text, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
        (Text, {"limit_val_batches": 2, "val_check_interval": 2}),
        (Text, {"precision": "bf16-mixed"}),
        (ByHand, {}),
    ],
    ids=["plain", "accumulated", "validated", "bf16", "by hand"],
)
def test_trains_as_without_it(tmp_path, disk, kind, options):  # noqa: F811
    plain = kind()
    fit(plain, tmp_path, **options)
    losses = plain.losses
    ours = kind()
    callback = callback_for(ours, disk)
    try:
        fit(ours, tmp_path, callback, **options)
        assert ours.losses == losses != []
        assert callback.summary().fetched_bytes > 0
    finally:
        callback.close()
    assert_same_parameters(plain, ours)
    assert "tolist" not in torch.Tensor.__dict__


def test_checkpoints_are_lightnings_and_go_on_to_the_bit(tmp_path, disk):  # noqa: F811
    every = {"enable_checkpointing": True, "limit_train_batches": 3}  # saved where an epoch ends

    def saving(folder):
        return lightning.callbacks.ModelCheckpoint(folder, every_n_train_steps=3, save_top_k=-1, filename="{step}")

    fit(Text(), tmp_path, saving(tmp_path / "plain"), **every)
    plain = Text()
    fit(plain, tmp_path, saving(tmp_path / "plain"), resume=tmp_path / "plain" / "step=3.ckpt", **every)
    ours = Text()
    callback = callback_for(ours, disk)
    try:
        trainer = fit(ours, tmp_path, callback, saving(tmp_path / "saved"), **every)
        assert "save_checkpoint" not in vars(trainer.strategy.checkpoint_io)
    finally:
        callback.close(discard=True)
    stored = sorted(path.name for path in (tmp_path / "saved").iterdir())
    assert stored == ["step=3.ckpt", "step=6.ckpt"]
    again = Text()
    callback = callback_for(again, disk)
    try:
        fit(again, tmp_path, callback, saving(tmp_path / "saved"), resume=tmp_path / "saved" / "step=3.ckpt", **every)
    finally:
        callback.close()
    assert again.losses == plain.losses != []
    assert_same_parameters(plain, again)


def test_misuse_is_told(disk, tmp_path):  # noqa: F811
    class Two(Text):
        def configure_optimizers(self):
            return [torch.optim.SGD(self.gpt.parameters(), lr=0.1), torch.optim.SGD(self.gpt.parameters(), lr=0.1)]

        def training_step(self, batch, index):
            raise AssertionError

    with pytest.raises(ValueError, match="requires a budget"):
        LightningOffload(disk=disk, method="training")
    with pytest.raises(TypeError, match="potatoes"):
        LightningOffload(budget="1GiB", disk=disk, method="training", potatoes=12)
    module = Two()
    module.automatic_optimization = False
    with pytest.raises(ValueError, match="must return one optimizer"):
        fit(module, tmp_path, LightningOffload(budget="1GiB", disk=disk, method="training"))
