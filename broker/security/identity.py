"""Who asks: the name that a request has, how it proved that, and the verbs that names are given."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

#: What a name may be given. No verb implies another.
Verb: TypeAlias = Literal["publish", "poll", "inspect", "transact", "operate", "admin"]
VERBS: tuple[Verb, ...] = ("publish", "poll", "inspect", "transact", "operate", "admin")

#: What a route's verb is needed on: the topic in its path; each topic in its body, which its handler checks; all topics
#: of the namespace in its path; something within that namespace; the service as a whole. ``name``: every name may ask;
#: ``nobody``: no name is needed at all.
On: TypeAlias = Literal["topic", "topics", "namespace", "within", "service", "name", "nobody"]

#: How a name was proved: nothing asked for one, one of our tokens, an OpenID provider's, a client certificate, the peer
#: of a Unix socket; ``thrift``: Tephra's clients, who know no names.
Via: TypeAlias = Literal["none", "token", "oidc", "cert", "unix", "thrift"]


@dataclass(frozen=True, slots=True)
class Identity:
    """Who asks."""

    name: str
    via: Via = "none"
    credential: str = ""
    """The id of the credential, such as the first digits of a token's hash; never the credential itself."""
    groups: tuple[str, ...] = ()
    """Those that its OpenID provider says; groups of the grants file stand there."""
    expires_ms: int | None = None
    """When the credential ends."""
    key: str = field(default="", compare=False, repr=False)
    """The digest of the provider's key that signed it; empty: another instance verified it, or there is none."""


#: Everybody, while authentication is off: every verb on everything.
ANONYMOUS = Identity("anonymous")
#: Whoever has no name where none is needed.
NOBODY = Identity("")
