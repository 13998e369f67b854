"""The assignment of jobs to nodes, and moves between them."""

from penstock.integrations._ray_plan import JobLoad, Move, NodeLoad, assign, move


def load(name, remaining_s=None, **options):
    return JobLoad(name=name, remaining_s=remaining_s, **options)


def test_the_longest_goes_first_to_the_node_with_least_to_do():
    nodes = [
        NodeLoad(name="a", num_devices=1, jobs=(load("old", 5.0, size_bytes=1),)),
        NodeLoad(name="b", num_devices=1),
    ]
    assigned = assign(nodes, [load("short", 1.0), load("long", 9.0), load("middle", 3.0)])
    assert [(assignment.job, assignment.node) for assignment in assigned] == [
        ("long", "b"),
        ("middle", "a"),
        ("short", "b"),
    ]


def test_nodes_take_no_more_than_two_jobs_per_device_and_one_while_sizes_are_unknown():
    node = NodeLoad(name="a", num_devices=2)
    waiting = [load(str(number), 1.0) for number in range(6)]
    assert len(assign([node], waiting)) == 2
    assert len(assign([node], [load(str(number), 1.0, size_bytes=1) for number in range(6)])) == 4


def test_jobs_wait_for_host_memory_but_an_empty_node_takes_one():
    node = NodeLoad(name="a", num_devices=2, host_bytes=100)
    sized = [load(str(number), 1.0, size_bytes=60) for number in range(3)]
    assert [assignment.job for assignment in assign([node], sized)] == ["0"]
    large = load("large", 1.0, size_bytes=1000)
    assert [assignment.job for assignment in assign([node], [large])] == ["large"]


def test_a_job_moves_where_that_ends_sooner_than_it_costs():
    idle = NodeLoad(name="b", num_devices=1)
    both = (load("x", 100.0, begin_s=5.0), load("y", 90.0, begin_s=5.0))
    loaded = NodeLoad(name="a", num_devices=1, jobs=both)
    assert move([loaded, idle]) == Move(job="y", source="a", target="b")
    assert move([loaded]) is None
    dear = NodeLoad(name="a", num_devices=1, jobs=tuple(load(job.name, job.remaining_s, begin_s=200.0) for job in both))
    assert move([dear, idle]) is None
    leaving = NodeLoad(name="a", num_devices=1, jobs=tuple(load(job.name, 90.0, can_move=False) for job in both))
    assert move([leaving, idle]) is None
    paused = NodeLoad(name="a", num_devices=1, jobs=(both[0], load("z", 0.0, is_paused=True)))
    assert move([paused, idle]) is None
