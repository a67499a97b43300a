"""Pure: plans which Kubernetes objects with NATS passwords or keys to create or sign again.

With passwords, each user of NATS has a Secret. With keys, the Secret `NAME-keys` contains all keys;
accounts.conf for NATS, the gate's files and all credentials are derived from them.
The certificate authority in the Secret `NAME-nats-authority` signs NATS' certificate.

Existing passwords, keys and certificates are never replaced. After an upgrade, the keys of new
roles are added to `NAME-keys`; objects that list rights, and credentials whose role has moved to
another account, are signed again. Lists of rights that were created by hand (`muster auth init`)
stay unchanged.
"""

import base64
import enum
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec

from muster.nats.auth import accounts, nkeys, permissions

VERSION: Final = "muster.dev/permissions"
"""The annotation of objects that list rights; its value is `rights()`. Objects created by hand have
none.
"""
ROUNDS_MAX: Final = 6
"""How many plans may be needed until all objects exist; each plan builds on the previous one."""
_PASSWORD: Final = re.compile(r"(?!\d+$)[A-Za-z0-9_.~-]+")
_PEM: Final = re.compile(r"-----BEGIN ([A-Z ]+)-----\s([A-Za-z0-9+/=\s]+)-----END \1-----")
_READER_NAME: Final = "cluster"
_NEEDED: Final = (accounts.Role.HEALTH, accounts.Role.LABELER, accounts.Role.NOTIFIER)
_MOVED: Final = (accounts.Role.READER, accounts.Role.LABELER)
"""The roles whose users were in muster's account in the first version."""
_ADDED: Final = tuple(f"{key}.seed" for key in accounts.ADDED)


class Refused(Exception):
    """Existing objects are unusable and must not be replaced; the message explains what to do."""


class Kind(enum.StrEnum):
    """The kind of a Kubernetes object."""

    SECRET = "Secret"  # noqa: S105
    CONFIG_MAP = "ConfigMap"


class Origin(enum.Enum):
    """The source of an object's content."""

    PASSWORD = enum.auto()
    SEEDS = enum.auto()
    AUTHORITY = enum.auto()
    KEYS = enum.auto()
    """Derived from the seeds."""
    CERTIFICATE = enum.auto()
    """Signed by the authority."""
    TRUST = enum.auto()
    """Copied from the certificate."""


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """A Kubernetes object; `files` has each key of its data and the name of the file in it."""

    kind: Kind
    name: str
    files: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


@dataclass(frozen=True, slots=True)
class Stored:
    """The content of an existing part in the cluster; `version` is its annotation, if any."""

    data: Mapping[str, str]
    version: str | None = None


class Step(NamedTuple):
    """A part to create, to sign again, or to extend with the keys of new roles."""

    part: Part
    origin: Origin


Existing = Mapping[Part, Stored]


