"""An independent check of a tier plan."""

import torch

from penstock.arguments import checked
from penstock.errors import InternalError
from penstock.unified._plan import TierPlan
from penstock.unified._problem import TierProblem


@checked("penstock.unified.verify(problem, plan)")
def verify(problem: TierProblem, plan: TierPlan) -> None:
    """Raise ``InternalError`` if rows are missing or doubled, budgets exceeded, or a better row is in a lower tier."""
    seen = torch.zeros(problem.num_rows, dtype=torch.int64, device="cpu")
    for rows in (plan.device_rows, plan.host_rows):
        seen.index_add_(0, rows, torch.ones(len(rows), dtype=torch.int64, device="cpu"))
    if plan.answering is not None:
        assert problem.peers is not None
        is_elsewhere = plan.answering >= 0
        if bool((plan.answering >= problem.peers.num_machines).any() | (plan.answering == problem.peers.machine).any()):
            raise InternalError("a row is at a machine that does not exist, or at this one and elsewhere")
        if plan.num_replicated_rows > len(plan.host_rows):
            raise InternalError("more rows are in every memory than in this one")
        if int(is_elsewhere.sum()) != plan.num_peer_rows + plan.num_peer_disk_rows:
            raise InternalError("other machines answer for more or fewer rows than the plan counts")
        seen += is_elsewhere
    num_seen = int(seen.sum()) + (0 if plan.answering is not None else plan.num_peer_rows + plan.num_peer_disk_rows)
    if bool((seen > 1).any()) or num_seen + plan.num_disk_rows != problem.num_rows:
        raise InternalError("a row is in two tiers, or in none")
    if len(plan.device_rows) * problem.row_bytes > problem.device_bytes:
        raise InternalError("the device's rows exceed its budget")
    if problem.host_bytes is not None and len(plan.host_rows) * problem.row_bytes > problem.host_bytes:
        raise InternalError("the host's rows exceed its budget")
    if problem.scores is None:
        return
    scores = problem.scores.double()
    below = seen == 0 if plan.peers is None or plan.answering is not None else torch.zeros_like(seen, dtype=torch.bool)
    tiers = [scores[plan.device_rows], scores[plan.host_rows], scores[below]]
    for number, upper in enumerate(tiers):
        for lower in tiers[number + 1 :]:
            if len(upper) and len(lower) and float(upper.min()) < float(lower.max()):
                raise InternalError("a row has a higher score than a row in a faster tier")
