"""LightningOffload: Lightning's Trainer trains as without it, within its budget, and nothing stays behind."""

import contextlib
import gc
import logging
import pickle
import sys

import pytest
import torch

from loops import EVERYTHING, TIGHT, assert_same_parameters, everything_parked, gpt2, nothing_left, texts
from penstock import probe, tiers
from penstock.errors import BudgetError
from penstock.integrations import LightningOffload

lightning = pytest.importorskip("lightning.pytorch")
pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*Checkpoint directory.*"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:.*litlogger.*"),
]


@pytest.fixture(autouse=True)
def _quiet():
    for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)


@pytest.fixture
def disk(tmp_path):
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


class Text(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.gpt = gpt2()
        self.losses = []

    def on_train_epoch_start(self):
        torch.manual_seed(self.current_epoch)

    def training_step(self, batch, index):
        loss = self.gpt(**batch).loss
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, index):
        self.losses.append(self.gpt(**batch).loss.item())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class ByHand(Text):
    """Manual optimisation, two forwards a batch."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        for _ in range(2):
            loss = super().training_step(batch, index)
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()


class Lbfgs(Text):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=2)


class Skips(Text):
    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        return None if index == 1 else loss


class StopsEpochs(Text):
    """Ends each epoch at its third batch, which has a start and no end."""

    def on_train_batch_start(self, batch, index):
        return -1 if index == 2 else None


def fit(model, folder, *callbacks, kind=lightning, resume=None, **changes):
    options = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "limit_train_batches": 4,
        "limit_val_batches": 1,
        "num_sanity_val_steps": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
    }
    trainer = kind.Trainer(callbacks=list(callbacks), **options | changes)
    trainer.fit(model, *loaders(), ckpt_path=resume, **({"weights_only": False} if resume else {}))
    return trainer


def loaders():
    return [torch.utils.data.DataLoader(texts(), batch_size=8) for _ in range(2)]


class Check(lightning.Callback):
    """Every batch has parked something by its end, and nothing of it is alive then."""

    def __init__(self, callback):
        self.callback, self.parked = callback, []

    def on_train_batch_end(self, *_):
        offloader = self.callback._loop.offloader
        for waterfall in offloader._waterfalls.values():
            waterfall.drain()
        statistics = offloader.tier_statistics()
        assert statistics.num_live_handles == statistics.held_bytes["disk"] == 0
        self.parked.append(statistics.parked_bytes)


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        (Text, {}),
        (Text, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
        (Text, {"val_check_interval": 1}),
        (Text, {"precision": "bf16-mixed"}),
        (ByHand, {}),
        (Lbfgs, {}),
        (StopsEpochs, {"max_epochs": 2}),
        (Skips, {}),
    ],
    ids=["plain", "accumulated", "validated", "bf16", "by hand", "lbfgs", "stops", "skips"],
)
@pytest.mark.filterwarnings("ignore:.*training_step. returned .None")
def test_trains_as_without_it(tmp_path, disk, model, changes):
    plain, less = model(), model()
    fit(plain, tmp_path, **changes)
    callback = LightningOffload(disk=disk, **EVERYTHING)
    with nothing_left(less, disk), everything_parked():
        fit(less, tmp_path, callback, check := Check(callback), **changes)
    assert plain.losses == less.losses != []
    assert_same_parameters(plain, less)
    assert check.parked == sorted(set(check.parked)) and check.parked[0] > 0
    assert callback.summary().written_to_disk_bytes == callback.summary().parked_bytes > 0
    per_batch = {ByHand: 2, Lbfgs: 2}.get(model, 1)
    skipped = {Skips: 1}.get(model, 0)
    assert callback.summary().num_cycles == len(check.parked) * per_batch - skipped


class Measured(lightning.Callback):
    """The true peak of forward and backward of the last batches; earlier ones are the offloader's to measure."""

    def __init__(self, first=6):
        self.first, self.reports = first, []
        self._open = contextlib.ExitStack()

    def on_train_batch_start(self, trainer, module, batch, index):
        if index >= self.first:
            self.recording = self._open.enter_context(probe.record_memory("cpu"))

    def on_after_backward(self, trainer, module):
        if trainer.fit_loop.epoch_loop.batch_progress.current.started > self.first:
            self._open.close()
            self.reports.append(self.recording.report)