@dataclass(frozen=True, slots=True)
class Wanted:
    """The names of an installation's objects."""

    name: str

    @property
    def passwords(self) -> tuple[Part, ...]:
        """The Secrets with the passwords of NATS' users."""
        users = [*(grant.user for grant in permissions.central()), permissions.gate().user]
        return tuple(_secret(f"{self.name}-nats-{user}", "password") for user in users)

    @property
    def seeds(self) -> Part:
        """The Secret with all keys; no pod refers to it."""
        return _secret(f"{self.name}-keys", *(f"{name}.seed" for name in accounts.KINDS))

    @property
    def accounts_conf(self) -> Part:
        """The ConfigMap with the rights of all roles, which NATS includes."""
        return Part(Kind.CONFIG_MAP, f"{self.name}-accounts", (("accounts.conf", "accounts.conf"),))

    @property
    def gate(self) -> Part:
        """The Secret with the gate's credentials and signing keys."""
        return _secret(f"{self.name}-gate", "gate.json", "gate.creds")

    @property
    def signed(self) -> tuple[Part, ...]:
        """The objects that list rights; accounts.conf is first, because NATS must load it first."""
        return (self.accounts_conf, self.gate)

    @property
    def needed(self) -> tuple[Part, ...]:
        """The objects with keys or rights that NATS, the gate and the services need to start."""
        return (*self.signed, *map(self.credentials, _NEEDED))

    @property
    def for_people(self) -> tuple[Part, ...]:
        """The Secrets with the credentials of people and their tools, including the console."""
        others = (accounts.Role.READER, accounts.Role.CONSOLE, accounts.Role.ADMIN)
        return tuple(map(self.credentials, others))

    def credentials(self, role: accounts.Role) -> Part:
        """Return the Secret with the credentials of a role."""
        name = f"{self.name}-{role}-creds"
        return Part(Kind.SECRET, name, (("nats.creds", f"{role}.creds"),))

    @property
    def authority(self) -> Part:
        """The Secret with the authority that signs NATS' certificate; no pod refers to it."""
        return _secret(f"{self.name}-nats-authority", "ca.crt", "ca.key")

    @property
    def certificate(self) -> Part:
        """The Secret with NATS' certificate; only NATS uses it."""
        return _secret(f"{self.name}-nats-tls", "tls.crt", "tls.key", "ca.crt")

    @property
    def trust(self) -> Part:
        """The ConfigMap with the authority's certificate, with which all clients verify NATS."""
        return Part(Kind.CONFIG_MAP, f"{self.name}-nats-ca", (("ca.crt", "ca.crt"),))

    def parts(self, *, production: bool) -> tuple[Part, ...]:
        """Return all parts in order of creation: passwords, or in production all other parts."""
        if not production:
            return self.passwords
        keys = (self.seeds, self.authority, *self.needed, *self.for_people)
        return (*keys, self.certificate, self.trust)


def plan(name: str, existing: Existing, *, production: bool) -> tuple[Step, ...]:
    """Return the steps that are possible now; empty if nothing needs to be done.

    Raises Refused. After these steps, or if another process was faster, more steps may be possible:
    plan again, at most `ROUNDS_MAX` times.
    """
    wanted = Wanted(name)
    problems = [
        f"{part}: {problem}"
        for part in wanted.parts(production=production)
        if part in existing and (problem := _problem(part, existing[part]))
    ]
    if problems:
        raise Refused(
            f"{'; '.join(problems)}; correct the value, or delete the object so that it is created "
            "again"
        )
    if not production:
        return _create(wanted.passwords, existing, Origin.PASSWORD)
    return (*_plan_keys(wanted, existing), *_plan_certificate(wanted, existing))


def rights() -> str:
    """Return a digest of the rights that this version of muster grants to the roles."""
    key = nkeys.Key(nkeys.Kind.ACCOUNT, bytes(nkeys.SECRET_BYTES))
    operator = nkeys.Key(nkeys.Kind.OPERATOR, bytes(nkeys.SECRET_BYTES))
    ring = {name: [operator if name == "operator" else key] for name in accounts.KINDS}
    made = accounts.derive(ring, random=bytes, at=0)
    text = made["accounts.conf"] + made["gate.creds"]
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def ring(seeds: Stored) -> accounts.Keyring:
    """Return the keys from the Secret that contains all seeds. Raises ValueError."""
    return {name: accounts.read_seeds(name, seeds.data[f"{name}.seed"]) for name in accounts.KINDS}


def derive(seeds: Stored, *, random: accounts.Random, at: float) -> dict[str, str]:
    """Return the files derived from the keys, by file name."""
    keys = ring(seeds)
    user = permissions.reader(_READER_NAME).user
    role = accounts.Role.READER
    reader = accounts.credentials(keys, role, name=user, random=random, at=at)
    return accounts.derive(keys, random=random, at=at) | {f"{role}.creds": reader}


def hosts(name: str, namespace: str) -> tuple[str, ...]:
    """Return the host names and addresses in NATS' certificate."""
    service = f"{name}-nats"
    return (
        *(service, f"*.{service}", f"{service}.{namespace}"),
        *(f"*.{service}.{namespace}.svc.cluster.local", "localhost", "127.0.0.1", "::1"),
    )


def damage(key: str, text: str) -> str:
    """Return why the value of a key is unusable; empty if it is usable."""
    try:
        match key.rpartition(".")[2]:
            case "password" if not _PASSWORD.fullmatch(text):
                return (
                    "it is a number, or has a character that cannot be part of an address, such as "
                    "a line feed"
                )
            case "seed":
                accounts.read_seeds(key.removesuffix(".seed"), text)
            case "creds":
                nkeys.read_creds(text)
            case "json":
                _check_signing(text)
            case "crt" | "key":
                _check_pem(text)
            case _ if "\ufffd" in text:
                return "not text"
            case _:
                pass
    except ValueError as error:
        return str(error)
    return ""


