"""Identities: a request's name, how it was proved, and the verbs that a name can be granted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

#: The verbs of a grant. No verb implies another.
Verb: TypeAlias = Literal["publish", "poll", "inspect", "transact", "operate", "admin"]
VERBS: tuple[Verb, ...] = ("publish", "poll", "inspect", "transact", "operate", "admin")

#: The object on which a route needs its verb: the topic in its path; each topic in its body, which the handler checks;
#: all topics of the namespace in its path; anything within that namespace; the service. ``name``: any name may call it;
#: ``nobody``: it requires no authentication.
On: TypeAlias = Literal["topic", "topics", "namespace", "within", "service", "name", "nobody"]

#: The proof of a name: none, a token of this daemon, an OpenID provider, a client certificate, or the peer of a Unix
#: socket; ``thrift``: Tephra's clients, whose protocol has no names.
Via: TypeAlias = Literal["none", "token", "oidc", "cert", "unix", "thrift"]


@dataclass(frozen=True, slots=True)
class Identity:
    """An authenticated client."""

    name: str
    via: Via = "none"
    credential: str = ""
    """The id of the credential, such as the first digits of a token's hash; never the credential itself."""
    groups: tuple[str, ...] = ()
    """Groups from the OpenID provider; those of the grants file are not included."""
    expires_ms: int | None = None
    """When the credential expires; None if it does not."""
    key: str = field(default="", compare=False, repr=False)
    """Digest of the provider's key that signed the token; empty if there is none, or another instance verified it."""


#: Every client while authentication is off; it has every verb on everything.
ANONYMOUS = Identity("anonymous")
#: A client without a name, where none is needed.
NO_IDENTITY = Identity("")
