"""The account of a call that takes either a `Budget` or its tiers one by one."""

from penstock.tiers import Budget, DiskSpec, Size


def account_of(budget: Size | Budget | None, host: Size | None, disk: DiskSpec, call: str) -> Budget:
    """Return the given `Budget`, or make one of the separate arguments.

    ``call`` is a call that works, for messages. Raises ``ValueError`` if both are given, or no tier.
    """
    if isinstance(budget, Budget):
        if disk is not None or host is not None:
            raise ValueError(
                "`host` and `disk` must be either inside the Budget or separate arguments, not both: "
                "budget=Budget(device='6GiB', host='8GiB', disk='/nvme')"
            )
        account = budget
    else:
        account = Budget(device=budget, host=host, disk=disk)
    if account.host_bytes is None and not account.disk_bytes and not account.tiers:
        raise ValueError(
            "there is no place to offload to: give `disk` (a directory on an SSD) or, on an accelerator, `host` (bytes "
            f"of host memory): {call}"
        )
    return account
