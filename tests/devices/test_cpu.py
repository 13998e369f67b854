"""Main memory as a device."""

import torch

from penstock import devices


def test_main_memory_has_neither_streams_nor_a_counting_allocator():
    backend = devices.backend_of("cpu")
    assert (backend.streams, backend.allocator) == (None, None)
    backend.finish()
    backend.finish_current()
    assert backend.is_on_default_stream()
    assert backend.seconds(lambda: sum(range(1000))) > 0
    free_bytes, total_bytes = backend.memory_bytes()
    assert 0 < free_bytes <= total_bytes
    assert backend.name


def test_random_states_of_main_memory_go_there_and_back():
    backend = devices.backend_of("cpu")
    state = backend.random_state()
    drawn = torch.rand(3)
    backend.set_random_state(state)
    assert torch.equal(torch.rand(3), drawn)
    with devices.random_forked([torch.device("cpu")]):
        torch.rand(5)
    after = torch.rand(3)
    backend.set_random_state(state)
    torch.rand(3)
    assert torch.equal(torch.rand(3), after)
