"""Pure: verifies an ID token (signature, issuer, client, times, nonce), and the right to act."""

import fnmatch
import hmac
from typing import Annotated, Final

import jwt
import msgspec

from muster import codec
from muster_console import config, identities

_ALGORITHMS: Final = frozenset({"RS256", "ES256"})
_LEEWAY_S: Final = 60.0
_TOKEN_BYTES_MAX: Final = 16 * 1024


class _Claims(msgspec.Struct, frozen=True):
    iss: str
    sub: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    aud: str | list[str]
    exp: float
    iat: float
    nonce: str = ""
    nbf: float = 0.0
    azp: str = ""
    email: str = ""
    email_verified: bool | str = False


def verify(
    token: str, keys: jwt.PyJWKSet, rule: config.Oidc, *, nonce: str, at: float
) -> identities.Identity:
    """Return the person in an ID token (OpenID Connect Core 1.0, 3.1.3.7). Raises Unknown."""
    claims, groups = _verified(token, keys, rule)
    audience = [claims.aud] if isinstance(claims.aud, str) else claims.aud
    if claims.iss != rule.issuer:
        raise identities.Unknown("the token was issued by another issuer")
    if rule.client_id not in audience or (claims.azp or rule.client_id) != rule.client_id:
        raise identities.Unknown("the token was issued for another client")
    if len(audience) > 1 and not claims.azp:
        raise identities.Unknown("the token was issued for several clients, and has no azp")
    if claims.exp + _LEEWAY_S <= at:
        raise identities.Unknown("the token has expired")
    if max(claims.nbf, claims.iat) > at + _LEEWAY_S:
        raise identities.Unknown("the token is not valid yet; check the clocks of both sides")
    if not nonce or not hmac.compare_digest(claims.nonce.encode(), nonce.encode()):
        raise identities.Unknown("the token was issued for another attempt to sign in (nonce)")
    email = claims.email if claims.email_verified in {True, "true"} else ""
    is_listed = any(fnmatch.fnmatchcase(email.lower(), each.lower()) for each in rule.emails)
    if not (email and is_listed) and not groups & set(rule.groups):
        raise identities.Unknown(
            f"{identities.shown_name(email or claims.sub)} is not among those who may act"
        )
    return identities.Identity(identities.shown_name(email or claims.sub), identities.Kind.OIDC)


def _verified(token: str, keys: jwt.PyJWKSet, rule: config.Oidc) -> tuple[_Claims, set[str]]:
    """Return the claims and groups of a token with a valid signature. Raises Unknown."""
    if len(token) > _TOKEN_BYTES_MAX:
        raise identities.Unknown("the token is too long")
    try:
        key = _key(token, keys)
        if key is None:
            raise identities.Unknown("the token is signed with an unknown key")
        if key.algorithm_name not in _ALGORITHMS:
            raise identities.Unknown(
                f"the token is signed with {key.algorithm_name}; expected RS256 or ES256"
            )
        # the signature only: the library would read the clock for the rest
        payload: bytes = jwt.PyJWS().decode(token, key, algorithms=[key.algorithm_name])
        claims = msgspec.json.decode(payload, type=_Claims)
        raw = msgspec.json.decode(payload, type=dict[str, object])
    except jwt.PyJWTError as error:
        raise identities.Unknown(f"the token is not valid: {error}") from None
    except (*codec.UNREADABLE, ValueError) as error:
        raise identities.Unknown(f"the token cannot be read: {error}") from None
    listed = raw.get(rule.groups_claim)
    groups = (
        {each for each in listed if isinstance(each, str)} if isinstance(listed, list) else set()
    )
    return claims, groups


def has_key(token: str, keys: jwt.PyJWKSet) -> bool:
    """Return whether the key that a token names is in `keys`; True if the token is unreadable."""
    try:
        return _key(token, keys) is not None
    except jwt.PyJWTError:
        # `verify` reports the error
        return True


def _key(token: str, keys: jwt.PyJWKSet) -> jwt.PyJWK | None:
    """Return the key that a token names; None if it is unknown. Raises PyJWTError."""
    named = jwt.get_unverified_header(token).get("kid")
    return next((each for each in keys.keys if each.key_id == named), None)