def _secret(name: str, *keys: str) -> Part:
    return Part(Kind.SECRET, name, tuple((key, key) for key in keys))


def _create(parts: Sequence[Part], existing: Existing, origin: Origin) -> tuple[Step, ...]:
    return tuple(Step(part, origin) for part in parts if part not in existing)


def _plan_keys(wanted: Wanted, existing: Existing) -> tuple[Step, ...]:
    parts = (*wanted.needed, *wanted.for_people)
    if wanted.seeds in existing:
        if any(file not in existing[wanted.seeds].data for file in _ADDED):
            return (Step(wanted.seeds, Origin.SEEDS),)
        current = {None, rights()}
        held = [part for part in wanted.signed if part in existing]
        old = [part for part in held if existing[part].version not in current]
        for role in _MOVED:
            part = wanted.credentials(role)
            if part in existing and not _is_of_owner(role, existing[part], existing[wanted.seeds]):
                old.append(part)
        return (
            *(Step(part, Origin.KEYS) for part in old),
            *_create(parts, existing, Origin.KEYS),
        )
    missing = [part for part in wanted.needed if part not in existing]
    if not missing:
        return ()
    there = [str(part) for part in parts if part in existing]
    if there:
        raise Refused(
            f"the keys for {', '.join(map(str, missing))} are missing, but these objects exist: "
            f"{', '.join(there)}; run the commands that `muster auth accounts` prints, or delete "
            "these objects"
        )
    return (Step(wanted.seeds, Origin.SEEDS),)


def _is_of_owner(role: accounts.Role, credentials: Stored, seeds: Stored) -> bool:
    """Return whether credentials belong to the account that now owns their role."""
    account = ring(seeds)[accounts.owner(role)][0].public
    return nkeys.read_creds(credentials.data["nats.creds"]).account == account


def _plan_certificate(wanted: Wanted, existing: Existing) -> tuple[Step, ...]:
    authority = existing.get(wanted.authority)
    match existing.get(wanted.certificate), existing.get(wanted.trust):
        case Stored(), Stored():
            return ()
        case Stored(), None:
            return (Step(wanted.trust, Origin.TRUST),)
        case None, None if authority is None:
            return (Step(wanted.authority, Origin.AUTHORITY),)
        case None, trust if authority and (trust is None or _trusts(trust, authority)):
            return (Step(wanted.certificate, Origin.CERTIFICATE),)
    raise Refused(
        f"there is no {wanted.certificate}, and clients trust an authority whose key is not in "
        f"{wanted.authority}; create the certificate with that authority's key, or delete "
        f"{wanted.trust}"
    )


def _trusts(trust: Stored, authority: Stored) -> bool:
    return trust.data["ca.crt"].split() == authority.data["ca.crt"].split()


def _problem(part: Part, stored: Stored) -> str:
    """Return why an existing object is invalid; empty if it is valid."""
    for key, _ in part.files:
        if key in _ADDED and key not in stored.data:
            continue
        text = stored.data.get(key, "")
        if not text.strip():
            return f"{key} is {'empty' if key in stored.data else 'missing'}"
        if problem := damage(key, text):
            return f"{key} is damaged: {problem}"
    return ""


def _check_signing(text: str) -> None:
    """Raise ValueError, without quoting the text, if it is not gate.json."""
    try:
        signing = msgspec.json.decode(text, type=dict[str, str])
    except msgspec.MsgspecError:
        raise ValueError("not JSON written by muster") from None
    for name in ("answer_seed", "node_seed"):
        nkeys.Key.from_seed(signing.get(name, ""), nkeys.Kind.ACCOUNT)


def _check_pem(text: str) -> None:
    """Raise ValueError, without quoting the text, unless it is PEM with valid base64 content."""
    blocks = _PEM.findall(text)
    if not blocks:
        raise ValueError("not PEM")
    for _, content in blocks:
        try:
            base64.b64decode("".join(content.split()), validate=True)
        except ValueError:
            raise ValueError("not PEM, because its content is not base64") from None
