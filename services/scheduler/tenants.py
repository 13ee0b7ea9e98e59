"""What tenants may use and have used: buckets of requests and tokens for each. Leaves the keys to the tokenizer.

The scheduler is the one owner, so budgets hold however many frontends there are. Token buckets as in traffic shaping
(Turner, 1986): full at the start, a minute's worth deep. Tokens are paid for when they are known (the prompt at
admission, the answer at its end), so a bucket may go below zero; then nothing new of that tenant comes in until it is
above again.
"""

from __future__ import annotations

from collections.abc import Iterable

from services.scheduler.request import Request
from shared import ints
from shared.clock import Clock
from shared.messages.request import GenerateRequest, RequestRejected, TenantUsage
from shared.tenants import Tenant

MINUTE_S = 60.0


class Bucket:
    """`per_minute` units flow in evenly; 0: without limit."""

    def __init__(self, per_minute: int, now: float) -> None:
        self._capacity = float(per_minute)
        self._rate = per_minute / MINUTE_S
        self._level = self._capacity
        self._at = now

    def wait(self, amount: float, now: float) -> float:
        """Seconds until `amount` is there; 0 where it is."""
        if not self._capacity:
            return 0.0
        self._level = min(self._capacity, self._level + (now - self._at) * self._rate)
        self._at = now
        return max(0.0, (amount - self._level) / self._rate)

    def take(self, amount: float) -> None:
        """Also what is not there."""
        self._level -= amount


class _Account:
    def __init__(self, tenant: Tenant, now: float) -> None:
        self.tenant = tenant
        self.requests = Bucket(tenant.requests_per_minute, now)
        self.tokens = Bucket(tenant.tokens_per_minute, now)
        self.num_requests = 0
        self.rejected = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        self.live = 0
        self.refusal: RequestRejected | None = None  # of its last HTTP request, and the names of that
        self.refused_names: frozenset[str] = frozenset()


class Tenants:
    """Accounts by name. A tenant that is in no file has no limits, and its usage is counted all the same."""

    def __init__(self, tenants: Iterable[Tenant], clock: Clock) -> None:
        self._clock = clock
        now = clock.now()
        self._accounts = {tenant.name: _Account(tenant, now) for tenant in tenants}

    def refuse(self, message: GenerateRequest) -> RequestRejected | None:
        """The refusal of a request beyond its tenant's budgets, or None."""
        if not message.tenant or message.output_ids:
            return None  # what was let in once is let in again
        account = self._account(message.tenant)
        if message.counted:
            account.refusal = self._refusal(account, message)
            account.rejected += account.refusal is not None
            return account.refusal
        first = account.refusal  # whatever belongs to a request that was refused is refused with it
        if first is None or account.refused_names.isdisjoint(message.names):
            return None
        return RequestRejected(message.request_id, "rate_limited", first.detail, first.retry_after_s)

    def _refusal(self, account: _Account, message: GenerateRequest) -> RequestRejected | None:
        now = self._clock.now()
        tenant = account.tenant
        if wait := account.requests.wait(1, now):
            detail = f"{tenant.name} may send {tenant.requests_per_minute} requests a minute"
        elif wait := account.tokens.wait(1, now):
            detail = f"{tenant.name} may use {tenant.tokens_per_minute} tokens a minute"
        else:
            return None
        account.refused_names = frozenset(message.names)
        return RequestRejected(message.request_id, "rate_limited", detail, wait)

    def admitted(self, request: Request) -> None:
        """It came in; each prompt is paid for once, however many choices it has."""
        message = request.message
        if not message.tenant:
            return
        account = self._account(message.tenant)
        account.live += 1
        account.num_requests += message.counted
        if message.counted:
            account.requests.take(1)
        if not message.choice_index:
            tokens = ints.count(message.prompt_ids)
            account.prompt_tokens += tokens
            account.tokens.take(tokens)

    def ended(self, request: Request) -> None:
        message = request.message
        if not message.tenant:
            return
        account = self._account(message.tenant)
        account.live -= 1
        account.output_tokens += len(request.output)
        account.tokens.take(len(request.output))
        if not message.choice_index:
            account.cached_tokens += request.cached_tokens

    def usage(self) -> tuple[TenantUsage, ...]:
        return tuple(
            TenantUsage(name, a.num_requests, a.rejected, a.prompt_tokens, a.cached_tokens, a.output_tokens, a.live)
            for name, a in self._accounts.items()
        )

    def _account(self, name: str) -> _Account:
        account = self._accounts.get(name)
        if account is None:  # names come from tokenizers, which let in only who has a key
            account = self._accounts[name] = _Account(Tenant(name, ()), self._clock.now())
        return account
