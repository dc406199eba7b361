"""The parts of the site that are made from code, from the tutorials and from other files of the repository; a hook of MkDocs.

A page asks for a part by a comment of its own line, ``<!-- generated: statistics -->``. Links to files of the repository that are not on
the site lead to the repository; links to notebooks lead to their pages.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path[:0] = [str(DOCS), str(ROOT / "src")]

from data_flow import data_flow  # noqa: E402  # beside this file, which is no package

from lightning_module_monitor.cli import COMMANDS, main  # noqa: E402
from lightning_module_monitor.statistics.registry import STATISTICS, Statistic  # noqa: E402

REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Homepage"]


# ------------------------------------------------------------------ parts


def statistics() -> str:
    """A table of the built-in statistics: each row is a name and the docstring of its formula."""
    rows = [f"| `{name}` | {_sentence(one.finish if isinstance(one, Statistic) else type(one))} |" for name, one in STATISTICS.items()]
    return "\n".join(["| statistic | formula |", "|---|---|", *rows])


def _sentence(documented: object) -> str:
    """The docstring as the cell of a table."""
    text = " ".join((documented.__doc__ or "").split())
    return text.replace("``", "`")


def command_line() -> str:
    """The help of every subcommand, as it is printed."""
    return "\n\n".join(f"## {one.name}\n\n```text\n{_help(one.name)}```" for one in COMMANDS)


def _help(command: str) -> str:
    printed = io.StringIO()
    os.environ["COLUMNS"] = "100"  # argparse wraps lines by it
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main([command, "--help"])
    return printed.getvalue()


def every_option() -> str:
    """The configuration that has every option, with its comments."""
    return f"```yaml\n{(ROOT / 'configs' / 'full.yaml').read_text()}```"


def changelog() -> str:
    """The changelog without its title."""
    return (ROOT / "CHANGELOG.md").read_text().partition("\n")[2]


PARTS = {
    "changelog": changelog,
    "command_line": command_line,
    "data_flow": data_flow,
    "every_option": every_option,
    "statistics": statistics,
}
"""What a page can ask for."""


# ------------------------------------------------------------------ tutorials


def tutorial(path: Path) -> tuple[str, dict[str, bytes]]:
    """A notebook with its outputs as a page.

    Args:
        path: The notebook.

    Returns:
        Markdown, and the content of its pictures by file name.
    """
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            parts.append(_shown(output, f"{path.stem}_{len(pictures)}.png", pictures))
    parts.append(f"[The notebook of this page]({REPOSITORY}/blob/main/{path.relative_to(ROOT).as_posix()})")
    return "\n\n".join(filter(None, parts)) + "\n", pictures


def _shown(output: dict[str, Any], name: str, pictures: dict[str, bytes]) -> str:
    """One output of a cell: a picture, a table or text, the first of them that there is."""
    data = output.get("data", {})
    if "image/png" in data:
        pictures[name] = base64.b64decode(data["image/png"])
        return f"![]({name})"
    if "text/html" in data:
        table = re.sub(r"<style scoped>.*?</style>", "", "".join(data["text/html"]), flags=re.DOTALL)  # of pandas
        return f'<div class="output">{table}</div>'
    text = "".join(output.get("text", data.get("text/plain", "")))
    return f"```{{.text .output}}\n{text.rstrip()}\n```" if text.strip() else ""


# ------------------------------------------------------------------ events of MkDocs


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the tutorials, which are notebooks in the repository."""
    for path in sorted((DOCS / "tutorials").glob("*.ipynb")):
        files.remove(files.src_uris[f"tutorials/{path.name}"])
        text, pictures = tutorial(path)
        files.append(File.generated(config, f"tutorials/{path.stem}.md", content=text))
        for name, content in pictures.items():
            files.append(File.generated(config, f"tutorials/{name}", content=content))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Fill in the generated parts, and let links to what is not on the site lead to the repository."""
    markdown = re.sub(r"<!-- generated: (\w+) -->", lambda found: PARTS[found[1]](), markdown)
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def link(found: re.Match[str]) -> str:
        target, anchor = found[1], found[2] or ""
        in_repository = posixpath.normpath(posixpath.join(folder, target))
        if not in_repository.startswith("docs/") or in_repository.endswith(".py"):
            return f"]({REPOSITORY}/blob/main/{in_repository}{anchor})"
        return f"]({target.replace('.ipynb', '.md')}{anchor})"

    return re.sub(r"\]\((?!\w+:|#)([^)#\s]+)(#[^)]*)?\)", link, markdown)
