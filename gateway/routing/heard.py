"""Takes in what other processes of the gateway told of engines (`news.py`)."""

from gateway.base.errors import NotFound
from gateway.routing.engine import Engine
from gateway.routing.fleet import Fleet
from gateway.routing.news import Answered, Assigned, Broke, Ended, News


def take_news(fleet: Fleet, news: News, now: float) -> Engine | None:
    """Take in what another process told. Return its engine, and None if that is not here."""
    try:
        engine = fleet.find(news.engine)
    except NotFound:
        return None  # it was removed here, and there it will be
    load, holdings, breaker = engine.load, engine.holdings, engine.breaker
    match news:
        case Assigned():
            load.assign(
                news.turn,
                news.to_prefill,
                now,
                is_batch=news.is_batch,
                workspace=news.workspace,
            )
            breaker.sent(news.turn, now)
            holdings.expect_names(news.expected, now)
        case Answered():
            load.started(news.turn, news.computed, now)
            breaker.answered()
            if news.receipt is not None:
                holdings.learn_receipt(news.epoch, news.receipt, news.names, now)
        case Ended():
            if news.is_returned:
                load.returned(news.turn, now)
            load.ended(news.turn)
            if news.is_success:
                breaker.succeeded()
            breaker.left(news.turn)
            holdings.disappoint_names(news.disappointed)
        case Broke():
            breaker.failed(news.turn, now)
    return engine
