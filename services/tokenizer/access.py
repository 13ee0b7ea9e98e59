"""Who may do what: every path is denied unless it stands here or the caller is an operator.

Keys are compared by digest and in constant time, all of them, whichever fits. Leaves budgets to the scheduler.

open       health and readiness
clients    /v1/... and the native endpoints: any tenant's key, where there are keys
operators  everything else: the admin key, where there are any keys
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable

from starlette.types import Scope

from services.tokenizer.calls import Call
from services.tokenizer.errors import ApiError
from shared.config import TokenizerConfig
from shared.tenants import Tenant, TenantsError, check_keys, from_keys, read_file

OPEN = frozenset(("/health", "/ready", "/ping"))
CLIENT_PREFIX = "/v1/"
TEXT_ONLY = frozenset(  # work of this process alone: costs nothing of a budget
    (
        *("/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize", "/v1/messages/count_tokens"),
        *("/apply_chat_template", "/parse_function_call", "/separate_reasoning"),
    )
)
CLIENT = TEXT_ONLY | frozenset(
    (
        *("/generate", "/script", "/abort_request", "/unpin", "/open_session", "/close_session"),
        *("/health_generate", "/openapi.json", "/metrics"),
        *("/get_model_info", "/model_info", "/get_server_info", "/server_info", "/get_load", "/workers"),
    )
)
CONTROL = frozenset(("/abort_request", "/open_session", "/close_session", "/unpin"))
MAX_KEY_BYTES = 1024
SECRETS = ("api_key", "admin_api_key", "launch_key", "ssl_keyfile_password")  # settings nobody is shown


class Access:
    """The keys of one process."""

    def __init__(
        self,
        tenants: Iterable[Tenant],
        operators: Iterable[str],
        *,
        public_metrics: bool = False,
        root_path: str = "",
    ) -> None:
        self._salt = secrets.token_bytes(16)
        tenants = tuple(tenants)
        operators = tuple(operators)
        check_keys([*(key for tenant in tenants for key in tenant.keys), *operators])
        self._holders: list[tuple[bytes, Tenant | None]] = [
            *((self._digest(key.encode()), tenant) for tenant in tenants for key in tenant.keys),
            *((self._digest(key.encode()), None) for key in operators),
        ]
        self._has_tenants = bool(tenants)
        self._open = OPEN | {"/metrics"} if public_metrics else OPEN
        self._root = root_path.rstrip("/")

    @classmethod
    def of(cls, config: TokenizerConfig) -> Access:
        """The keys of a configuration. Raises TenantsError."""
        tenants = from_keys(_split(config.api_key, "--api-key"))
        if config.api_key_file:
            tenants += read_file(config.api_key_file)
        operators = _split(config.admin_api_key, "--admin-api-key")
        access = cls(tenants, operators, public_metrics=config.public_metrics, root_path=config.fastapi_root_path)
        if config.launch_key and access.guarded:
            access._holders.append((access._digest(config.launch_key.encode()), None))
        return access

    @property
    def guarded(self) -> bool:
        """Whether anybody has a key."""
        return bool(self._holders)

    def admit(self, scope: Scope) -> Call:
        """The call behind a request. Raises ApiError: 401 without a good key, 403 where it does not suffice."""
        path = self._route_path(scope["path"])
        if not self.guarded:
            return Call()
        key = _presented(scope)
        known, tenant = self._holder(key)
        if known and tenant is None:
            return Call()
        if not self.asks(path):
            return Call(is_operator=False)
        if not known:
            raise _unauthorized(key)
        assert tenant is not None
        if not _is_client(path):
            raise ApiError(403, "This needs an operator's key.", code="permission_denied")
        own = f"name:{tenant.name}" if not tenant.namespace else f"shared:{tenant.namespace}"
        return Call(tenant=tenant.name, isolation=own, is_operator=False)

    def asks(self, path: str) -> bool:
        """Whether this path needs a key, of anybody."""
        if not self.guarded or path in self._open:
            return False
        return self._has_tenants or not _is_client(path)

    def is_work(self, scope: Scope) -> bool:
        """Whether a request makes the server work for a client, rather than asks or commands."""
        path = self._route_path(scope["path"])
        if scope["method"] not in ("POST", "PUT") or path in CONTROL:
            return False
        return _is_client(path)

    def costs(self, scope: Scope) -> bool:
        """Whether a request that is work goes on to the scheduler, who counts it."""
        return self._route_path(scope["path"]) not in TEXT_ONLY

    def _route_path(self, path: str) -> str:
        """The path as routes see it: without the prefix of a proxy that does not take it away."""
        return path.removeprefix(self._root) if self._root and path.startswith(self._root + "/") else path

    def _holder(self, key: bytes) -> tuple[bool, Tenant | None]:
        """(known, tenant or None for an operator); looks at every key, so that time tells nothing."""
        digest = self._digest(key)
        known, found = False, None
        for other, tenant in self._holders:
            if hmac.compare_digest(digest, other):
                known, found = True, tenant
        return known, found

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, key=self._salt, digest_size=32).digest()


def _is_client(path: str) -> bool:
    return path in CLIENT or path.startswith(CLIENT_PREFIX)


def _presented(scope: Scope) -> bytes:
    """The key a request carries, empty without one."""
    own = b""
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, credentials = value.partition(b" ")
            return bytes(credentials.strip()[:MAX_KEY_BYTES]) if scheme.lower() == b"bearer" else b""
        if name == b"x-api-key":
            own = bytes(value[:MAX_KEY_BYTES])
    return own


def _unauthorized(key: bytes) -> ApiError:
    text = "The API key is not known." if key else "Send an API key: 'Authorization: Bearer KEY'."
    return ApiError(401, text, headers={"www-authenticate": "Bearer"})


def _split(keys: str, flag: str) -> list[str]:
    """Keys separated by commas. Raises TenantsError where something was given and it is no key."""
    found = [key.strip() for key in keys.split(",") if key.strip()]
    if keys and not found:
        raise TenantsError(f"{flag} holds no key: without keys everybody may do everything")
    return found