@pytest.mark.parametrize("changes", [{}, {"accumulate_grad_batches": 2}], ids=["one", "accumulated"])
def test_a_shared_budget_is_kept_with_the_optimizer_state_in_it(tmp_path, disk, collected, changes):
    plain = Text()
    fit(plain, tmp_path, measured := Measured(), limit_train_batches=8, **changes)
    most = max(measured.reports, key=lambda report: report.peak_bytes)
    expected = plain.losses
    del plain
    gc.collect()
    account = tiers.Budget(device=most.start_bytes + int(0.7 * most.activation_bytes), disk=disk)
    model, callback = Text(), LightningOffload(budget=account, **TIGHT)
    with nothing_left(model, disk):
        fit(model, tmp_path, callback, measured := Measured(), limit_train_batches=8, **changes)
    assert model.losses == expected
    assert len(measured.reports) == 2
    assert max(report.peak_bytes for report in measured.reports) <= account.device_bytes < most.peak_bytes
    assert account.peak_bytes(str(disk)) > 0
    assert account.held_bytes(str(disk)) == 0


def test_a_budget_that_cannot_be_met_is_refused(tmp_path, disk):
    model = Text()
    static_bytes = 2 * sum(parameter.nbytes for parameter in model.parameters())
    with nothing_left(model, disk), pytest.raises(BudgetError, match="needs at least"):
        fit(model, tmp_path, LightningOffload(budget=static_bytes + 2**18, disk=disk, **TIGHT))


def test_figures_reach_the_logger_and_a_summary_closes(tmp_path, disk, caplog):
    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(tmp_path / "logs")
    callback = LightningOffload(disk=disk, **EVERYTHING)
    with everything_parked(), caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        logging.getLogger("lightning.pytorch").propagate = True
        trainer = fit(Text(), tmp_path, callback, logger=logger, log_every_n_steps=1)
    rows = (tmp_path / "logs" / "lightning_logs" / "version_0" / "metrics.csv").read_text().splitlines()
    assert len(rows) == 5
    parked, stalls = (rows[0].split(",").index(f"penstock/{name}") for name in ("parked_gib", "stall_share"))
    assert all(float(row.split(",")[parked]) > 0 and 0 <= float(row.split(",")[stalls]) <= 1 for row in rows[1:])
    assert trainer.callback_metrics["penstock/parked_gib"] > 0
    assert [record.getMessage() for record in caplog.records].count(str(callback.summary())) == 1


def test_without_logs_nothing_is_logged(tmp_path, disk):
    trainer = fit(Text(), tmp_path, LightningOffload(disk=disk, logs=False, **EVERYTHING))
    assert not trainer.callback_metrics


class Fault(lightning.Callback):
    def __init__(self, moment, kind):
        self.moment, self.kind = moment, kind

    def on_train_batch_start(self, trainer, module, batch, index):
        self._raise("start", trainer)

    def on_before_backward(self, trainer, module, loss):
        self._raise("forward", trainer)

    def on_after_backward(self, trainer, module):
        self._raise("backward", trainer)

    def on_validation_start(self, trainer, module):
        self._raise("validation", trainer)

    def _raise(self, moment, trainer):
        if moment == self.moment and trainer.global_step == 2:
            raise self.kind(moment)


@pytest.fixture(scope="module")
def plain_text(tmp_path_factory, one_thread_for_the_module):
    plain = Text()
    fit(plain, tmp_path_factory.mktemp("plain"))
    return plain


