"""Pure: the object store of the API stand-in, with one version counter and a log of changes.

Every write that changes an object increments the version and appends one entry to the log. Watches
from a version, later pages of a list and `410 Expired` are derived from the log. Objects are never
changed in place. There is no support for finalizers, graceful deletion, admission, RBAC or
garbage collection, but deleting a namespace deletes its objects. A list ignores `resourceVersion`:
its first page shows the newest state.
"""

import base64
import binascii
import dataclasses
from collections.abc import Mapping, Sequence

import msgspec
import orjson

from muster.local.kubernetes import refusals, resources, selectors, trees, writes

NAMESPACES = ("default", "kube-system", "kube-public", "kube-node-lease")
"""Namespaces that every cluster has from the start."""

Key = tuple[str, str]
"""Namespace (empty for cluster-scoped objects) and name; lists are sorted by this key."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of the store: objects, their size, Events, and logged changes."""

    objects_max: int = 20_000
    object_bytes_max: int = 1_572_864
    """etcd's own limit for one value."""
    events_max: int = 2_000
    """The oldest Event is removed for a new one; a real cluster keeps Events for an hour."""
    log_max: int = 5_000
    log_drop: int = 1_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selection:
    """Selects the objects of a list or a watch."""

    place: resources.Place
    labels: selectors.Selector = selectors.EVERYTHING
    fields: selectors.Selector = selectors.EVERYTHING

    def accepts(self, stored: trees.Tree) -> bool:
        """Return whether a stored object is selected."""
        resource, namespace = self.place.resource, self.place.namespace
        if namespace and trees.string_at(stored, "metadata", "namespace") != namespace:
            return False
        if not self.labels.accepts(_labels(stored)):
            return False
        if not self.fields.requirements:
            return True
        return self.fields.accepts(resource.selectable(resource.view(stored)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Change:
    bucket: str
    key: Key
    old: trees.Tree | None
    new: trees.Tree | None
    version: int


class Store:
    """Stores all objects. The counter starts at `version`; `more` are extra namespaces.

    Methods raise `RequestError` only.
    """

    def __init__(
        self,
        *,
        at: str,
        version: int = 0,
        limits: Limits | None = None,
        more: Sequence[str] = (),
    ) -> None:
        self.version = version
        self._limits = limits or Limits()
        self._buckets: dict[str, dict[Key, trees.Tree]] = {
            resource.bucket: {} for resource in resources.RESOURCES
        }
        self._log: list[_Change] = []
        for name in (*NAMESPACES, *more):
            place = resources.Place(resource=resources.NAMESPACES)
            write = writes.Write(place=place, manager="", at=at, uid=f"{name}-0", suffix="")
            self.create({"metadata": {"name": name}}, write)

    def get(self, place: resources.Place) -> trees.Tree:
        """Return the object at `place`. Raises 404."""
        return place.resource.view(self._existing(place))

    def all(self, resource: resources.Resource) -> list[trees.Tree]:
        """Return all stored objects of a resource."""
        return list(self._buckets[resource.bucket].values())

    def page(self, selection: Selection, *, limit: int = 0, token: str = "") -> trees.Tree:
        """Return a list: all objects, or up to `limit` objects and a token for the next page.

        All pages show the objects as of the first page; 410 if the log does not reach back that
        far.
        """
        version, after = _read_token(token) if token else (self.version, ("", ""))
        bucket = self._bucket_at(selection.place.resource.bucket, version)
        keys = [key for key in sorted(bucket) if key > after and selection.accepts(bucket[key])]
        metadata: trees.Tree = {"resourceVersion": str(version)}
        if limit and len(keys) > limit:
            metadata["continue"] = _token(version, keys[limit - 1])
            metadata["remainingItemCount"] = len(keys) - limit
            keys = keys[:limit]
        resource = selection.place.resource
        return {
            "kind": f"{resource.kind}List",
            "apiVersion": resource.api_version,
            "metadata": metadata,
            # as in the real API, list items have no kind
            "items": [trees.without(resource.view(bucket[k]), "kind", "apiVersion") for k in keys],
        }

    def create(self, body: trees.Json, write: writes.Write) -> trees.Tree:
        """Store a new object; 409 AlreadyExists if the name is taken."""
        new = writes.created(body, write)
        self._refuse_missing_namespace(write.place)
        place = dataclasses.replace(write.place, name=trees.string_at(new, "metadata", "name"))
        if self._find(place) is not None:
            raise place.refusal(refusals.Reason.ALREADY_EXISTS, "already exists")
        self._evict(write)
        return self._commit(place, None, new, dry_run=write.dry_run)

    def update(self, body: trees.Json, write: writes.Write) -> tuple[trees.Tree, bool]:
        """Replace an object; also return whether it was created (leases and events can be)."""
        place = write.place
        if self._find(place) is None and place.resource.creates_on_update:
            return self.create(body, write), True
        old = self._existing(place)
        return self._commit(
            place, old, writes.updated(old, body, write), dry_run=write.dry_run
        ), False

    def patch(
        self, patch: trees.Json, patch_format: writes.PatchFormat, write: writes.Write
    ) -> tuple[trees.Tree, bool]:
        """Patch an object; also return whether it was created (by an apply)."""
        place = write.place
        applies = patch_format is writes.PatchFormat.APPLY
        if applies and not place.subresource and self._find(place) is None:
            self._refuse_missing_namespace(place)
            new = writes.first_applied(patch, write)
            self._evict(write)
            return self._commit(place, None, new, dry_run=write.dry_run), True
        old = self._existing(place)
        new = writes.patched(old, patch, patch_format, write)
        return self._commit(place, old, new, dry_run=write.dry_run), False

    def delete(self, place: resources.Place, options: trees.Json, *, dry_run: bool) -> trees.Tree:
        """Remove an object immediately; 409 if the preconditions in the options do not hold."""
        old = self._existing(place)
        if isinstance(options, dict):
            for field, wanted in trees.object_at(options, "preconditions").items():
                if wanted is not None and wanted != trees.value_at(old, "metadata", field):
                    raise place.refusal(
                        refusals.Reason.CONFLICT, f"precondition failed: {field} is not {wanted}"
                    )
        if place.resource == resources.NAMESPACES and not dry_run:
            self._empty(place.name)
        return self._commit(place, old, None, dry_run=dry_run)

    def delete_all(self, selection: Selection, *, dry_run: bool) -> trees.Tree:
        """Remove all selected objects, and return them as a list."""
        page = self.page(selection)
        bucket = self._buckets[selection.place.resource.bucket]
        for key in [key for key in sorted(bucket) if selection.accepts(bucket[key])]:
            place = dataclasses.replace(selection.place, namespace=key[0], name=key[1])
            self.delete(place, None, dry_run=dry_run)
        return page

    def initial(self, selection: Selection) -> list[trees.Tree]:
        """Return the existing objects as ADDED events, with which a watch begins."""
        bucket = self._buckets[selection.place.resource.bucket]
        accepted = [bucket[key] for key in sorted(bucket) if selection.accepts(bucket[key])]
        return [_event("ADDED", selection.place.resource, stored) for stored in accepted]

    def since(self, selection: Selection, version: int) -> list[trees.Tree]:
        """Return the watch events after `version`; 410 if the log does not reach back that far.

        An object that starts to match the selection is ADDED; an object that stops matching is
        DELETED.
        """
        events = []
        for change in self._log_after(version):
            if change.bucket != selection.place.resource.bucket:
                continue
            was = change.old is not None and selection.accepts(change.old)
            stays = change.new is not None and selection.accepts(change.new)
            shown, kind = change.new, "MODIFIED" if was else "ADDED"
            if was and not stays:
                # the last selected state, with the version of the change
                shown, kind = _versioned(change.old or {}, change.version), "DELETED"
            if (was or stays) and shown is not None:
                events.append(_event(kind, selection.place.resource, shown))
        return events

    def compact(self) -> None:
        """Discard the log, so that every older version is answered with 410."""
        self._log.clear()

    def _commit(
        self,
        place: resources.Place,
        old: trees.Tree | None,
        new: trees.Tree | None,
        *,
        dry_run: bool,
    ) -> trees.Tree:
        version = self.version + 1
        shown = place.resource.view(_versioned(old or {}, version) if new is None else new)
        if new is not None:
            if old is not None and trees.same(old, new):
                return shown
            self._refuse_large(place, new)
            new = new if dry_run else _versioned(new, version)
            shown = place.resource.view(new)
        if dry_run:
            return shown
        key = (place.namespace, place.name)
        bucket = self._buckets[place.resource.bucket]
        if new is None:
            del bucket[key]
        else:
            bucket[key] = new
        self.version = version
        self._log.append(
            _Change(bucket=place.resource.bucket, key=key, old=old, new=new, version=version)
        )
        if len(self._log) > self._limits.log_max:
            del self._log[: self._limits.log_drop]
        return shown

    def _find(self, place: resources.Place) -> trees.Tree | None:
        return self._buckets[place.resource.bucket].get((place.namespace, place.name))

    def _existing(self, place: resources.Place) -> trees.Tree:
        stored = self._find(place)
        if stored is None:
            raise place.refusal(refusals.Reason.NOT_FOUND, "not found")
        return stored

    def _log_after(self, version: int) -> list[_Change]:
        floor = self.version - len(self._log)
        if not floor <= version <= self.version:
            raise refusals.RequestError(
                refusals.Reason.EXPIRED,
                f"too old resource version: {version} ({floor} to {self.version} are known)",
            )
        return self._log[version - floor :]

    def _bucket_at(self, bucket: str, version: int) -> Mapping[Key, trees.Tree]:
        past = dict(self._buckets[bucket])
        for change in reversed(self._log_after(version)):
            if change.bucket != bucket:
                continue
            if change.old is None:
                past.pop(change.key, None)
            else:
                past[change.key] = change.old
        return past

    def _empty(self, namespace: str) -> None:
        for resource in {r.bucket: r for r in resources.RESOURCES if r.namespaced}.values():
            place = resources.Place(resource=resource, namespace=namespace)
            self.delete_all(Selection(place=place), dry_run=False)

    def _refuse_missing_namespace(self, place: resources.Place) -> None:
        if place.resource.namespaced and not place.namespace:
            raise refusals.RequestError(
                refusals.Reason.METHOD_NOT_ALLOWED,
                f"{place.resource.plural} are created in a namespace",
            )
        if place.resource.namespaced:
            self._existing(resources.Place(resource=resources.NAMESPACES, name=place.namespace))

    def _refuse_large(self, place: resources.Place, new: trees.Tree) -> None:
        size_bytes = len(orjson.dumps(new))
        if size_bytes > self._limits.object_bytes_max:
            raise place.refusal(
                refusals.Reason.TOO_LARGE,
                f"has {size_bytes} bytes, more than {self._limits.object_bytes_max}",
            )

    def _evict(self, write: writes.Write) -> None:
        resource = write.place.resource
        bucket = self._buckets[resource.bucket]
        if resource.bucket == resources.EVENTS.bucket and len(bucket) >= self._limits.events_max:
            namespace, name = next(iter(bucket))
            oldest = resources.Place(resource=resource, namespace=namespace, name=name)
            self.delete(oldest, None, dry_run=write.dry_run)
        elif sum(map(len, self._buckets.values())) >= self._limits.objects_max:
            raise refusals.RequestError(
                refusals.Reason.FORBIDDEN,
                f"the store holds {self._limits.objects_max} objects, the maximum",
            )


class _Position(msgspec.Struct):
    version: int
    namespace: str
    name: str


def _token(version: int, after: Key) -> str:
    position = _Position(version=version, namespace=after[0], name=after[1])
    return base64.urlsafe_b64encode(msgspec.json.encode(position)).decode()


def _read_token(token: str) -> tuple[int, Key]:
    try:
        position = msgspec.json.decode(base64.urlsafe_b64decode(token), type=_Position)
    except (binascii.Error, msgspec.DecodeError, ValueError) as error:
        raise refusals.bad_request(f"continue key is not valid: {error}") from error
    return position.version, (position.namespace, position.name)


def _labels(stored: trees.Tree) -> dict[str, str]:
    labels = trees.object_at(stored, "metadata", "labels")
    return {key: value for key, value in labels.items() if isinstance(value, str)}


def _versioned(stored: trees.Tree, version: int) -> trees.Tree:
    return trees.with_value(stored, str(version), "metadata", "resourceVersion")


def _event(kind: str, resource: resources.Resource, stored: trees.Tree) -> trees.Tree:
    return {"type": kind, "object": resource.view(stored)}
