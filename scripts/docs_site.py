"""Adapter for mkdocs: a hook that makes links from docs/ to files outside it work in the site.

A file that a page links to is copied below `source/`; if it is Markdown, it is a page of the site.
A link to a directory becomes plain text, because a site has no listing. A `<picture>` with a
second image for the dark scheme becomes two images, of which the site shows the one that fits.
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).resolve().parents[1]
SOURCE: Final = "source"
"""The directory of the site for files of the repository that are not below docs/."""
PAGES: Final = ("CHANGELOG.md", "CONTRIBUTING.md", "services/README.md")
"""The files of the site's navigation that are not below docs/."""
_LINK: Final = re.compile(r"(?<!!)\[(?P<text>(?:[^\]\[]|\[[^\]]*\])+)\]\((?P<target>[^)\s]+)\)")
_PICTURE: Final = re.compile(
    r'<picture>\n<source media="[^"]+" srcset="(?P<dark>[^"]+)">\n'
    r'<img alt="(?P<text>[^"]+)" src="(?P<light>[^"]+)">\n</picture>'
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside docs/ to which pages lead, directly or through other added files."""
    waiting = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    waiting += PAGES
    added = set(waiting)
    while waiting:
        path = waiting.pop()
        uri = site_uri(path)
        if files.get_file_from_path(uri) is None:
            files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
        new = set(linked(path)) - added if path.endswith(".md") else set()
        added |= new
        waiting += sorted(new)
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: object) -> str:
    """Return a page whose links lead to the places of the files in the site."""
    path = repository_path(page.file.src_uri)
    markdown = _PICTURE.sub(
        r"![\g<text>](\g<light>#only-light)![\g<text>](\g<dark>#only-dark)", markdown
    )
    return _LINK.sub(lambda match: rewritten(match, path), markdown)


def linked(path: str) -> Iterable[str]:
    """Yield the paths of the files that a page links to."""
    for match in _LINK.finditer((ROOT / path).read_text("utf-8")):
        target = resolved(path, match["target"])
        if target is not None and (ROOT / target).is_file():
            yield target


def rewritten(match: re.Match[str], path: str) -> str:
    """Return the replacement for a link on the page `path`, with its target in the site."""
    target = resolved(path, match["target"])
    if target is None:
        return match[0]
    if (ROOT / target).is_dir():
        return match["text"]
    folder = PurePosixPath(site_uri(path)).parent
    fragment = match["target"].partition("#")[2]
    uri = os.path.relpath(site_uri(target), folder)
    return f"[{match['text']}]({uri}{f'#{fragment}' if fragment else ''})"


def resolved(path: str, target: str) -> str | None:
    """Return the path in the repository to which a link leads; None if it leads elsewhere."""
    file = target.partition("#")[0]
    if not file or re.match(r"[a-z]+:", file):
        return None
    return os.path.normpath(PurePosixPath(path).parent / file)


def site_uri(path: str) -> str:
    """Return the path in the site of a file in the repository."""
    return path.removeprefix("docs/") if path.startswith("docs/") else f"{SOURCE}/{path}"


def repository_path(uri: str) -> str:
    """Return the path in the repository of a file in the site."""
    return uri.removeprefix(f"{SOURCE}/") if uri.startswith(f"{SOURCE}/") else f"docs/{uri}"
