"""The pictures of the command line in the docs can be made anew."""

from benchmarks import cli_pictures


def test_a_picture_shows_the_output_of_its_command(tmp_path):
    plan, simulate = cli_pictures.pictures(tmp_path, ["plan", "fleet simulate"])
    assert "recomputed" in plan.read_text() and "scheduler" in simulate.read_text()
    assert "http" not in plan.read_text().replace("http://www.w3.org", "")  # loads no fonts
