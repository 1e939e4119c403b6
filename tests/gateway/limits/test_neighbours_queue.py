"""A turn that an engine refused is charged to its workspace once, as any other."""

from collections import Counter

from gateway.limits.fair_queue import FairQueue, Waiting


def test_a_workspace_whose_turns_are_refused_at_first_gets_as_many_served_as_another() -> None:
    queue: FairQueue[int] = FairQueue()
    for number in range(40):
        queue.push(Waiting("refused", None, 10, number))
        queue.push(Waiting("smooth", None, 10, number))
    served: Counter[str] = Counter()
    seen: set[int] = set()
    while served.total() < 40:
        waiting = queue.pop(lambda _: True)
        assert waiting is not None
        if waiting.workspace == "refused" and waiting.item not in seen:
            seen.add(waiting.item)
            queue.push(waiting, is_first=True)
        else:
            served[waiting.workspace] += 1
    assert abs(served["refused"] - served["smooth"]) <= 1, served
