"""README.md's file map is the tree, and its links lead somewhere."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def mapped() -> set[str]:
    """The paths of the file map: the first word of each line of the block below that heading."""
    block = README.split("## Where things are", 1)[1].split("\n\n    ", 1)[1].split("\n\n", 1)[0]
    return {line.split()[0] for line in block.splitlines()}


def test_the_file_map_is_the_tree() -> None:
    package = ROOT / "src" / "agentrl"
    folders = {f"src/agentrl/{path.parent.name}/" for path in package.glob("*/__init__.py")}
    others = {path for path in mapped() if not path.startswith("src/")}
    assert mapped() - others == folders
    for path in others:
        assert (ROOT / path).is_dir() == path.endswith("/"), path
        assert (ROOT / path).exists(), path


def test_links_lead_to_files_and_every_page_is_linked() -> None:
    targets = {target for target in re.findall(r"\]\(([^)#]+)", README) if "://" not in target}
    for target in targets:
        assert (ROOT / target).exists(), target
    assert {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} <= targets
