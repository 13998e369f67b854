"""Choices of schedules that are kept in files."""

from penstock.relational._tune import Choices, schedules


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
