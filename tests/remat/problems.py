"""Random training steps, as the planner sees them."""

import random

from hypothesis import strategies as st

from penstock.remat import Operator, RematProblem, Storage, plan


def keep_all_bytes(problem):
    """The peak of a step that keeps everything."""
    return plan(problem, 2**62).keep_all_peak_bytes


def random_problem(seed, num_forward=None):
    """Forward operators that read any earlier storage, backward operators that read anything."""
    choices = random.Random(seed)
    num_forward = num_forward or choices.randint(1, 12)
    operators, storages = [], []
    for index in range(num_forward + choices.randint(1, num_forward + 4)):
        is_forward = index < num_forward
        inputs = tuple({choices.randrange(len(storages)) for _ in range(choices.randint(0, 4))}) if storages else ()
        num_outputs = choices.choice([1, 1, 1, 2]) if is_forward else 1
        outputs = tuple(range(len(storages), len(storages) + num_outputs))
        storages += [
            Storage(
                name=f"s{number}",
                size_bytes=choices.randint(0, 100),
                producer=index,
                is_output=choices.random() < (0.1 if is_forward else 0.3),
            )
            for number in outputs
        ]
        operators.append(
            Operator(
                name=f"o{index}",
                target="any",
                inputs=inputs,
                outputs=outputs,
                duration_s=choices.choice([0.0, 0.1, 1.0, 2.5]),
                workspace_bytes=choices.randint(0, 30),
                must_run_once="it must not" if is_forward and choices.random() < 0.1 else "",
            )
        )
    return RematProblem(
        operators=tuple(operators),
        num_forward=num_forward,
        storages=tuple(storages),
        static_bytes=choices.choice([0, 1000]),
        out_bandwidth_bytes_per_s=choices.choice([0.0, 10.0, 100.0, 1000.0]),
        in_bandwidth_bytes_per_s=choices.choice([10.0, 100.0, 1000.0]),
        swap_page_bytes=choices.choice([0, 3]),
    )


def chain(num_layers, *, size_bytes=100, duration_s=1.0, **fields):
    """A chain of layers, each of which backward needs the input of; the classic case of recomputation."""
    operators, storages = [], []
    for index in range(num_layers):
        inputs = (index - 1,) if index else ()
        storages.append(Storage(name=f"x{index}", size_bytes=size_bytes, producer=index))
        operators.append(Operator(name=f"f{index}", target="f", inputs=inputs, outputs=(index,), duration_s=duration_s))
    for index in reversed(range(num_layers)):
        number = len(storages)
        gradient = (number - 1,) if index < num_layers - 1 else ()
        storages.append(Storage(name=f"g{index}", size_bytes=size_bytes, producer=len(operators)))
        operators.append(
            Operator(name=f"b{index}", target="b", inputs=(index, *gradient), outputs=(number,), duration_s=duration_s)
        )
    return RematProblem(operators=tuple(operators), num_forward=num_layers, storages=tuple(storages), **fields)


problems = st.integers(0, 2**32).map(random_problem)
