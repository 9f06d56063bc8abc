"""Tokens of an OpenID provider: JSON Web Tokens, verified with the keys that the provider publishes.

Nothing in a token determines where keys are fetched from: ``jku``, ``x5u``, ``jwk`` and ``x5c`` are ignored. A token is
verified once, in a thread, then accepted by its hash until it expires or its key leaves the set. While the provider is
unreachable the last keys are used for a limited time. After that its tokens get 503, because they can be neither
accepted nor refused.
"""

from __future__ import annotations

import binascii
import json
import logging
import ssl
import time
import urllib.error
import urllib.request
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections import OrderedDict
from dataclasses import dataclass
from hashlib import sha256
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import trio
from joserfc import jwk
from joserfc.errors import JoseError
from joserfc.jws import JWSRegistry

from broker.security.files import read_guarded, stamp_of
from broker.security.guard import MAX_CREDENTIAL_BYTES, invalid_token
from broker.security.identity import Identity
from broker.security.tokens import is_name
from plainsong.protocol.errors import AuthenticationUnavailable
from storage.threaded import in_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from broker.config.sections import OidcConfig
    from broker.security.files import Stamp
    from broker.security.peer import Peer
    from plainsong.protocol.errors import PlainsongError

log = logging.getLogger("plainsong.security")
MAX_JWKS_BYTES = 1 << 20
MAX_KEYS = 100
MAX_KNOWN = 10_000
MAX_GROUPS = 200
FETCH_TIMEOUT_S = 5.0
#: Pause between attempts until keys have been fetched for the first time.
RETRY_S = 5.0
#: A token with an unknown key triggers a fetch at most this often, for all clients together.
REFETCH_S = 30.0
#: Concurrent verifications; each takes a third of a millisecond of processor time.
VERIFYING = 4
#: Signature algorithm → the kind of key it needs, and its curve.
_NEEDS: dict[str, tuple[str, str | None]] = {
    **{f"{family}{bits}": ("RSA", None) for family in ("RS", "PS") for bits in (256, 384, 512)},
    "ES256": ("EC", "P-256"),
    "ES384": ("EC", "P-384"),
    "ES512": ("EC", "P-521"),
    "EdDSA": ("OKP", "Ed25519"),
}
MIN_RSA_BITS = 2048
#: The end of the year 9999, the latest time that can be written as a date: later expiries are capped at it.
LAST_S = 253_402_300_799


class BadKeySet(ValueError):
    """A fetched document that is not a set of keys for verifying tokens."""


@dataclass(frozen=True, slots=True)
class PublicKey:
    """A key of the provider."""

    kid: str
    kind: str
    curve: str | None
    alg: str | None
    key: Any
    made_of: str
    """Hash of the key material: a provider may replace a key without changing its id."""

    @property
    def id(self) -> str:
        """The key's id, or the beginning of its hash if it has none."""
        return self.kid

    def fits(self, alg: str) -> bool:
        """True if the key can verify signatures of this algorithm."""
        kind, curve = _NEEDS[alg]
        return self.kind == kind and (curve is None or self.curve == curve) and self.alg in (None, alg)


def parse_keys(data: bytes) -> tuple[PublicKey, ...]:
    """Return the keys of a set that can verify signatures; skip others. Raises BadKeySet."""
    try:
        given = json.loads(data)
    except (ValueError, RecursionError):
        raise BadKeySet("it is not JSON") from None
    keys = given.get("keys") if isinstance(given, dict) else None
    if not isinstance(keys, list) or len(keys) > MAX_KEYS:
        raise BadKeySet(f"it is not an object with at most {MAX_KEYS} keys")
    found = [key for key in map(_public_key, keys) if key is not None]
    if not found:
        raise BadKeySet("none of its keys can verify signatures")
    return tuple(found)


