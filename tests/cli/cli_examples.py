"""Files beside which every example of the command line works, and stand-ins for what takes too long."""

from contextlib import contextmanager
from types import SimpleNamespace

TRAIN = """
import torch
from torch import nn

print("a user's file may print")

def make_step():
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())])
    return (lambda x: model(x).square().mean()), [torch.randn(64, 64)]

def make():
    print("and so may a factory")
    return nn.Linear(8, 8), torch.randn(4, 8)
"""
JOBS = """
import torch
from torch import nn
from penstock.fleet import Job

def make_job(lr, batch):
    return Job(
        name="gpt",
        model=lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)),
        data=lambda: [(torch.ones(batch, 4), torch.zeros(batch, 1))] * 8,
        loss=lambda model, batch: ((model(batch[0]) - batch[1]) ** 2).mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr),
        steps=3,
    )
"""
SWEEP = "job: jobs.py:make_job\nparameters: {lr: [1e-2, 1e-3], batch: [4]}\n"
PROBLEM = (
    "{jobs: [{name: gpt, copies: 6, num_steps: 5, shards: [{copies: 4, forward_s: 0.1, backward_s: 0.2, "
    "parameter_bytes: 400MB}]}], devices: [{name: cuda, copies: 2, in_bandwidth_bytes_per_s: 25GB/s}]}\n"
)


def write_files(folder):
    for name, text in {"train.py": TRAIN, "jobs.py": JOBS, "sweep.yaml": SWEEP, "problem.yaml": PROBLEM}.items():
        (folder / name).write_text(text)


def option(name, *, is_refused=False, peak_bytes=100, ratio=1.0):
    return SimpleNamespace(
        name=name,
        is_refused=is_refused,
        reason="it fits",
        peak_bytes=peak_bytes,
        ratio=ratio,
        code=f"{name}(model)",
        is_measured=True,
    )


def advise(model, batch, budget, *, loss=None, optimizer=None, host=None, disk=None, rounds=5, progress=None):
    """In the shape of `penstock.advise`."""
    options = (option("plain", is_refused=True, peak_bytes=900), option("offload", ratio=1.1))
    return SimpleNamespace(options=options, best=options[1], explain=lambda: "offload fits:\n\n    offload(model)",
        smallest_bytes=90, plain_peak_bytes=900, notes=(),
    )  # fmt: skip


class DemoChild:
    """A training process of the demo that has trained before it was asked."""

    def __init__(self, method, is_capped):
        self.hello = {"static_bytes": 10, "num_parameters": 10}
        self.method, self.is_capped = method, is_capped

    def ask(self, command, *, may_fail=False):
        if self.method == "plain" and self.is_capped:
            return {"error": "can't allocate memory"}
        if command == "step":
            offloaded = {"parked_bytes": 5, "stall_s": 0.0, "written_to_disk_bytes": 5}
            moved = {"step_fetched": {"parameters": 5}, "step_parked": {"parameters": 4}}
            beside = {"offload": {"offload": offloaded}, "training": {"training": moved}}.get(self.method, {})
            return {"loss": (2.0).hex(), "step_s": 1.0, "timeline": [(0.0, 10)]} | beside
        if command == "finish":
            return {"swapped_bytes": 3} if self.method == "remat" else {}
        sizes = {"peak_bytes": 110, "start_bytes": 10, "activation_bytes": 100, "rss_bytes": 200}
        return sizes | {"timeline": [(0.0, 10), (1.0, 110)]}


@contextmanager
def demo_child(*arguments):
    """In the place of `_demo.child`."""
    method = arguments[arguments.index("--method") + 1] if "--method" in arguments else "plain"
    yield DemoChild(method, "--cap" in arguments)
