"""Choices of schedules that are kept in files, and the thread that compiles what they choose from."""

import threading

from penstock.relational._tune import Background, Choices, schedules


def test_a_damaged_file_of_choices_counts_as_none(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tried = schedules(16, 20)
    Choices("layer", "NVIDIA H200").keep("step1", (4, 2), tried[1])
    (file,) = tmp_path.rglob("*.json")
    assert Choices("layer", "NVIDIA H200").find("step1", (4, 2), tried) == tried[1]
    assert Choices("layer", "NVIDIA A100").find("step1", (4, 2), tried) is None
    assert Choices("layer", "NVIDIA H200").find("step1", (4, 2), tried[:1]) is None  # one that is no longer tried
    for text in ("", "[1, 2]", '{"step1 4x2": 3}', '{"step1 4x2": {"rows": 3}}', "\0"):
        file.write_text(text)
        choices = Choices("layer", "NVIDIA H200")
        assert choices.find("step1", (4, 2), tried) is None
    choices.keep("step1", (4, 2), tried[2])
    assert Choices("layer", "NVIDIA H200").find("step1", (4, 2), tried) == tried[2]


def test_jobs_run_in_order_beside_the_caller_and_the_thread_ends_with_the_last():
    background, seen = Background(), []
    go = threading.Event()
    futures = [background.submit(job) for job in (go.wait, lambda: seen.append(1), lambda: seen.append(2))]
    assert not any(future.done() for future in futures)
    go.set()
    background.wait()
    assert seen == [1, 2] and all(future.exception() is None for future in futures)
    for thread in threading.enumerate():
        if thread.name == "penstock schedules":
            thread.join()  # it has nothing left to do
    background.submit(lambda: seen.append(3))
    background.wait()
    assert seen == [1, 2, 3]


def test_a_job_that_fails_stops_no_other():
    background = Background()
    failed, fine = background.submit(lambda: 1 / 0), background.submit(lambda: None)
    background.wait()
    assert isinstance(failed.exception(), ZeroDivisionError) and fine.exception() is None


def test_the_end_of_the_process_waits_for_one_job_at_most():
    background, seen = Background(), []
    begun, go = threading.Event(), threading.Event()

    def first():
        begun.set()
        go.wait()
        seen.append(1)

    futures = [background.submit(first), background.submit(lambda: seen.append(2))]
    begun.wait()
    closer = threading.Thread(target=background.close)
    closer.start()
    while not futures[1].cancelled():
        pass
    go.set()
    closer.join()
    assert seen == [1]
