"""The operations on workspaces and keys."""

from gateway.admin.keys import KeyInfo, MadeKey, NewKey, Revoked, Rotation
from gateway.admin.operation import ADMIN_KEYS, READING, Operation, path, query
from gateway.admin.workspaces import NewWorkspace, WorkspaceChanges, WorkspaceReport
from gateway.base.errors import TooLarge, UnsupportedMedia
from gateway.ledger.workspaces import Workspace

_CHANGING = (*READING, TooLarge, UnsupportedMedia)
_WORKSPACES = "/admin/v1/workspaces"
_WORKSPACE = f"{_WORKSPACES}/{{workspace_id}}"
_KEYS = "/admin/v1/keys"
_KEY = f"{_KEYS}/{{key_id}}"

ACCESS_OPERATIONS = (
    Operation(
        id="listWorkspaces",
        method="get",
        path=_WORKSPACES,
        summary="Workspaces and their limits; without an admin key, one's own.",
        replies=(list[Workspace],),
        security=ADMIN_KEYS,
        errors=READING,
    ),
    Operation(
        id="createWorkspace",
        method="post",
        path=_WORKSPACES,
        summary="Make a workspace.",
        replies=(WorkspaceReport,),
        body=NewWorkspace,
        security=ADMIN_KEYS,
        errors=_CHANGING,
    ),
    Operation(
        id="getWorkspace",
        method="get",
        path=_WORKSPACE,
        summary="One workspace, its limits, and what its month has cost.",
        replies=(WorkspaceReport,),
        security=ADMIN_KEYS,
        parameters=(path("workspace_id"),),
        errors=READING,
    ),
    Operation(
        id="changeWorkspace",
        method="post",
        path=_WORKSPACE,
        summary="Change a workspace's name or limits.",
        replies=(WorkspaceReport,),
        body=WorkspaceChanges,
        security=ADMIN_KEYS,
        parameters=(path("workspace_id"),),
        errors=_CHANGING,
    ),
    *(
        Operation(
            id=f"{action}Workspace",
            method="post",
            path=f"{_WORKSPACE}/{action}",
            summary=summary,
            replies=(WorkspaceReport,),
            security=ADMIN_KEYS,
            parameters=(path("workspace_id"),),
            errors=READING,
        )
        for action, summary in (
            ("archive", "Switch all keys of a workspace off."),
            ("restore", "Switch them on again."),
        )
    ),
    Operation(
        id="listKeys",
        method="get",
        path=_KEYS,
        summary="Keys without their secrets; without an admin key, those of one's own workspace.",
        replies=(list[KeyInfo],),
        security=ADMIN_KEYS,
        parameters=(query("workspace", {"type": "string", "maxLength": 64}),),
        errors=READING,
    ),
    Operation(
        id="createKey",
        method="post",
        path=_KEYS,
        summary="Make a key of a workspace, and show it this once.",
        replies=(MadeKey,),
        body=NewKey,
        security=ADMIN_KEYS,
        errors=_CHANGING,
    ),
    Operation(
        id="rotateKey",
        method="post",
        path=f"{_KEY}/rotate",
        summary="Make a key's successor, and show it this once; the old one ends after a grace.",
        replies=(MadeKey,),
        body=Rotation,
        security=ADMIN_KEYS,
        parameters=(path("key_id"),),
        errors=_CHANGING,
    ),
    Operation(
        id="revokeKey",
        method="post",
        path=f"{_KEY}/revoke",
        summary="End a key.",
        replies=(Revoked,),
        security=ADMIN_KEYS,
        parameters=(path("key_id"),),
        errors=READING,
    ),
)