@pytest.mark.parametrize(
    ("moment", "kind"),
    [
        ("start", RuntimeError),
        ("forward", KeyboardInterrupt),
        ("backward", RuntimeError),
        ("validation", RuntimeError),
        ("inside", RuntimeError),
        ("inside", KeyboardInterrupt),
    ],
)
def test_after_a_fault_nothing_is_left_and_fit_goes_again(tmp_path, disk, moment, kind, plain_text):
    plain, model = plain_text, Text()
    callback = LightningOffload(disk=disk, budget=2**40, **TIGHT)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def fault(*_):
        if model.trainer.global_step == 2:
            raise kind(moment)

    handle = model.gpt.transformer.h[1].ln_1.weight.register_hook(fault) if moment == "inside" else None
    expected = SystemExit if kind is KeyboardInterrupt else kind  # as Lightning has it
    with nothing_left(model, disk), pytest.raises(expected):
        fit(model, tmp_path, callback, Fault(moment, kind), val_check_interval=2)
    assert callback.summary().parked_bytes > 0
    gc.collect()
    if handle is not None:
        handle.remove()
    model.load_state_dict(before)
    model.losses.clear()
    model.train().zero_grad()
    with nothing_left(model, disk):
        fit(model, tmp_path, callback)
    assert model.losses == plain.losses
    assert_same_parameters(plain, model)


def test_fit_twice_with_one_callback(tmp_path, disk):
    plain, model = Text(), Text()
    callback = LightningOffload(disk=disk, **EVERYTHING)
    with nothing_left(model, disk), everything_parked():
        for _ in range(2):
            fit(plain, tmp_path)
            fit(model, tmp_path, callback)
            assert callback.summary().num_cycles == 4
    assert plain.losses == model.losses
    assert_same_parameters(plain, model)


def test_checkpoints_have_plain_names_and_resume_either_way(tmp_path, disk):
    plain, less = Text(), Text()
    fit(plain, tmp_path).save_checkpoint(tmp_path / "plain.ckpt")
    fit(less, tmp_path, LightningOffload(disk=disk, **EVERYTHING)).save_checkpoint(tmp_path / "less.ckpt")
    first, second = (torch.load(tmp_path / name, weights_only=False) for name in ("plain.ckpt", "less.ckpt"))
    assert first["state_dict"].keys() == second["state_dict"].keys()
    assert first["callbacks"] == second["callbacks"] == {}
    plain, less = Text(), Text()
    fit(plain, tmp_path, max_epochs=2, resume=tmp_path / "less.ckpt")
    with nothing_left(less, disk):
        callback = LightningOffload(disk=disk, **EVERYTHING)
        fit(less, tmp_path, callback, max_epochs=2, resume=tmp_path / "plain.ckpt")
    assert callback.summary().num_cycles == 4
    assert plain.losses == less.losses
    assert_same_parameters(plain, less)


def test_the_other_lightning(tmp_path, disk):
    """``pytorch_lightning`` has classes of its own; the callback is of both, once both are imported."""
    other = pytest.importorskip("pytorch_lightning")
    callback = LightningOffload(disk=disk, **EVERYTHING)
    assert isinstance(callback, LightningOffload | lightning.Callback)
    assert isinstance(callback, other.Callback)
    methods = ("on_train_epoch_start", "training_step", "validation_step", "configure_optimizers")
    module = type("OtherText", (other.LightningModule,), {name: vars(Text)[name] for name in methods})()
    module.gpt, module.losses = gpt2(), []
    with nothing_left(module, disk):
        fit(module, tmp_path, callback, kind=other)
    plain = Text()
    fit(plain, tmp_path)
    assert module.losses == plain.losses
    assert callback.summary().parked_bytes > 0


def test_unknown_options_and_a_missing_extra_are_told(disk, monkeypatch):
    with pytest.raises(TypeError, match="minsize.*min_size"):
        LightningOffload(disk=disk, minsize=1)
    for name in ("lightning.pytorch", "pytorch_lightning"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "lightning", None)
    with pytest.raises(ImportError, match=r"penstock\[lightning\]"):
        LightningOffload(disk=disk)


def test_a_callback_can_be_sent_to_another_process(disk):
    callback = LightningOffload(budget="1GiB", disk=str(disk), logs=False)
    again = pickle.loads(pickle.dumps(callback))
    assert isinstance(again, LightningOffload)
    assert (again._options, again._logs) == (callback._options, False)
