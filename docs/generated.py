"""The parts of the site that are made from code, from the tutorials and from other files of the repository; a hook of MkDocs.

A page asks for a part by a line that ends with a comment, ``<!-- generated: statistics -->``. The text before the comment is for readers of
the repository, where the part is not: it names the source. Links to files of the repository that are not on the site lead to the
repository; links to notebooks lead to their pages.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import math
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
from lightning_module_monitor.health.causes import CAUSES  # noqa: E402
from lightning_module_monitor.health.detector import Detector  # noqa: E402
from lightning_module_monitor.health.detectors import DETECTORS  # noqa: E402
from lightning_module_monitor.kinds import FACT_KIND  # noqa: E402
from lightning_module_monitor.statistics.registry import STATISTICS  # noqa: E402

REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Homepage"]


# ------------------------------------------------------------------ parts


def statistics() -> str:
    """A table of the built-in statistics: each row is a name and the docstring of its formula."""
    rows = [f"| `{name}` | {_sentence(formula(statistic))} |" for name, statistic in STATISTICS.items()]
    return "\n".join(["| statistic | formula |", "|---|---|", *rows])


def formula(statistic: object) -> str | None:
    """The docstring of the function that finishes a statistic; a histogram has none."""
    finish = getattr(statistic, "finish", type(statistic))
    return getattr(finish, "func", finish).__doc__  # the function of a partial


def _sentence(docstring: str | None) -> str:
    """The docstring as the cell of a table."""
    text = " ".join((docstring or "").split())
    return text.replace("``", "`")


def diagnoses() -> str:
    """A table of the diagnoses, in the order in which they are tried."""
    rows = [
        f"| {one.headline} (`{one.name}`) | {', '.join(map(_linked, one.evidence_for))}{f'; {one.needs}' if one.needs else ''} "
        f"| {one.evidence_against} | {one.advice} |"
        for one in CAUSES
    ]
    return "\n".join(["| diagnosis | evidence for | evidence against | try |", "|---|---|---|---|", *rows])


def detectors() -> str:
    """A table of the detectors, and a section for each."""
    header = ["| detector | reads | records | severity | recorded by default |", "|---|---|---|---|---|"]
    return "\n\n".join(["\n".join([*header, *map(_row, DETECTORS.values())]), *map(_section, DETECTORS.values())])


def _row(one: Detector) -> str:
    keys = (
        f"`{kinds[0]}/{'' if one.is_always_recorded else '.../'}{statistics[0]}`"
        for kinds, statistics in one.sources
        if kinds[0] != FACT_KIND
    )
    option = "yes" if one.is_by_default else f"`{one.recorded_by or f'health: {{watch: {one.name}}}'}`"
    return f"| {_linked(one.name)} | {', '.join(keys) or '-'} | {one.num_needed} | {one.severity} | {option} |"


def _section(one: Detector) -> str:
    part, silent = math.inf if one.rule is None else one.rule.unless_loss_falls, ""
    if math.isfinite(part):
        silent = f"while the training loss lies more than {100 * part:.0f} % below its first value"
    causes = ", ".join(f"`{cause.name}`" for cause in CAUSES if one.name in cause.evidence_for)
    lines = (("Measures", one.formula), ("Limit", one.limit), ("Silent", silent), ("Diagnoses", causes), ("Source", one.source))
    listed = (f"- **{name}:** {text[0].upper()}{text[1:].removesuffix('.')}." for name, text in lines if text)
    return "\n".join([f"### {one.name}", "", *listed])


def _linked(name: str) -> str:
    """The name of a finding, with a link to the section of its detector, where it has one."""
    return f"[`{name}`](#{name})" if name in DETECTORS else f"`{name}`"


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
    """The changelog without its title; its links are from the root of the repository."""
    return (ROOT / "CHANGELOG.md").read_text().partition("\n")[2].replace("](docs/", "](")


PARTS = {
    "changelog": changelog,
    "command_line": command_line,
    "data_flow": data_flow,
    "detectors": detectors,
    "diagnoses": diagnoses,
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
    markdown = re.sub(r"^.*<!-- generated: (\w+) -->$", lambda found: PARTS[found[1]](), markdown, flags=re.MULTILINE)
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def link(found: re.Match[str]) -> str:
        target, anchor = found[1], found[2] or ""
        in_repository = posixpath.normpath(posixpath.join(folder, target))
        if not in_repository.startswith("docs/") or in_repository.endswith(".py"):
            return f"]({REPOSITORY}/blob/main/{in_repository}{anchor})"
        return f"]({target.replace('.ipynb', '.md')}{anchor})"

    return re.sub(r"\]\((?!\w+:|#)([^)#\s]+)(#[^)]*)?\)", link, markdown)
