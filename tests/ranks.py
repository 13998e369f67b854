"""Functions called in several processes of one group, for tests of what trains on several ranks."""

import datetime as dt
import faulthandler
import pickle

import torch
from torch import distributed, multiprocessing

NUM_RANKS = 2
TIME_LIMIT_S = 600
"""What hangs ends before the test's own limit does, with the stacks of all threads of the rank."""


def run_in_ranks(function, *arguments, directory, num_ranks=NUM_RANKS):
    """Calls ``function(rank, *arguments)`` in processes of a gloo group, which meet by a file in ``directory``."""
    start_ranks(function, *arguments, directory=directory, num_ranks=num_ranks).join()


def start_ranks(function, *arguments, directory, num_ranks=NUM_RANKS):
    """Starts the processes of `run_in_ranks`, and returns them."""
    call = pickle.dumps((function, arguments))
    return multiprocessing.start_processes(
        _in_a_group, (call, str(directory), num_ranks), nprocs=num_ranks, start_method="forkserver", join=False
    )


def _in_a_group(rank, call, directory, num_ranks):
    faulthandler.dump_traceback_later(TIME_LIMIT_S, exit=True)
    torch.set_num_threads(1)
    store = distributed.FileStore(f"{directory}/store", num_ranks)
    patience = dt.timedelta(seconds=TIME_LIMIT_S / 2)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=patience)
    try:
        function, arguments = pickle.loads(call)
        function(rank, *arguments)
        distributed.barrier()  # a rank that leaves earlier may take its half of what the other waits for
    finally:
        distributed.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()
