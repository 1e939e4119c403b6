"""The metrics of several processes as one exposition."""

from prometheus_client.parser import text_string_to_metric_families

from gateway.base.metrics import Metrics, summed


def values(exposition: bytes) -> dict[str, float]:
    return {
        sample.name + "".join(f"{{{v}}}" for v in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(exposition.decode())
        for sample in family.samples
    }


def told(requests: int, seconds: float, *, has_room: bool, is_up: bool) -> bytes:
    metrics = Metrics()
    metrics.requests.add(("/v1/messages", "200"), requests)
    metrics.waited_seconds.observe(seconds)
    metrics.watch_journal(lambda: 3, lambda: 0, lambda: 10, lambda: has_room, lambda: 0, 100)
    metrics.engine_up.labels("engine").set(is_up)
    return metrics.exposition()


def test_counts_are_added_and_what_all_see_alike_is_not() -> None:
    one, other = told(3, 0.1, has_room=True, is_up=True), told(4, 7.0, has_room=False, is_up=False)
    found = values(summed([one, other]))
    assert found["holdfast_gateway_requests_total{/v1/messages}{200}"] == 7
    assert found["holdfast_gateway_waited_seconds_count"] == 2
    assert found["holdfast_gateway_waited_seconds_sum"] == 7.1
    assert found["holdfast_gateway_waited_seconds_bucket{+Inf}"] == 2
    assert found["holdfast_gateway_journal_backlog"] == 6
    assert found["holdfast_gateway_journal_max_bytes"] == 200
    assert found["holdfast_gateway_journal_has_room"] == 0
    assert found["holdfast_gateway_engine_up{engine}"] == 1


def test_one_process_alone_is_told_as_it_tells_itself() -> None:
    one = told(3, 0.1, has_room=True, is_up=True)
    assert values(summed([one])) == values(one)


def test_of_a_process_that_ended_its_counts_remain_and_no_gauge() -> None:
    gone = summed([b"", told(3, 0.1, has_room=True, is_up=True)], only_counts=True)
    found = values(gone)
    assert found["holdfast_gateway_requests_total{/v1/messages}{200}"] == 3
    assert found["holdfast_gateway_waited_seconds_count"] == 1
    assert not {name for name in found if "journal" in name or "engine_up" in name}
    assert "process_cpu_seconds_total" in found  # a counter too: it never goes back
