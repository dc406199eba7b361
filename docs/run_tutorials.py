"""Run tutorials and write their outputs into the notebooks, which the site shows.

python docs/run_tutorials.py                  # all of them
python docs/run_tutorials.py my_loss_is_nan   # one
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

TUTORIALS = Path(__file__).parent / "tutorials"


def execute(path: Path, folder: Path) -> nbformat.NotebookNode:
    """The notebook after its run in a folder.

    Args:
        path: The notebook.
        folder: Where it runs, and writes its files.

    Raises:
        nbclient.exceptions.CellExecutionError: If a cell fails; says which, with its error.
    """
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    options = {"timeout": 200, "kernel_name": "python3", "record_timing": False, "coalesce_streams": True}
    NotebookClient(notebook, resources=resources, **options).execute()
    return notebook


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Run tutorials and write their outputs into the notebooks.")
    names = sorted(path.stem for path in TUTORIALS.glob("*.ipynb"))
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(names)}")
    for name in parser.parse_args().names or names:
        path = TUTORIALS / f"{name}.ipynb"
        with tempfile.TemporaryDirectory() as folder:
            notebook = nbformat.writes(execute(path, Path(folder)))
        path.write_text(notebook.replace(f"{folder}/", "") + "\n")  # names of files, and not where they were this time
        print(path.name)


if __name__ == "__main__":
    main()
