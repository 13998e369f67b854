"""Cutting of a model for batches of several shapes."""

from fleet_jobs import batches, make_job, train, train_plainly


def test_batches_of_another_shape_are_cut_where_the_first_were():
    job = make_job(data=lambda: [*batches(2), *batches(1, batch=3, length=24), *batches(1, batch=1)])
    results = train([job], num_devices=1, budget="3MB")
    assert results["job"].error is None
    assert list(results["job"].losses) == train_plainly(job)[0]
