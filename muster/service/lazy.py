"""Adapter: loads modules when they are first used, although other modules import them before.

This module itself imports nothing that takes time.
"""

import importlib.machinery
import importlib.util
import sys
import types


class _Lazy(types.ModuleType):
    """A module that is loaded when one of its missing attributes is first used."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        self.__class__ = types.ModuleType  # type: ignore[assignment]  # as importlib's LazyLoader
        assert self.__spec__ is not None, "made from its spec"
        assert self.__spec__.loader is not None, "no namespace package"
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


def make(name: str, *classes: str) -> None:
    """Load a module when it is first used; until then, its `classes` are empty stand-ins.

    Modules of a lazy package can be imported without the rest of the package. A module that is
    already loaded stays as it is. Raises ModuleNotFoundError.
    """
    if name in sys.modules:
        return
    package = name.rpartition(".")[0]
    # importlib.util.find_spec would import the package, which imports the module
    above = importlib.machinery.PathFinder.find_spec(package) if package else None
    where = above.submodule_search_locations if above else None
    spec = importlib.machinery.PathFinder.find_spec(name, where)
    if spec is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    lazy = importlib.util.module_from_spec(spec)
    lazy.__class__ = _Lazy
    for class_name in classes:
        setattr(lazy, class_name, type(class_name, (), {}))
    sys.modules[name] = lazy
    if package in sys.modules:
        setattr(sys.modules[package], name.rpartition(".")[2], lazy)