def _public_key(fields: Any) -> PublicKey | None:
    if not isinstance(fields, dict) or fields.get("kty") not in ("RSA", "EC", "OKP"):
        return None
    if fields.get("use", "sig") != "sig" or "d" in fields:
        return None
    kid, alg = fields.get("kid", ""), fields.get("alg")
    if not isinstance(kid, str) or len(kid) > 255 or not (alg is None or isinstance(alg, str)):
        return None
    kept = {name: fields[name] for name in ("kty", "n", "e", "crv", "x", "y") if isinstance(fields.get(name), str)}
    if kept["kty"] == "RSA" and len(kept.get("n", "")) * 6 < MIN_RSA_BITS:
        return None
    try:
        key = jwk.import_key(kept)
    except (JoseError, ValueError, TypeError, KeyError):
        return None
    own = sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()
    return PublicKey(kid or own[:16], kept["kty"], kept.get("crv"), alg, key, own)


class OidcProvider:
    """The provider of ``security.oidc``; a ``Provider``.

    Args:
      on_failure: called when the keys could not be fetched.
      now_s: returns the time, in seconds since 1970.
    """

    def __init__(
        self,
        config: OidcConfig,
        *,
        on_failure: Callable[[str], None] = lambda what: None,
        on_change: Callable[[], None] = lambda: None,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._algorithms = frozenset(each.strip() for each in config.algorithms.split(","))
        self._url = config.jwks if config.jwks.startswith(("https://", "http://")) else None
        self._stamp: Stamp | None = None
        self._on_failure = on_failure
        self._on_change = on_change
        self._now_s = now_s
        self._keys: tuple[PublicKey, ...] = ()
        #: When the keys were last fetched, and when a fetch was last triggered by an unknown key.
        self.fetched_s: float | None = None
        self._asked_again_s = float("-inf")
        self._fetching = trio.Lock()
        #: Set when the first fetch has ended, successful or not.
        self._tried = trio.Event()
        self._limit = trio.CapacityLimiter(VERIFYING)
        #: Hash of a token → its identity, the hash of its key, and the certificate that it is bound to (``cnf``).
        self._known: OrderedDict[bytes, tuple[Identity, str, Any]] = OrderedDict()
        self.failed = ""

    # --- keys -------------------------------------------------------------------------------------

    @property
    def age_s(self) -> float:
        """Seconds since the keys were fetched; infinite if never."""
        return float("inf") if self.fetched_s is None else max(0.0, self._now_s() - self.fetched_s)

    @property
    def is_stale(self) -> bool:
        """True if no token can be checked: the keys were never fetched, or are too old."""
        return self.age_s > self._config.max_stale_s + self._config.refresh_s

    async def run(self) -> None:
        """Keep the keys fresh, until cancelled."""
        while True:
            await self.refresh()
            if self._url is not None:
                await trio.sleep(self._config.refresh_s if self._keys else min(RETRY_S, self._config.refresh_s))
                continue
            with trio.move_on_after(self._config.refresh_s):  # a file is checked every second
                while await self._stands():  # noqa: ASYNC110 - a file sends no notification
                    await trio.sleep(1.0)

    async def refresh(self) -> bool:
        """Fetch the keys; return True if that succeeded."""
        async with self._fetching:
            try:
                data = await self._fetched()
                keys = parse_keys(data)
            except (OSError, ValueError, trio.TooSlowError) as error:
                why = str(error) or type(error).__name__
                if why != self.failed:
                    self.failed = why
                    log.error("config_reload_failed", extra={"file": self._config.jwks, "why": why[:300]})
                    self._on_failure("keys")
                return False
            finally:
                self._tried.set()
            self.failed = ""
            self.fetched_s = self._now_s()
            self._put(keys)
            return True

    def _put(self, keys: tuple[PublicKey, ...]) -> None:
        gone = {key.made_of for key in self._keys} - {key.made_of for key in keys}
        self._keys = keys
        if gone:
            for hashed in [hashed for hashed, (_, made_of, _) in self._known.items() if made_of in gone]:
                del self._known[hashed]
            self._on_change()

    async def _fetched(self) -> bytes:
        if self._url is None:
            path = Path(self._config.jwks)
            self._stamp = await in_thread(stamp_of, path, max_wait_s=inf)  # set even if reading fails
            data, self._stamp = await in_thread(read_guarded, path, MAX_JWKS_BYTES, max_wait_s=inf)
            return data
        with trio.fail_after(FETCH_TIMEOUT_S):
            return await in_thread(_get, self._url, abandon_on_cancel=True, max_wait_s=inf)

    async def _stands(self) -> bool:
        """True if the key file has not changed since it was read."""
        return await in_thread(stamp_of, Path(self._config.jwks), max_wait_s=inf) == self._stamp

    # --- tokens -----------------------------------------------------------------------------------

    def known(self, token: str, peer: Peer) -> Identity | None:
        """Return the identity of a token that was verified before and is still valid; else None.

        Raises:
          Unauthenticated: it is bound to a certificate that this connection does not have.
        """
        hashed = sha256(token.encode()).digest()
        found = self._known.get(hashed)
        if found is None or self.is_stale:
            return None
        who, _, confirmation = found
        if who.expires_ms is not None and who.expires_ms <= self._now_s() * 1000:
            del self._known[hashed]
            return None
        if confirmation is not None:
            _confirm(confirmation, peer)
        self._known.move_to_end(hashed)
        return who

    def problem_of(self, who: Identity) -> PlainsongError | None:
        """Return the error that an admitted client would get now; None if its key is in the set and the set is fresh.

        The key's id is not enough for this, since a provider may replace a key without changing its id.
        """
        if self.is_stale:
            return _no_keys()
        if any(key.id == who.credential and who.key in ("", key.made_of) for key in self._keys):
            return None
        return invalid_token("the key of the token was revoked")

    async def verify(self, token: str, peer: Peer) -> Identity:
        """Verify a token, and return its identity. Raises Unauthenticated, AuthenticationUnavailable."""
        header, claims, signed, signature = _parts(token)
        alg = header.get("alg")
        if not isinstance(alg, str) or alg not in self._algorithms or alg not in _NEEDS:
            raise invalid_token("the token's signature algorithm is not accepted")
        if "crit" in header:
            raise invalid_token("the token has an unsupported critical header")
        if self._config.require_typ and str(header.get("typ", "")).lower().removeprefix("application/") != "at+jwt":
            raise invalid_token("the token is not an access token: its typ is not at+jwt")
        key = await self._key_for(header.get("kid"), alg)
        async with self._limit:
            is_good = await in_thread(_is_signed, alg, key, signed, signature)
        if not is_good:
            raise invalid_token("the token's signature is not valid")
        claimed = _object(claims, "claims")
        who = self._named(claimed, key, peer)
        while len(self._known) >= MAX_KNOWN:
            self._known.popitem(last=False)
        self._known[sha256(token.encode()).digest()] = who, key.made_of, claimed.get("cnf")
        return who

    async def _key_for(self, kid: Any, alg: str) -> PublicKey:
        if not self._tried.is_set():  # the first fetch after the start is still running
            with trio.move_on_after(FETCH_TIMEOUT_S):
                await self._tried.wait()
        if self.is_stale:
            raise _no_keys()
        for attempt in (1, 2):
            fitting = [key for key in self._keys if key.fits(alg) and (kid is None or key.kid == kid)]
            if len(fitting) == 1:
                return fitting[0]
            if attempt == 2 or kid is None or not self._may_ask_again():
                break
            await self.refresh()
        raise invalid_token("the token is signed by a key that the provider does not publish")

    def _may_ask_again(self) -> bool:
        now_s = trio.current_time()
        if now_s - self._asked_again_s < REFETCH_S:
            return False
        self._asked_again_s = now_s
        return True

    def _named(self, claims: dict[str, Any], key: PublicKey, peer: Peer) -> Identity:
        config, now_s, skew_s = self._config, self._now_s(), self._config.skew_s
        if claims.get("iss") != config.issuer:
            raise invalid_token("the token is from another issuer")
        audience = claims.get("aud")
        if audience != config.audience and not (isinstance(audience, list) and config.audience in audience):
            raise invalid_token("the token has another audience")
        expires_s = claims.get("exp")
        if not _is_time(expires_s):
            raise invalid_token("the token has no expiry")
        if expires_s + skew_s <= now_s:
            raise invalid_token("the token has expired")
        for name in ("nbf", "iat"):
            if name in claims and (not _is_time(claims[name]) or claims[name] - skew_s > now_s):
                raise invalid_token("the token is not valid yet")
        if (confirmation := claims.get("cnf")) is not None:
            _confirm(confirmation, peer)
        subject = claims.get(config.name_claim)
        name = f"{config.name_prefix}{subject}" if isinstance(subject, str) and subject else ""
        if not is_name(name):
            raise invalid_token(f"the claim {config.name_claim} of the token is not a name")
        groups = tuple(_groups(claims.get(config.groups_claim)))
        ends_ms = round(min(expires_s + skew_s, LAST_S) * 1000)
        return Identity(name, "oidc", key.id, groups, ends_ms, key.made_of)


def _no_keys() -> AuthenticationUnavailable:
    return AuthenticationUnavailable(
        "the provider's keys cannot be fetched",
        hint="its tokens may be valid: retry; check that this daemon can reach security.oidc.jwks",
    )


def _parts(token: str) -> tuple[dict[str, Any], bytes, bytes, bytes]:
    """Return header, claims, the signed bytes, and the signature. Raises Unauthenticated."""
    pieces = token.split(".")
    if len(pieces) != 3 or len(token) > MAX_CREDENTIAL_BYTES:
        raise invalid_token("the token was not issued by this daemon and is not a signed JWT")
    header, claims, signature = map(_decoded, pieces)
    return _object(header, "header"), claims, f"{pieces[0]}.{pieces[1]}".encode(), signature


def _decoded(piece: str) -> bytes:
    try:
        if "=" in piece or "+" in piece or "/" in piece:
            raise ValueError(piece)
        return urlsafe_b64decode(piece.encode("ascii") + b"=" * (-len(piece) % 4))
    except (ValueError, binascii.Error):
        raise invalid_token("the token is not encoded as a JWT") from None


def _object(data: bytes, what: str) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise invalid_token(f"the token's {what} cannot be read")
    return found


def _is_signed(alg: str, key: PublicKey, signed: bytes, signature: bytes) -> bool:
    try:
        return bool(JWSRegistry.algorithms[alg].verify(signed, signature, key.key))
    except (JoseError, ValueError, TypeError):
        return False


def _is_time(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and -(1 << 53) < value < 1 << 53


def _confirm(confirmation: Any, peer: Peer) -> None:
    """Check that a certificate-bound token is used on a connection with its certificate (RFC 8705, section 3.1)."""
    wanted = confirmation.get("x5t#S256") if isinstance(confirmation, dict) else None
    shown = b"" if peer.certificate is None else urlsafe_b64encode(sha256(peer.certificate).digest()).rstrip(b"=")
    if not isinstance(wanted, str) or not shown or wanted.encode() != shown:
        raise invalid_token("the token is bound to a certificate that this connection does not have")


def _groups(value: Any) -> Iterable[str]:
    found = [value] if isinstance(value, str) else value if isinstance(value, list) else []
    return sorted({each for each in found if isinstance(each, str) and 0 < len(each) <= 255})[:MAX_GROUPS]


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **named: Any) -> None:
        return None


def _get(url: str) -> bytes:
    """Fetch ``url``, a setting: TLS verified, no redirects, no proxy. Raises OSError, ValueError."""
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}),
        _NoRedirects(),
        urllib.request.HTTPSHandler(context=ssl.create_default_context()),
    )
    asked = urllib.request.Request(url, headers={"Accept": "application/json"})  # noqa: S310 - https, or http to loopback
    try:
        with opener.open(asked, timeout=FETCH_TIMEOUT_S) as answer:
            data: bytes = answer.read(MAX_JWKS_BYTES + 1)
    except urllib.error.HTTPError as error:
        error.close()
        raise OSError(f"the provider answered with status {error.code}") from None
    if len(data) > MAX_JWKS_BYTES:
        raise BadKeySet(f"it is larger than {MAX_JWKS_BYTES} bytes")
    return data
