"""What every controller of the admin API has in common."""

from litestar import Controller

from gateway.http.auth import AdminAuth
from gateway.http.query import check_query


class AdminController(Controller):
    """Every request needs a key that may see what it asks for.

    Every query parameter must be what the description of the API says.
    """

    middleware = (AdminAuth,)
    before_request = staticmethod(check_query)
