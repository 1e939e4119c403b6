"""The operations on engines."""

from gateway.admin.engines import EngineReport, NewEngine, Removed
from gateway.admin.operation import ADMIN_KEYS, READING, Operation, path
from gateway.base.errors import TooLarge, UnsupportedMedia

_ENGINES = "/admin/v1/engines"
_ENGINE = f"{_ENGINES}/{{name}}"

ENGINE_OPERATIONS = (
    Operation(
        id="listEngines",
        method="get",
        path=_ENGINES,
        summary="State, description and statistics of each engine, and what routing knows of it.",
        replies=(list[EngineReport],),
        security=ADMIN_KEYS,
        errors=READING,
    ),
    Operation(
        id="addEngine",
        method="post",
        path=_ENGINES,
        summary="Add an engine until the gateway's next start.",
        replies=(EngineReport,),
        body=NewEngine,
        security=ADMIN_KEYS,
        errors=(*READING, TooLarge, UnsupportedMedia),
    ),
    *(
        Operation(
            id=f"{action}Engine",
            method="post",
            path=f"{_ENGINE}/{action}",
            summary=summary,
            replies=(EngineReport,),
            security=ADMIN_KEYS,
            parameters=(path("name"),),
            errors=READING,
        )
        for action, summary in (
            ("drain", "Send an engine no new turns."),
            ("resume", "Send an engine turns again."),
        )
    ),
    Operation(
        id="removeEngine",
        method="delete",
        path=_ENGINE,
        summary="Forget an engine on which nothing runs, until the gateway's next start.",
        replies=(Removed,),
        security=ADMIN_KEYS,
        parameters=(path("name"),),
        errors=READING,
    ),
)
